"""The blind benchmark: faults stand where they are said to, runs repeat, and a step has one name."""

import importlib.util
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import blind  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_run_repeats_itself_and_has_its_fault_in_its_data(tmp_path: Path) -> None:
    """Where nothing is wrong, the gap is below 0.1."""
    case = blind.run_case, "rollout shifted", (1, 1.0), 1, tmp_path
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # it changes its process
        found, again = (pool.submit(*case).result() for _ in range(2))
    assert found == again and found.begin in range(1, 6)
    assert float(found.why.split("gap of ")[1].split()[0]) > 0.5


def test_a_warning_comes_before_the_verdict_of_most_steps() -> None:
    said = [(3, "verdict", "token"), (4, "verdict", ""), (4, "warning", "late"), (4, "verdict", "token")]
    assert blind.name_of(said[:1]) == "token" and blind.name_of(said[1:2]) == "" and blind.name_of([]) is None
    assert blind.name_of([*said, (5, "warning", "late")]) == "late"
