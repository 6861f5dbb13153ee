"""The benchmark of the localization: that it compares what it says it compares."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import localization_simulation  # noqa: E402
from published_schedule import Part, localize  # noqa: E402


def formula(world_size: int, micro_batches: int, tokens: int) -> float:
    """The passes of the published schedule for one culprit, with its restoring."""
    return micro_batches + 2 * math.log2(world_size) + 2 * math.log2(tokens) + micro_batches


@pytest.mark.parametrize(("world_size", "micro_batches", "tokens"), [(1, 1, 1), (1, 3, 8), (4, 2, 64), (8, 1, 2)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_published_schedule(world_size: int, micro_batches: int, tokens: int, count: int) -> None:
    places = [(r, m, t) for r in range(world_size) for m in range(micro_batches) for t in range(tokens)]
    culprits = set(places[:: max(1, len(places) // count)][:count] if count else [])
    passes = 0

    def over(part: Part) -> bool:
        nonlocal passes
        passes += 1
        return any(r in part.ranks and m == part.micro_batch and t in part.tokens for r, m, t in culprits)

    assert set(localize(over, world_size, micro_batches, tokens)) == culprits
    if count == 1:
        assert passes + micro_batches == formula(world_size, micro_batches, tokens)


@pytest.mark.parametrize("kind", ["suspected", "unsuspected", "several", "hidden"])
def test_the_simulation(kind: str) -> None:
    for result in localization_simulation.solve(world_size=4, tokens=32, level=1 / 18, count=3, seed=1, kind=kind):
        assert result.wrong == 0
        assert result.gradloc["clear"] == result.published["clear"] == result.planted["clear"]
        if kind in ("suspected", "unsuspected"):
            assert result.published_passes == formula(4, localization_simulation.MICRO_BATCHES, 32)


def test_planted_events_of_a_real_actor(tmp_path: Path) -> None:
    records = tmp_path / "records"
    command = [sys.executable, BENCHMARKS / "localization.py", "--parts", "events", "--json", records, "--events", "1"]
    sizes = ["--world-sizes", "2", "--micro-batches", "2", "--tokens", "16", "--sample", "8"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in records.read_text().splitlines()]
    assert [event["kind"] for event in events] == ["suspected", "unsuspected", "several", "mixed"]
    for event in events:
        assert event["gradloc"]["wrong"] == event["published"]["wrong"] == 0
        assert event["gradloc"]["passes"] > 0
        assert event["restored"] < 1e-5
        assert "clear" not in event["gradloc"]["missed"] + event["published"]["missed"]
    for event in events[:2]:
        assert event["published"]["passes"] == formula(2, 2, 16)
    assert "| 2 | 2 | 16 |" in done.stdout
