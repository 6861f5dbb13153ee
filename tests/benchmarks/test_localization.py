"""The benchmark of the localization: that its figures are those of brute force."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.slow

# Searches in the events of `test_natural_events_of_a_real_actor` with verl 0.7.0: their passes, then each named
# token by (rank, micro-batch, index) with its gradient norm in τ. Two verl releases need two environments, so no test
# can run both: each release is held against this table instead. The weights and batches of the events come from seeds,
# and float32's rounding is far below the margins between norms and thresholds.
SEARCHES = [
    (1, {(1, 0, 15): 4.1233}),
    (2, {(1, 0, 13): 4.4782, (1, 0, 15): 5.6227}),
    (3, {(1, 0, 15): 4.1233, (1, 1, 8): 4.0342, (1, 1, 18): 2.1013}),
    (
        5,
        {
            (1, 0, 13): 4.4782,
            (1, 0, 15): 5.6227,
            (1, 1, 3): 2.6812,
            (1, 1, 8): 5.5012,
            (1, 1, 11): 3.0754,
            (1, 1, 18): 2.8655,
        },
    ),
    (4, {}),
    (12, {}),
]


@pytest.mark.target(version="0.9.1")
def test_natural_events_of_a_real_actor(tmp_path: Path) -> None:
    """In sparse ones most tokens cannot move."""
    records = tmp_path / "records"
    command = [sys.executable, BENCHMARKS / "localization.py", "--json", records, "--events", "1", "--tokens", "32"]
    command += ["--world-sizes", "2", "--micro-batches", "2", "--until", "explained", "--excess", "1.1", "1.5"]
    command += ["--over-threshold", "1", "2", "--kinds", "natural", "coherent", "sparse"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in records.read_text().splitlines()]
    cells = [("natural", over, x) for over in (1, 2) for x in (1.1, 1.5)]
    cells += [("coherent", 1, 1.5), ("coherent", 2, 1.5), *(("sparse", *cell) for _, *cell in cells)]
    assert [(e["kind"], e["over_threshold"], e["x"]) for e in events] == cells
    for event in events:
        # The event's norms against brute force on an unsharded copy: float32, in another order.
        assert event["gradloc"]["norm_error"] < 1e-4
        assert event["gradloc"]["wrong"] == 0
        assert not event["gradloc"]["budget_spent"]
        if event["kind"] == "coherent":
            assert event["coherence"] > 2 and event["largest"] <= 1 and not event["explainable"]
            assert event["gradloc"]["diagnosis"] == "diffuse" and not event["gradloc"]["explained_truth"]
        else:
            assert event["largest"] > 1 and event["explainable"]
            assert event["gradloc"]["explained"] and event["gradloc"]["explained_truth"]
            assert 1 <= event["gradloc"]["named"] <= event["over"]
    assert "| natural | 1.1 | 2 | 2 | 1 |" in done.stdout
    for event, (passes, norms) in zip(events, SEARCHES, strict=False):
        assert event["gradloc"]["passes"] == passes
        named = {tuple(place): norm for *place, norm in event["gradloc"]["tokens"]}
        assert named == pytest.approx(norms, rel=1e-4)
