"""Runs with a remedy switched on, which a replay's table of remedies is held against."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import Run, train
from actors import Case, build_actor, events_of, local
from batches import build_batch
from oracle import Unit
from replay_cases import save_model, spiked
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.gradloc.threshold import Threshold
from verl.workers.config import LayerClipConfig, TokenClipConfig

# The culprit's probability in training over that in the rollout, as a logarithm; and those of some ordinary tokens.
CULPRIT_LOG_RATIO, OTHER_LOG_RATIO = -2.0, 1.0
# Wherever a run has a spike at all.
EVERY = 1e-6
# Nowhere.
NEVER = 1e30


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
    case: Case,
    correction: dict[str, Any] | None = None,
    loss_mode: str | None = None,
    settings: dict[str, Any] | None = None,
) -> tuple[dict[tuple[int, int], float], float]:
    """The real update with a remedy, and with these settings of the actor.

    Returns:
        tuple: Of its first mini-batch, the norm of each micro-batch's gradient by (rank, index), and how many response
            tokens it has on all ranks.
    """
    case = dataclasses.replace(case, loss_mode=loss_mode or case.loss_mode)
    tokens = torch.zeros(())

    def change(batch: DataProto) -> None:
        if correction is None:
            mismatch(batch)
        else:
            corrected(batch, correction)
        tokens.copy_(batch.batch["response_mask"][: case.mini_batch].sum())

    detection = {"spike_detection": True, "grad_norm_threshold": EVERY, "bisect_budget_steps": 2}
    run = train(case, change_batch=change, **detection, **(settings or {}))
    dist.all_reduce(tokens)
    # Without any gradient there is no event.
    events = [event for event in json.loads(run.events[0]) if (event["epoch"], event["mini_batch"]) == (0, 0)]
    norms = {(unit["rank"], unit["micro_batch"]): float(unit["norm"]) for event in events for unit in event["units"]}
    return norms, float(tokens)


def recorded(case: Case, directory: str, layer_clip: Any = None) -> tuple[list[Unit], float, Run]:
    """A run with a spike, and its bundle; perhaps with LayerClip on."""
    options = {} if layer_clip is None else {"layer_clip": layer_clip}
    return spiked(case, directory, change_batch=mismatch, **options)


def step_norm(case: Case, settings: dict[str, Any]) -> float:
    """The norm of the first gradient that the optimizer gets; of one rank."""
    assert dist.get_world_size() == 1
    run = train(case, change_batch=mismatch, **settings)
    return torch.stack([gradient.norm() for gradient in run.gradients[0]]).norm().item()


def after_warm_up(case: Case, directory: str) -> list[tuple[dict[str, Any], float]]:
    """A run that keeps a bundle, one with TokenClip and one with LayerClip, which have learned from 20 updates.

    The planted token, of rank 0, is its response's only one. The weights stay as they are.

    Returns:
        list: Of each, the event of the spiked update, with every micro-batch, and the norm that the optimizer gets, of
            this rank's part.
    """
    save_model(case, Path(directory))
    batches = [build_batch(case, dist.get_rank(), seed) for seed in (*range(1, 21), 0)]
    ((rank, row, position),) = case.planted
    if dist.get_rank() == rank:
        batches[-1].batch["response_mask"][row] = 0.0
        batches[-1].batch["response_mask"][row, position] = 1.0
    found = []
    for options in (
        {"bisect_dump_dir": f"{directory}/dump", "spike_replay": 1, "token_clip": TokenClipConfig(True, "log")},
        {"token_clip": TokenClipConfig(enable=True)},
        {"layer_clip": LayerClipConfig(enable=True)},
    ):
        limits = {"grad_norm_threshold": NEVER, "bisect_budget_steps": 2, "grad_clip": 1e9}
        actor = build_actor(case, spike_detection=True, **limits, **options)
        squares = torch.zeros(())

        def look(optimizer: torch.optim.Optimizer, *_: Any, squares: torch.Tensor = squares) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            squares.copy_(sum(local(p.grad).square().sum() for p in parameters))

        actor.actor_optimizer.register_step_pre_hook(look)
        for group in actor.actor_optimizer.param_groups:
            group["lr"] = 0.0
        for batch in batches[:-1]:
            actor.update_policy(copy.deepcopy(batch))
        actor.gradloc._threshold = Threshold(EVERY)
        actor.update_policy(copy.deepcopy(batches[-1]))
        found.append((events_of(actor)[0], float(squares.sqrt())))
    return found
