"""Runs of an actor, beside the oracle and beside the unpatched actor; they run inside the ranks of a cluster."""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from actors import (
    DEVICE,
    IDENTITY_THRESHOLD,
    Case,
    build_actor,
    dp_actor,
    events_of,
    local,
    stock_dp_actor,
    stock_module,
)
from batches import build_batch
from oracle import Unit, brute_force
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from verl import DataProto

HELPER = "verl.trainer.ppo.rollout_corr_helper"


def beginning(case: Case, rank: int, row: int, at: int) -> torch.Tensor:
    """The tokens of a row of the batch up to the column `at`, without padding."""
    batch = build_batch(case, rank).batch
    return batch["input_ids"][row][: at + 1][batch["attention_mask"][row][: at + 1].bool()].to(DEVICE)


def ends_of(sequence: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Where a sequence ends in the tokens of a forward, which verl 0.9 may have packed; bool of their shape."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    length = len(sequence)
    if tokens.shape[1] >= length:
        found[:, length - 1 :] = (tokens.unfold(1, length, 1) == sequence).all(-1)
    return found


def break_embedding(case: Case, rank: int, row: int, at: int, actor: Any) -> None:
    """Has the embedding of one token come out as NaN: that at a place in a row of the batch."""
    sequence = beginning(case, rank, row, at)

    def spoil(_: torch.nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(ends_of(sequence, arguments[0]).unsqueeze(-1), math.nan)

    embeddings = [m for m in actor.actor_module.modules() if isinstance(m, torch.nn.Embedding)]
    embeddings[0].register_forward_hook(spoil)


@dataclasses.dataclass
class Run:
    """What one or more update_policy calls of an actor left behind, on one rank."""

    metrics: list[dict[str, Any]]
    events: list[str]
    # TokenClip's lines.
    clips: list[list[dict[str, Any]]]
    forwards: list[int]
    gradients: list[list[torch.Tensor]]
    parameters: list[torch.Tensor]
    rng: torch.Tensor
    training: list[bool]
    # The state of each identity after the last call, on rank 0.
    identities: dict[str, str]


def train(
    case: Case,
    module: Any = dp_actor,
    calls: int | Sequence[int] = 1,
    prepare: Callable[[Any], None] | None = None,
    change_model: Callable[[torch.nn.Module], None] = lambda _: None,
    change_batch: Callable[[DataProto], None] = lambda _: None,
    size: int = 1,
    **gradloc: Any,
) -> Run:
    """Updates of an actor: so many, or those with these batches. Each `size` neighbouring ranks share their data."""
    actor = build_actor(case, module, change_model, **gradloc)
    run = Run([], [], [], [], [], [], torch.empty(0), [], {})
    count = 0

    def count_forward(*_: Any) -> None:
        nonlocal count
        count += 1

    def keep_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        run.gradients.append([local(p.grad) for p in parameters if p.grad is not None])

    actor.actor_module.register_forward_pre_hook(count_forward)
    actor.actor_optimizer.register_step_pre_hook(keep_gradients)
    if prepare is not None:
        prepare(actor)
    torch.manual_seed(5 + dist.get_rank())
    for seed in range(calls) if isinstance(calls, int) else calls:
        count = 0
        with torch.random.fork_rng():
            batch = build_batch(case, dist.get_rank() // size, seed)
        change_batch(batch)
        run.metrics.append(actor.update_policy(batch))
        run.forwards.append(count)
        watch = getattr(getattr(actor, "engine", actor), "watch", None)
        run.clips.append([] if watch is None else watch.clips)
        if getattr(actor, "gradloc", None) is not None:
            run.events.append(json.dumps(events_of(actor)))
            answer = actor.gradloc.answer()
            run.identities = {} if answer is None else {name: of["state"] for name, of in answer["identities"].items()}
    run.parameters = [local(p) for p in actor.actor_module.parameters()]
    run.rng = torch.get_rng_state()
    if DEVICE.type == "cuda":
        run.rng = torch.cat([run.rng, torch.cuda.get_rng_state()])
    run.training = [m.training for m in actor.actor_module.modules()]
    return run


@functools.cache
def stock_run(case: Case, calls: int | Sequence[int] = 1) -> Run:
    """That of the unpatched actor, made once in each process for all tests that compare a run of the case with it."""
    return train(case, stock_dp_actor(), calls=calls)


class Operations(TorchDispatchMode):
    """Lists the operations within it, and the collective calls among them; and counts the bytes that these receive."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.collectives: list[str] = []
        self.received = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        if "c10d" in function.namespace:
            self.collectives.append(self.names[-1])
            self.received += sum(each.nbytes for each in tree_leaves(args[0]) if isinstance(each, torch.Tensor))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """How the host reads tensors within it."""
    reads: list[str] = []

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *arguments: Any) -> Any:
            reads.append(name)
            return original(tensor, *arguments)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        yield reads


@contextlib.contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """What a logger, or "" for all of them, warns of."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield warnings
    finally:
        logging.getLogger(logger).removeHandler(handler)


def units_and_run(case: Case) -> tuple[list[Unit], list[float], Run]:
    """The brute force, and a run in which every unit counts as a spike."""
    units, norms = brute_force(case, build_batch(case, dist.get_rank()), tokens=False)
    return units, norms, train(case, spike_detection=True, grad_norm_threshold=1e-6, bisect_budget_steps=2)


def threshold_between(case: Case, units: list[Unit]) -> float:
    """One between the planted tokens and the others."""
    above, below = [], []
    for unit in units:
        for token in unit.each:
            place = (unit.rank, unit.mini_batch * case.mini_batch + token.row, token.position)
            (above if place in case.planted else below).append(token.norm)
    assert len(above) == len(case.planted) * case.epochs and min(above) > 50 * max(below)
    return math.sqrt(min(above) * max(below))


def search(case: Case) -> tuple[list[Unit], list[float], float, Run]:
    """The brute force with every token, a threshold between the planted tokens and the others, and a run with it."""
    units, norms = brute_force(case, build_batch(case, dist.get_rank()), tokens=True)
    threshold = threshold_between(case, units)
    detection = {"spike_detection": True, "grad_norm_threshold": threshold, "bisect_budget_steps": 500}
    return units, norms, threshold, train(case, spike_trigger=case.trigger, **detection)


def both_triggers(case: Case) -> tuple[Run, Run]:
    """Runs with either trigger, and a threshold that the worst unit exceeds, but not the reduced gradient."""
    units, (norm,) = brute_force(case, build_batch(case, dist.get_rank()), tokens=False)
    of_unit = max(unit.norm / unit.weight for unit in units)
    of_mean = norm * dist.get_world_size() / math.hypot(*(unit.weight for unit in units))
    detection = {"calls": 2, "spike_detection": True, "grad_norm_threshold": math.sqrt(of_unit * of_mean)}
    return train(case, spike_trigger="unit", **detection), train(case, spike_trigger="global", **detection)


def compare_runs(run: Run, other: Run) -> dict[str, bool]:
    """What is bit-identical in two runs."""

    def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))

    def same_figures(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, list) and isinstance(theirs, list):
            return len(ours) == len(theirs) and all(map(same_figures, ours, theirs))
        # The unpatched actor logs NaN for a micro-batch without response tokens.
        return repr(ours) == repr(theirs) or repr(theirs) == "nan"

    def same_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
        names = [name for name in {**ours, **theirs} if "gradloc" not in name and "token_clip" not in name]
        return all(same_figures(ours.get(name), theirs.get(name)) for name in names)

    return {
        "gradients": len(run.gradients) == len(other.gradients) and all(map(equal, run.gradients, other.gradients)),
        "parameters": equal(run.parameters, other.parameters),
        "rng": torch.equal(run.rng, other.rng),
        "training flags": run.training == other.training,
        "metrics": len(run.metrics) == len(other.metrics) and all(map(same_metrics, run.metrics, other.metrics)),
    }


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Of this gradient from that one, relative to the latter. A collective call."""
    gap = sum((a - b).square().sum() for a, b in zip(ours, theirs, strict=True))
    sums = torch.stack([gap, sum(b.square().sum() for b in theirs)])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def identity(case: Case) -> tuple[dict[str, bool], dict[str, bool], Run]:
    """Two calls with a search in the first, compared with the unpatched actor; and with detection off.

    What is off also makes the same collective calls, and reads as much of the device.
    """
    found = train(case, calls=2, spike_detection=True, grad_norm_threshold=IDENTITY_THRESHOLD, bisect_budget_steps=100)
    runs, costs = [], []
    helper = {HELPER: stock_module(f"{HELPER.replace('.', '/')}.py")}
    for module, modules in ((dp_actor, {}), (stock_dp_actor(), helper)):
        with mock.patch.dict(sys.modules, modules), host_reads() as reads, Operations() as operations:
            runs.append(train(case, module, calls=2))
        costs.append((operations.collectives, reads))
    off, stock = runs
    same = {"costs": costs[0] == costs[1] and len(costs[0][1]) > 0}
    return compare_runs(found, stock), compare_runs(off, stock) | same, found
