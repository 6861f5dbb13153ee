"""Rules that are simulated: culprits by chance name no reward, and a mismatch seldom begins at a turn by chance."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import simulated_nulls  # noqa: E402

pytestmark = pytest.mark.slow


def test_rules_that_are_simulated() -> None:
    """Culprits by chance name no reward; a mismatch of most tokens now and then begins at a turn."""
    assert all(simulated_nulls.misfires(way, 30, 0) == 0 for way in simulated_nulls.WAYS)
    assert simulated_nulls.retokenized(0.01, 2000, 0) == 0 < simulated_nulls.retokenized(0.5, 2000, 0) < 20
    rows = simulated_nulls.mini_batch(random.Random(1))
    drawn = simulated_nulls.culprits("the largest wrong ones", rows, random.Random(1))
    assert 3 <= len(drawn) == len(set(drawn)) and all(rows[i].advantage > 0 for i in drawn)
