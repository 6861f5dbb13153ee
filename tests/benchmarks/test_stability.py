"""The benchmark of spikes and clips in its shortest form: that it runs, and that clips do there what they are for."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from stability import QUICK  # noqa: E402

pytestmark = pytest.mark.slow
FIRST = QUICK.events[0][0]  # the step with the first spike


def test_stability(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    names = ["global", "both", "drop"]
    command = [sys.executable, BENCHMARKS / "stability.py", "--quick", "--seeds", "0", "--results", results]
    done = subprocess.run([*command, "--rows", *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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
    assert f"| {runs['drop']['token']['distance']:.2f} · " in done.stdout
