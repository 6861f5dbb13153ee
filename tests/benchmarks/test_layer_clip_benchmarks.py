"""The benchmarks of LayerClip in their shortest forms: that they run, and that what they print is what they ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from rival_clips import AdaGC, ZClip  # noqa: E402

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str) -> list[list[str]]:
    """The rows of the tables that a benchmark prints."""
    command = [sys.executable, BENCHMARKS / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
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
    # After its warm-up AdaGC cuts some tensors, and so changes the run even without a spike.
    assert runs["adagc"]["no"]["rewards"] != runs["global"]["no"]["rewards"]
    assert 0 < max(runs["adagc"]["no"]["clipped"]) <= 1
    # GradLoc sees them, and finds the planted tokens; without the spike nothing happens.
    assert sum(clean["events"]) == 0 and sum(runs["fixed+drop"]["token"]["events"]) == 3
    ends = {row[0]: row[2] for row in rows if len(row) == 9}
    assert ends["global"] == f"{runs['global']['sequence']['rewards'][-1]:.3f}"  # of the last of these tables


def norms_after(rival: AdaGC | ZClip, *norms: float) -> tuple[list[float], float]:
    """The norms of tensors after a clip, and what it returns."""
    gradients = [torch.tensor([0.6 * norm, 0.8 * norm]) for norm in norms]
    cut = rival.clip(gradients)
    return [gradient.norm().item() for gradient in gradients], cut


def test_adagc() -> None:
    rival = AdaGC(warmup_clip=5.0, warmup_steps=3, ratio=1.05, beta=0.98)
    assert norms_after(rival, 0.0, 0.0) == ([0.0, 0.0], 0.0)  # does not count
    assert norms_after(rival, 3.0, 4.0) == (pytest.approx([3, 4]), 0.0)
    assert norms_after(rival, 6.0, 8.0) == (pytest.approx([3, 4]), 0.0)  # the shared norm is 5
    assert norms_after(rival, 4.0, 2.0) == (pytest.approx([4, 2]), 0.0)
    # The averages are now the smallest norms, 3 and 2, so that the bounds are 3.15 and 2.1.
    assert norms_after(rival, 300.0, 1.0) == (pytest.approx([3.15, 1]), 0.5)
    averages = [0.98 * 3 + 0.02 * 3.15, 0.98 * 2 + 0.02 * 1]
    assert norms_after(rival, 300.0, 300.0) == (pytest.approx([1.05 * value for value in averages]), 1.0)


def test_zclip() -> None:
    rival = ZClip(threshold=2.5, alpha=0.97, warmup_steps=2)
    assert norms_after(rival, 3.0, 4.0) == (pytest.approx([3, 4]), 0.0)  # norm 5
    assert norms_after(rival, 0.0, 7.0) == (pytest.approx([0, 7]), 0.0)
    # The mean is 6, the deviation 1: 8 is under 8.5; the spike of 10 deviations is cut to 2.5²/10 deviations.
    assert norms_after(rival, 0.0, 8.0) == (pytest.approx([0, 8]), 0.0)
    mean = 0.97 * 6 + 0.03 * 8
    deviation = (0.97 * 1 + 0.03 * (8 - mean) ** 2) ** 0.5
    assert norms_after(rival, 0.0, mean + 10 * deviation) == (pytest.approx([0, mean + 0.625 * deviation]), 1.0)


def test_layer_clip_cost() -> None:
    rows = run("layer_clip_cost.py", "--tiny", "--rounds", "1")
    seconds = {row[0]: float(row[2].split()[0]) for row in rows[1:]}
    assert len(seconds) == 3
    assert all((value == 0) == (name == "stock") for name, value in seconds.items())
