"""Runs with a remedy switched on, which a replay's table of remedies is held against."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import Run, train
from actors import IDENTITY_THRESHOLD, Case, build_actor
from batches import build_batch
from oracle import Unit
from replay_cases import save_model, spiked
from token_clip_cases import CALLS, SPIKED, WARMUP
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import TokenClipConfig

# The culprit's probability in training over that in the rollout, as a logarithm; and those of some ordinary tokens.
CULPRIT_LOG_RATIO, OTHER_LOG_RATIO = -2.0, 1.0
# Wherever a run has a spike at all.
EVERY = 1e-6


@dataclasses.dataclass
class WithRemedy:
    """What a run with a remedy left of its first mini-batch.

    Args:
        norms (dict): The norm of each micro-batch's gradient, by (rank, index).
        tokens (float): How many response tokens its mini-batch has on all ranks.
    """

    norms: dict[tuple[int, int], float]
    tokens: float


def mismatch(batch: DataProto) -> None:
    """Data that most remedies change.

    The rollout disagrees with training about the culprit, and about each third token of the even rows. In the odd rows,
    training has moved from the old policy, also where that raises the probability of what had a low reward.
    """
    places = torch.arange(batch.batch["old_log_probs"].shape[1])
    moved = torch.where(places % 2 == 0, 0.15, -0.15) + 0.45 * (places % 4 == 0)
    batch.batch["old_log_probs"][1::2] -= moved * batch.batch["response_mask"][1::2]
    advantages = batch.batch["advantages"][1::2]
    low = (places % 4 == 0) & (advantages > 0) & (advantages < 100)
    advantages[low] = -advantages[low]
    difference = torch.zeros_like(batch.batch["old_log_probs"])
    difference[::2, ::3] = OTHER_LOG_RATIO
    difference[batch.batch["advantages"].abs() > 100] = CULPRIT_LOG_RATIO
    rollout = batch.batch["old_log_probs"] - difference * batch.batch["response_mask"]
    batch.batch["rollout_log_probs"] = rollout


def corrected(batch: DataProto, options: dict[str, Any]) -> None:
    """What verl's trainer makes of a batch with these settings of `algorithm.rollout_correction`."""
    mismatch(batch)
    compute_rollout_correction_and_add_to_batch(batch, RolloutCorrectionConfig(**options))


def with_remedy(
    case: Case, correction: dict[str, Any] | None = None, loss_mode: str | None = None, **settings: Any
) -> WithRemedy:
    """The real update with a remedy."""
    case = dataclasses.replace(case, loss_mode=loss_mode or case.loss_mode)
    tokens = torch.zeros(())

    def change(batch: DataProto) -> None:
        if correction is None:
            mismatch(batch)
        else:
            corrected(batch, correction)
        tokens.copy_(batch.batch["response_mask"][: case.mini_batch].sum())

    run = train(
        case, change_batch=change, spike_detection=True, grad_norm_threshold=EVERY, bisect_budget_steps=2, **settings
    )
    dist.all_reduce(tokens)
    # Without any gradient there is no event.
    events = [event for event in json.loads(run.events[0]) if (event["epoch"], event["mini_batch"]) == (0, 0)]
    norms = {(unit["rank"], unit["micro_batch"]): float(unit["norm"]) for event in events for unit in event["units"]}
    return WithRemedy(norms, float(tokens))


def recorded(case: Case, directory: str, **settings: Any) -> tuple[list[Unit], float, Run]:
    """A run with a spike, and its bundle."""
    return spiked(case, directory, change_batch=mismatch, **settings)


def step_norm(case: Case, **settings: Any) -> float:
    """The norm of the first gradient that the optimizer gets; of one rank."""
    assert dist.get_world_size() == 1
    run = train(case, change_batch=mismatch, **settings)
    return torch.stack([gradient.norm() for gradient in run.gradients[0]]).norm().item()


def recorded_clipped(case: Case, directory: str, clip: Any) -> tuple[list[Unit], float, Run]:
    """The same with LayerClip on."""
    return recorded(case, directory, layer_clip=clip)


def with_and_without_token_clip(case: Case, directory: str) -> list[list[dict[str, Any]]]:
    """The events of a spiked update: of a run that keeps a bundle, and of one with TokenClip, where all are spikes.

    Ordinary updates come before it, from which TokenClip learns what is usual. The weights stay as they are.
    """
    if dist.get_rank() == 0:
        save_model(case, Path(directory))
    dist.barrier()
    kept = {"grad_norm_threshold": IDENTITY_THRESHOLD, "bisect_dump_dir": f"{directory}/dump", "spike_replay": 1}
    clipped = {
        "grad_norm_threshold": EVERY,
        "bisect_budget_steps": 2,
        "token_clip": TokenClipConfig(enable=True, warmup_steps=WARMUP),
    }
    events = []
    for options in (kept, clipped):
        actor = build_actor(case, spike_detection=True, **options)
        for group in actor.actor_optimizer.param_groups:
            group["lr"] = 0.0
        for seed in CALLS[: SPIKED + 1]:
            actor.update_policy(build_batch(case, dist.get_rank(), seed))
        events.append(actor.gradloc.events)
    return events
