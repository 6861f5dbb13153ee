"""The benchmark of the checks of a run: planted causes are told from healthy runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from run_warnings import CAUSES, HEALTHY, Planted, described, run  # noqa: E402
from sums_task import learn_from_examples  # noqa: E402

pytestmark = pytest.mark.slow
EXPECTED = {"never synced": "stale_weights", "one worker": "partly_stale", "temperature 0.6": "other_log_probs"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield learn_from_examples(1, 0.1)
    dist.destroy_process_group()


@pytest.mark.parametrize("planted", [HEALTHY[1], HEALTHY[-1], CAUSES[0], CAUSES[2], CAUSES[4]], ids=lambda p: p.name)
def test_planted_causes_are_told_from_healthy_runs(planted: Planted, weights: dict) -> None:
    figures = run(planted, weights, 1, 6)
    warned = {name for step in figures for name in step["warnings"]}
    name = EXPECTED.get(planted.name)
    assert warned == ({name} if name else set())
    assert ("no warning" in described(figures)) == (name is None)
