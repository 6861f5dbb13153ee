"""The benchmark of the localization: that its figures are those of brute force."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/localization.py"
pytestmark = pytest.mark.slow


@pytest.mark.target(version="0.9.1")
def test_natural_events_of_a_real_actor(tmp_path: Path) -> None:
    records = tmp_path / "records"
    command = [sys.executable, BENCHMARK, "--json", records, "--events", "1", "--tokens", "32"]
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
        assert event["gradloc"]["wrong"] == 0 and not event["gradloc"]["budget_spent"]
        if event["kind"] == "coherent":
            assert event["coherence"] > 2 and event["largest"] <= 1 and not event["explainable"]
            assert event["gradloc"]["diagnosis"] == "diffuse" and not event["gradloc"]["explained_truth"]
        else:
            assert event["largest"] > 1 and event["explainable"]
            assert event["gradloc"]["explained"] and event["gradloc"]["explained_truth"]
            assert 1 <= event["gradloc"]["named"] <= event["over"]
    assert "| natural | 1.1 | 2 | 2 | 1 |" in done.stdout
