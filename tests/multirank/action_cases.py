"""What a spike leads to, held against an unpatched actor."""

import contextlib
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import Run, beginning, break_embedding, compare_runs, distance, ends_of, stock_run, train
from actors import DEVICE, IDENTITY_THRESHOLD, PROMPT, Case, build_actor, stock_dp_actor
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
    """The relative distance, for every step, from the gradient of an actor whose planted tokens have no gradient."""

    def still(batch: DataProto) -> None:
        """No advantage, and a reference with the model's own log-prob."""
        for rank, row, position in (*case.planted, *case.nan):
            if rank == dist.get_rank():
                batch.batch["advantages"][row, position] = 0.0
                if case.kl:
                    batch.batch["ref_log_prob"][row, position] = batch.batch["old_log_probs"][row, position]

    run = train(case, spike_action="drop", **DETECTION)
    stock = train(case, stock_dp_actor(), change_batch=still)
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


# Of one token, in the batch: what is set, and to what. (Old and reference log-probs that are NaN make the loss NaN, but
# no gradient: verl's losses clamp the difference, and clamping has none there.)
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


def updates_of_the_worker(case: Case, directory: str) -> list[tuple[int, float, int]]:
    """Two updates by verl's worker, of which the first is skipped; parameters and optimizer are offloaded between them.

    Returns:
        list: Of each, how many spikes it had; after it, the learning rate and how many steps the optimizer has taken.
    """
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    import embedded  # noqa: F401  what torch lacks on a CPU

    actor = build_actor(case, spike_action="skip", bisect_dump_dir=directory, **DETECTION)
    optimizer = actor.actor_optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    worker = SimpleNamespace(
        _is_actor=True,
        _is_offload_param=True,
        _is_offload_optimizer=True,
        actor=actor,
        actor_module_fsdp=actor.actor_module,
        actor_optimizer=optimizer,
        actor_lr_scheduler=scheduler,
        ulysses_sharding_manager=contextlib.nullcontext(),
        flops_counter=SimpleNamespace(estimate_flops=lambda *_, **__: (0.0, 1.0)),
        tokenizer=SimpleNamespace(pad_token_id=0),
        config=SimpleNamespace(actor=actor.config),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    found = []
    for seed in range(2):
        batch = build_batch(case, dist.get_rank(), seed)
        batch.meta_info["global_token_num"] = [1]
        ActorRolloutRefWorker.update_actor(worker, batch)
        steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        found.append((len(actor.gradloc.events), scheduler.get_last_lr()[0], steps))
    return found
