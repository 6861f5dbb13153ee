"""The blind benchmark: faults stand where they are said to, runs repeat, and its table counts names."""

import importlib.util
import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import blind  # noqa: E402
from blind_faults import FAULTS, HEALTHY, ROWS  # noqa: E402

from gradloc.judge import identities  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_run_repeats_itself_and_has_its_fault_in_its_data(tmp_path: Path) -> None:
    """Where nothing is wrong, the gap is below 0.1."""
    case = blind.run_case, "rollout shifted", (1, 1.0), 1, tmp_path
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # it changes its process
        found, again = (pool.submit(*case).result() for _ in range(2))
    assert found == again and found.begin in range(1, 6)
    assert float(found.why.split("gap of ")[1].split()[0]) > 0.5


IDENTITIES = {identity.name for identity in identities.IDENTITIES}
FACTS = {"advantage", "weight", "kl", "entropy"}


def test_each_kind_has_its_row_and_each_identity_three_kinds() -> None:
    assert len(FAULTS) >= 40 and len(HEALTHY) >= 77 and FAULTS.keys().isdisjoint(HEALTHY)
    assert [row[0] for row in ROWS] == list(FAULTS) and all(len(row) == 5 and row[4] for row in ROWS)
    kinds = Counter(place for fault in FAULTS.values() for place in fault.identity.split())
    assert kinds.keys() == {*IDENTITIES, *FACTS, "changes"}
    assert min(kinds[name] for name in (*IDENTITIES, "changes")) >= 3


def test_a_warning_comes_before_the_verdict_of_most_steps() -> None:
    said = [(3, "verdict", "token"), (4, "verdict", ""), (4, "warning", "late"), (4, "verdict", "token")]
    assert blind.name_of(said[:1]) == "token" and blind.name_of(said[1:2]) == "" and blind.name_of([]) is None
    assert blind.name_of([*said, (5, "warning", "late")]) == "late"
    placed = [(5, "verdict", "token", "loss"), (5, "warning", "late", "rollout_log_probs"), (6, "verdict", "", "loss")]
    assert blind.name_of(placed, 3) == "rollout_log_probs" and blind.name_of(said, 3) == ""


def test_the_table_counts_what_is_named(capsys: pytest.CaptureFixture) -> None:
    named = {
        "tail padded with 0": ["misaligned", "unsampled", "token", "", None],
        "optimizer state lost": ["", "token"],
        "bf16": [None, "", "misaligned"],
    }
    runs = {
        f"{kind} | 0 | {seed}": {"name": name, "why": "a gap", "said": [], "over_natural": seed < 3}
        for kind, names in named.items()
        for seed, name in enumerate(names)
    }
    runs["fp8 | 0 | 0"] = {**runs["bf16 | 0 | 1"], "said": [(2, "verdict", ""), (3, "verdict", "token")]}
    runs["tail padded with 0 | 0 | 0"]["said"] = [
        (2, "warning", "misaligned"),
        (3, "verdict", "kl"),
        (4, "verdict", ""),
    ]
    runs["tail padded with 0 | 0 | 1"]["said"] = [(2, "warning", "unsampled"), (2, "warning", "misaligned")]
    runs["tail padded with 0 | 0 | 2"]["said"] = [(2, "warning", "token", "rollout_log_probs")]
    runs["tail padded with 0 | 0 | 3"]["said"] = [(2, "warning", "", "loss")]
    blind.print_tables(runs)
    printed = capsys.readouterr().out
    assert "| tail padded with 0 | misaligned | misaligned 1 | unsampled 1 | token 1 | 1 | 1 | 1 |" in printed
    assert "Placed at an identity that breaks: 1." in printed
    assert "- tail padded with 0 | 0 | 4: nothing; a gap" in printed and "no known cause; a gap" in printed
    assert "Of those right or defensible, 1 have a line with a wrong name as well." in printed
    assert "Over a natural spike: 5, of which 3 right or defensible." in printed
    assert (
        "Faults: 7; " in printed
        and "right 2" in printed
        and "Healthy: 4, 2 with a bug's name, 0 with any warning." in printed
    )


def test_an_identity_s_own_name_is_right_where_there_is_no_other() -> None:
    assert blind.judged("dropout in the reference", "reference") == "right"
    assert blind.judged("tail padded with 0", "rollout_log_probs") == "defensible"
    assert (
        blind.judged("dropout in the reference", None) == "silent"
        and blind.judged("optimizer state lost", None) == "right"
    )
