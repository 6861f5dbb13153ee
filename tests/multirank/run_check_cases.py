"""Runs whose rollout has old weights on some ranks; they run inside the ranks of a cluster."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from actor_cases import train
from actors import Case
from verl import DataProto


def warned(case: Case, stale_ranks: tuple[int, ...], calls: int) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """The warnings after the last update, the state for a checkpoint, and the verdicts of the last update's events."""
    actors: list[Any] = []

    def change(batch: DataProto) -> None:
        columns = batch.batch
        generator = torch.Generator().manual_seed(dist.get_rank())
        old = columns["old_log_probs"]
        columns["ref_log_prob"] = old - torch.rand(old.shape, generator=generator)
        source = columns["ref_log_prob"] if dist.get_rank() in stale_ranks else old
        columns["rollout_log_probs"] = source + 0.01 * torch.randn(old.shape, generator=generator)

    detection = {"spike_detection": True, "grad_norm_threshold": 1e-6, "bisect_budget_steps": 2}
    train(case, calls=calls, prepare=actors.append, change_batch=change, **detection)
    gradloc = actors[0].gradloc
    return gradloc.warnings, gradloc.state_dict()["run_checks"], [event["verdict"] for event in gradloc.events]
