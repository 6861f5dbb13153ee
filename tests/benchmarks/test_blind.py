"""The blind benchmark: what it plants is there, a healthy run has none of it, and its table counts names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import blind  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_run_is_told_by_its_lines_and_drawn_again_the_same(tmp_path: Path) -> None:
    ordinary = blind.run_case("bf16", None, 1, tmp_path)
    found = [blind.run_case("rollout shifted", (1, 1.0), 1, tmp_path) for _ in range(2)]
    assert found[0] == found[1] and found[0].begin in range(1, 6)
    gaps = [float(each.why.split("gap of ")[1].split()[0]) for each in (ordinary, found[0])]
    assert gaps[0] < 0.1 < 0.5 < gaps[1]


def test_the_name_is_that_of_most_steps_and_a_warning_comes_before_a_verdict() -> None:
    said = [(3, "verdict", "token"), (4, "verdict", ""), (4, "warning", "late"), (4, "verdict", "token")]
    assert blind.name_of(said[:1]) == "token" and blind.name_of(said[1:2]) == "" and blind.name_of([]) is None
    assert blind.name_of([*said, (5, "warning", "late")]) == "late"
