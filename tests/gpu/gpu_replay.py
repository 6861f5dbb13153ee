"""A spike's bundle, replayed on the GPU: its norms are the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_replay_ranks
from actors import Case
from gpu_search import ONE, THREE, cases
from test_actor import Launch


@cases(
    Case(kl=True, entropy=True, rollout=True, planted=THREE),
    Case("fsdp1", tied=True, dynamic=True, planted=THREE),
    Case(packed=True, checkpointing=True, planted=ONE),
    Case(model="lora", planted=ONE),
)
def test_a_spike_replays(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Case) -> None:
    test_replay_ranks.test_a_sharded_spike_replays_in_one_process(launch, tmp_path, capsys, 1, case)


def test_a_half_precision_spike_replays_within_its_rounding(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(precision="bfloat16", planted=ONE)
    test_replay_ranks.check_half_precision(launch, tmp_path, capsys, 1, case)
