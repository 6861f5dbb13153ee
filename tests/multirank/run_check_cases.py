"""Runs whose rollout has old weights on some ranks; they run inside the ranks of a cluster."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import train
from actors import Case
from verl import DataProto


def warned(
    case: Case, stale_ranks: tuple[int, ...], calls: int, late: int = 0, written: str = ""
) -> tuple[list[Any], dict[str, Any], list[Any], dict[str, float]]:
    """What is said after the last update of several.

    The policy moves away from the reference with each update, as training does: in the first one they are the same.

    Args:
        case (Case): What is trained.
        stale_ranks (tuple): Whose rollout has the reference's weights.
        calls (int): The number of updates.
        late (int): By how many positions the rollout's lists are late: a token in front has a log-prob, too.
        written (str): A layer whose weights on the last rank are tripled before the last update.

    Returns:
        tuple: The warnings, the state for a checkpoint, the verdicts of the last update's events, and its metrics.
    """
    actors: list[Any] = []
    updates = itertools.count()

    def change(batch: DataProto) -> None:
        columns, update = batch.batch, next(updates)
        if written and (update, dist.get_rank()) == (calls - 1, dist.get_world_size() - 1):
            for name, parameter in actors[0].actor_module.named_parameters():
                if f"{written}." in name:
                    parameter.detach().mul_(3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        old = columns["old_log_probs"]
        columns["ref_log_prob"] = old - 0.5 * update * torch.rand(old.shape, generator=generator)
        source = columns["ref_log_prob"] if dist.get_rank() in stale_ranks else old
        columns["rollout_log_probs"] = source.roll(late, 1) + 0.01 * torch.randn(old.shape, generator=generator)

    detection = {"spike_detection": True, "grad_norm_threshold": 1e-6, "bisect_budget_steps": 2}
    train(case, calls=calls, prepare=actors.append, change_batch=change, **detection)
    gradloc = actors[0].gradloc
    verdicts = [event["verdict"] for event in gradloc.events]
    return gradloc.warnings, gradloc.state_dict()["run_checks"], verdicts, gradloc.metrics()
