"""What a spike leads to, held against an unpatched actor whose forward detaches the planted tokens."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import (
    IDENTITY_THRESHOLD,
    PROMPT,
    Case,
    Run,
    brute_force,
    build_actor,
    build_batch,
    compare_runs,
    local,
    stock_dp_actor,
    train,
)

DETECTION = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "bisect_budget_steps": 100}


def skip(case: Case) -> tuple[dict[str, bool], Run]:
    """Two calls with a spike in the first, against an unpatched actor that sees only the second."""
    run = train(case, calls=2, spike_action="skip", **DETECTION)
    stock = build_actor(case, stock_dp_actor())
    metrics = stock.update_policy(build_batch(case, dist.get_rank(), seed=1))
    parameters = [local(p) for p in stock.actor_module.parameters()]
    return {
        "parameters": all(map(torch.equal, run.parameters, parameters)),
        "grad_norm": metrics["actor/grad_norm"] == run.metrics[1]["actor/grad_norm"],
        "steps": len(run.gradients) == 1,
    }, run


def drop(case: Case) -> tuple[list[float], Run]:
    """The relative distance, for every step, from the gradient of an actor that detaches the planted tokens."""

    def prepare(actor: Any) -> None:
        batch = build_batch(case, dist.get_rank())
        places = [(row, position) for rank, row, position in (*case.planted, *case.nan) if rank == dist.get_rank()]
        forward = actor._forward_micro_batch

        def detaching_forward(micro_batch: dict[str, Any], *arguments: Any, **options: Any) -> tuple:
            entropy, log_prob = forward(micro_batch, *arguments, **options)
            keep = torch.ones_like(log_prob, dtype=torch.bool)
            for row, position in places:
                here = (micro_batch["input_ids"] == batch.batch["input_ids"][row]).all(-1)
                keep[here, position] = False
            log_prob = torch.where(keep, log_prob, log_prob.detach())
            return None if entropy is None else torch.where(keep, entropy, entropy.detach()), log_prob

        actor._forward_micro_batch = detaching_forward

    run = train(case, spike_action="drop", **DETECTION)
    stock = train(case, stock_dp_actor(), prepare=prepare)
    distances = []
    for ours, theirs in zip(run.gradients, stock.gradients, strict=True):
        gap = torch.stack([(a - b).square().sum() for a, b in zip(ours, theirs, strict=True)]).sum()
        whole = torch.stack([b.square().sum() for b in theirs]).sum()
        sums = torch.stack([gap, whole])
        dist.all_reduce(sums)
        distances.append(float((sums[0] / sums[1]).sqrt()))
    return distances, run


def broken_weights(case: Case) -> tuple[dict[str, bool], Run]:
    """Every weight is NaN; an unpatched actor leaves its steps out, too."""

    def prepare(actor: Any) -> None:
        with torch.no_grad():
            for parameter in actor.actor_module.parameters():
                local_part(parameter).fill_(math.nan)

    run = train(case, prepare=prepare, **DETECTION)
    return {"no step": run.gradients == []}, run


def misaligned(case: Case, shift: float) -> tuple[float, str, list[str]]:
    """Rollout log-probs that are all off by `shift` nats.

    Returns:
        tuple: The logged share, the culprits' sources, and the actor's warnings.
    """
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("verl.utils.gradloc.locator").addHandler(handler)
    actor = build_actor(case, **DETECTION)
    batch = build_batch(case, dist.get_rank())
    batch.batch["rollout_log_probs"] -= shift * batch.batch["response_mask"]
    metrics = actor.update_policy(batch)
    sources = [culprit["source"] for event in actor.gradloc.events for culprit in event["culprits"]]
    return metrics["actor/gradloc/misaligned_share"], json.dumps(sources), warnings


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def broken_activation(case: Case, rank: int, row: int, position: int) -> tuple[dict[str, bool], Run]:
    """The embedding of one response token comes out as NaN."""

    def prepare(actor: Any) -> None:
        ids = build_batch(case, rank).batch["input_ids"][row]

        def spoil(_: torch.nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            tokens = arguments[0]
            here = (tokens == ids[: tokens.shape[1]]).all(-1)
            if here.any() and tokens.shape[1] > PROMPT + position:
                output = output.clone()
                output[here, PROMPT + position] = math.nan
            return output

        embeddings = [m for m in actor.actor_module.modules() if isinstance(m, torch.nn.Embedding)]
        embeddings[0].register_forward_hook(spoil)

    stock = train(case, stock_dp_actor(), prepare=prepare)
    run = train(case, prepare=prepare, **DETECTION)
    return compare_runs(run, stock), run


def diffuse(case: Case) -> tuple[float, float, str]:
    """A batch of one token over and over, and a threshold over every token's norm but under some unit's.

    Returns:
        tuple: The largest token norm, the largest unit's token equivalent, and the actor's events.
    """
    batch = build_batch(case, dist.get_rank())
    mask = batch.batch["attention_mask"]
    batch.batch["input_ids"] = torch.full_like(mask, 5) * mask
    batch.batch["responses"] = batch.batch["input_ids"][:, PROMPT:]
    batch.batch["advantages"] = batch.batch["response_mask"].clone()
    units, _ = brute_force(case, batch, tokens=True)
    token = max(token.norm for unit in units for token in unit.each)
    unit = max(unit.norm / unit.weight for unit in units)
    actor = build_actor(case, spike_detection=True, grad_norm_threshold=1.01 * token)
    actor.update_policy(batch)
    return token, unit, json.dumps(actor.gradloc.events)
