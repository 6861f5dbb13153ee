"""What a spike leads to, held against an unpatched actor whose forward detaches the planted tokens."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import Run, beginning, break_embedding, compare_runs, distance, ends_of, stock_run, train
from actors import (
    DEVICE,
    ENGINE,
    FIRST_RELEASE,
    IDENTITY_THRESHOLD,
    PROMPT,
    Case,
    build_actor,
    dp_actor,
    local,
    parts,
    stock_dp_actor,
)
from batches import build_batch
from oracle import brute_force
from verl import DataProto

DETECTION = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "bisect_budget_steps": 100}


def compared(
    case: Case, calls: int = 2, both: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, bool], Run]:
    """A run with a search, and what of it is bit-identical to a run of the unpatched actor.

    Args:
        case (Case): The actor.
        calls (int): How many updates.
        both (dict, optional): What both runs have of `train`'s arguments.
        options (Any): What only the first has.
    """
    stock = train(case, stock_dp_actor(), calls=calls, **both) if both else stock_run(case, calls)
    run = train(case, calls=calls, **(both or {}), **{**DETECTION, **options})
    return compare_runs(run, stock), run


def drop(case: Case) -> tuple[list[float], Run]:
    """The relative distance, for every step, from the gradient of an actor that detaches the planted tokens."""

    def prepare(actor: Any) -> None:
        batch = build_batch(case, dist.get_rank())
        places = [(row, position) for rank, row, position in (*case.planted, *case.nan) if rank == dist.get_rank()]
        forward = actor._forward_micro_batch

        def detaching_forward(micro_batch: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            outputs = forward(micro_batch, *arguments, **options)
            entropy, log_prob = parts(outputs)
            keep = torch.ones_like(log_prob, dtype=torch.bool)
            for row, position in places:
                here = (micro_batch["input_ids"].cpu() == batch.batch["input_ids"][row]).all(-1)
                keep[here, position] = False
            log_prob = torch.where(keep, log_prob, log_prob.detach())
            entropy = None if entropy is None else torch.where(keep, entropy, entropy.detach())
            return (entropy, log_prob) if FIRST_RELEASE else {"log_probs": log_prob, "entropys": entropy}

        def of_the_engine(micro_batch: Any, loss: Callable[..., Any], forward_only: bool) -> Any:
            def detaching(values: torch.Tensor) -> torch.Tensor:
                flat = values.values()
                keep = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
                ends = values.offsets()[1:].tolist()
                for row, position in places:
                    whole = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
                    length = int(batch.batch["attention_mask"][row, PROMPT:].sum())
                    for sequence, end in zip(micro_batch["input_ids"].unbind(), ends, strict=True):
                        if torch.equal(sequence.cpu(), whole):
                            keep[end - length - 1 + position] = False
                flat = torch.where(keep, flat, flat.detach())
                return torch.nested.nested_tensor_from_jagged(flat, values.offsets())

            def computed(model_output: dict[str, torch.Tensor], **others: Any) -> Any:
                return loss(model_output={name: detaching(value) for name, value in model_output.items()}, **others)

            return forward(micro_batch, computed, forward_only)

        actor._forward_micro_batch = of_the_engine if ENGINE else detaching_forward

    run = train(case, spike_action="drop", **DETECTION)
    stock = train(case, stock_dp_actor(), prepare=prepare)
    return [distance(*both) for both in zip(run.gradients, stock.gradients, strict=True)], run


def broken_activation(case: Case, rank: int, row: int, position: int) -> tuple[dict[str, bool], Run]:
    """The embedding of one response token comes out as NaN."""
    return compared(case, 1, {"prepare": partial(break_embedding, case, rank, row, PROMPT + position)})


def diffuse(case: Case, scope: str = "all") -> tuple[float, float, Run]:
    """A batch of one token over and over, and a threshold over every token's norm but under some unit's.

    Args:
        case (Case): The actor.
        scope (str): Which tokens have an advantage: "all", or those of one "row" (6) of rank 1.

    Returns:
        tuple: The largest token norm, the largest unit's token equivalent, and the run.
    """
    rank, rows = dist.get_rank(), torch.arange(case.rows).unsqueeze(1)
    of_scope = {"all": rows >= 0, "row": (rows == 6) & (rank == 1)}

    def change_batch(batch: DataProto) -> None:
        mask = batch.batch["attention_mask"]
        batch.batch["input_ids"] = torch.full_like(mask, 5) * mask
        batch.batch["responses"] = batch.batch["input_ids"][:, PROMPT:]
        batch.batch["advantages"] = batch.batch["response_mask"] * of_scope[scope]

    batch = build_batch(case, rank)
    change_batch(batch)
    units, _ = brute_force(case, batch, tokens=True)
    token = max(token.norm for unit in units for token in unit.each)
    unit = max(unit.norm / unit.weight for unit in units if unit.weight)
    detection = {"spike_detection": True, "grad_norm_threshold": 1.01 * token}
    return token, unit, train(case, change_batch=change_batch, **detection)


# A column of one token in the batch, and the value that it is set to. (NaN in old and reference log-probs makes the
# loss NaN, but no gradient: verl's losses clamp the difference, and clamping has none there.)
POISONS = {
    "advantage is NaN": ("advantages", math.nan),
    "advantage is -Inf": ("advantages", -math.inf),
    "rollout weight is Inf": ("rollout_is_weights", math.inf),
}


def poisoned(case: Case, poison: str, places: list[tuple[int, int, int]]) -> tuple[dict[str, bool], Run]:
    """A run on a batch with some poisoned places, against the unpatched actor."""
    name, value = POISONS[poison]

    def change_batch(batch: DataProto) -> None:
        for rank, row, position in places:
            if rank == dist.get_rank():
                batch.batch[name][row, position] = value

    return compared(case, 1, {"change_batch": change_batch})


def layers_of(actor: Any) -> list[torch.nn.Module]:
    return [m for m in actor.actor_module.modules() if type(m).__name__.endswith("DecoderLayer")]


def broken_backward(case: Case, place: tuple[int, int, int] | None) -> tuple[dict[str, bool], Run]:
    """A layer whose backward gives NaN: for one token and those that it attends to, or, without a place, for all."""

    def prepare(actor: Any) -> None:
        layer = layers_of(actor)[1]
        sequence = None if place is None else beginning(case, place[0], place[1], PROMPT + place[2])
        inputs: list[torch.Tensor] = []

        def spoil(_: torch.nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
            here = torch.ones(output.shape[:2], dtype=torch.bool, device=DEVICE)
            if sequence is not None:
                here = ends_of(sequence, inputs[-1])
            factor = torch.where(here.unsqueeze(-1), math.nan, 1.0)
            output.register_hook(lambda gradient: gradient * factor)
            return output

        actor.actor_module.register_forward_pre_hook(
            lambda _, __, options: inputs.append(options["input_ids"]), with_kwargs=True
        )
        layer.register_forward_hook(spoil)

    return compared(case, 1, {"prepare": prepare})


def broken_weight(case: Case, value: float, name: str, index: int) -> tuple[dict[str, bool], Run]:
    """One element of one weight is not a number, before the model is sharded; the optimizer takes no step."""

    def change_model(model: torch.nn.Module) -> None:
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[index] = value

    run = train(case, change_model=change_model, **DETECTION)
    return {"no step": run.gradients == []}, run


def overflow(case: Case) -> tuple[dict[str, bool], Run, list[float]]:
    """A step in float16 against the unpatched actor; also both scales after it."""
    scalers = []

    def prepare(actor: Any) -> None:
        scalers.append(actor.scaler)

    same, run = compared(case, 1, {"prepare": prepare})
    return same, run, [scaler.get_scale() for scaler in scalers]


def update_of_the_worker(case: Case) -> tuple[str, list[float], list[int], list[bool]]:
    """Two updates by verl's worker, of which the first is skipped; parameters and optimizer are offloaded between them.

    Returns:
        tuple: The events that the first update hands up; the learning rate after each update; the optimizer's steps
            after each; whether the parameters are those of an unpatched actor after each.
    """
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    import embedded  # noqa: F401  what torch lacks on a CPU
    from gradloc.adapters.watch import Watch

    def build(module: Any, **options: Any) -> SimpleNamespace:
        actor = build_actor(case, module, **options)
        actor.watch = getattr(actor, "watch", Watch(actor.config, lambda: 1.0, 1))  # the unpatched actor has none
        return SimpleNamespace(
            **dict.fromkeys(("_is_actor", "_is_offload_param", "_is_offload_optimizer"), True),
            actor=actor,
            actor_module_fsdp=actor.actor_module,
            actor_optimizer=actor.actor_optimizer,
            actor_lr_scheduler=torch.optim.lr_scheduler.LambdaLR(actor.actor_optimizer, lambda step: 1 / (1 + step)),
            ulysses_sharding_manager=contextlib.nullcontext(),
            flops_counter=SimpleNamespace(estimate_flops=lambda *_, **__: (0.0, 1.0)),
            tokenizer=SimpleNamespace(pad_token_id=0),
            config=SimpleNamespace(actor=actor.config),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def update(worker: SimpleNamespace, seed: int) -> DataProto:
        batch = build_batch(case, dist.get_rank(), seed)
        batch.meta_info["global_token_num"] = [1]
        return ActorRolloutRefWorker.update_actor(worker, batch)

    folder = tempfile.TemporaryDirectory()
    worker = build(dp_actor, spike_action="skip", bisect_dump_dir=folder.name, **DETECTION)
    stock = build(stock_dp_actor())
    events, rates, steps, same = [], [], [], []
    for seed in range(2):
        output = update(worker, seed)
        if seed:
            update(stock, seed)
        else:
            stock.actor_lr_scheduler.step()
        assert set(output.meta_info) == {"metrics"}
        events.append(worker.actor.gradloc.events)
        # Rank 0 writes for all.
        assert sorted(os.listdir(folder.name)) == (
            [".run.lock", "spikes.jsonl", "steps.jsonl"] if dist.get_rank() == 0 else []
        )
        rates.append(worker.actor_lr_scheduler.get_last_lr()[0])
        state = worker.actor_optimizer.state.values()
        steps.append(max((int(entry["step"]) for entry in state), default=0))
        ours, theirs = ([local(p).cpu() for p in one.actor_module_fsdp.parameters()] for one in (worker, stock))
        same.append(all(map(torch.equal, ours, theirs)))
    return json.dumps(events), rates, steps, same
