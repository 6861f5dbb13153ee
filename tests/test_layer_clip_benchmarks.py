"""The benchmarks of LayerClip in their shortest forms: that they run, and that what they print is what they ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *arguments: str) -> list[list[str]]:
    """The rows of the tables that a benchmark prints."""
    command = [sys.executable, BENCHMARKS / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_stability(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    rows = run("stability.py", "--quick", "--seeds", "1", "--results", str(results))
    runs = json.loads(results.read_text())["runs"]["0"]
    for kinds in (runs["global"], runs["fixed+drop"]):
        rewards = kinds["no"]["rewards"]
        assert 0 < min(rewards) and max(rewards) < 1 and len(set(rewards)) == len(rewards)
        for kind in ("layer", "token", "sequence"):
            spiked = kinds[kind]["rewards"]
            # Sampling, too, is the same until the first spike, of step 11.
            assert spiked[:11] == rewards[:11] and spiked != rewards
    clean, layer = (runs["fixed+drop"][kind] for kind in ("no", "layer"))
    assert layer["clipped"][:10] == clean["clipped"][:10] and any(layer["clipped"])
    # GradLoc sees them, and finds the planted tokens; without the spike nothing happens.
    assert sum(clean["events"]) == 0 and sum(runs["fixed+drop"]["token"]["events"]) == 3
    ends = {row[0]: row[2] for row in rows if len(row) == 9}
    assert ends["global"] == f"{runs['global']['sequence']['rewards'][-1]:.3f}"  # of the last of these tables


def test_layer_clip_cost() -> None:
    rows = run("layer_clip_cost.py", "--tiny", "--rounds", "1")
    seconds = {row[0]: float(row[2].split()[0]) for row in rows[1:]}
    assert len(seconds) == 3
    assert all((value == 0) == (name == "stock") for name, value in seconds.items())
