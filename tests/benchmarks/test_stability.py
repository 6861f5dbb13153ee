"""The benchmark of spikes and clips in its shortest form: that it runs, and that what it prints is what it ran."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from stability import QUICK  # noqa: E402

pytestmark = pytest.mark.slow
FIRST = QUICK.events[0][0]  # the step with the first spike


def run(name: str, *arguments: str) -> list[list[str]]:
    """The rows of the tables that a benchmark prints."""
    command = [sys.executable, BENCHMARKS / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_stability(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    names = ["global", "both", "drop"]
    rows = run("stability.py", "--quick", "--seeds", "0", "--results", str(results), "--rows", *names)
    runs = {name: json.loads(results.read_text())["runs"][f"0 | {name}"] for name in names}
    for kinds in runs.values():
        rewards = kinds["no"]["rewards"]
        assert 0 < min(rewards) and max(rewards) < 1 and len(set(rewards)) == len(rewards)
        for kind in ("layer", "token", "sequence", "blow"):
            spiked = kinds[kind]["rewards"]
            # Sampling, too, is the same until the first spike.
            assert spiked[:FIRST] == rewards[:FIRST]
    for kind in ("layer", "token", "sequence", "blow"):
        assert runs["global"][kind]["rewards"] != runs["global"]["no"]["rewards"]
        # A factor of 1.1 leaves far less than the spikes do.
        assert 0 < 10 * runs["global"]["floor"]["distance"] < runs["global"][kind]["distance"]
    # LayerClip takes in the norms that are left, TokenClip drops the tokens of two of the three spikes at least.
    for kind in ("layer", "token", "sequence", "blow"):
        assert runs["both"][kind]["distance"] < 0.5 * runs["global"][kind]["distance"]
        assert kind == "layer" or sum(runs["both"][kind]["token_clip"]["actor/token_clip/cut"]) >= 2
    # GradLoc sees the planted tokens and removes them; without the spike nothing happens.
    assert sum(runs["drop"]["no"]["events"]) == 0 and sum(runs["drop"]["token"]["events"]) == 3
    assert runs["drop"]["token"]["distance"] < 0.1 * runs["global"]["token"]["distance"]
    tables: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row[1] == "step length":
            table = tables.setdefault(row[0], {})
        else:
            table[row[0]] = row[1:]
    assert tables["distance · lost"]["drop"][2].startswith(f"{runs['drop']['token']['distance']:.2f} · ")
    both = runs["both"]
    lost = round(mean(both["no"]["rewards"][FIRST:]) - mean(both["layer"]["rewards"][FIRST:]), 3) + 0.0
    assert tables["distance · lost"]["both"][1] == f"{both['layer']['distance']:.2f} · {lost:+.3f}"
