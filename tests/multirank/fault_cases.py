"""Searches that are disturbed."""

import contextlib
import functools
import itertools
import json
import os
import signal
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import reduced_meter_cases
import torch
import torch.distributed as dist
from action_cases import DETECTION, compared, layers_of
from actor_cases import Run, compare_runs, stock_run, train, warnings_of
from actors import ENGINE, PROMPT, Case, stock_dp_actor, with_hook_on_log_probs
from token_clip_cases import token_clip_config
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch_stand_ins import as_in_torch_2_15, without_name
from verl import DataProto
from verl.utils.gradloc import metrics
from verl.utils.gradloc.adapters import loss_weights
from verl.utils.gradloc.adapters.actor_config import LayerClipConfig
from verl.utils.gradloc.evidence import event
from verl.utils.gradloc.fsdp.failed_pass import RecordedCollectives
from verl.utils.gradloc.fsdp.state import flat_handles
from verl.utils.gradloc.fsdp.torch_compat import param_groups
from verl.utils.gradloc.layers.layer_clip import LayerClip
from verl.utils.gradloc.measure import local_norms, micro_batch
from verl.utils.gradloc.search.investigation import SearchTime


def disturb(actor: Any, where: str, when: int | Sequence[int], disturbance: Callable[[], None]) -> None:
    """Has something happen in extra passes, or in ordinary ones of an unpatched actor: those with these numbers."""
    numbers = [when] if isinstance(when, int) else when
    count = 0

    def strike(*_: Any) -> None:
        nonlocal count
        gradloc = getattr(actor, "gradloc", None)
        # In verl 0.7 a training pass begins within the forward.
        trains = getattr(actor, "_watching", False) or (gradloc is not None and gradloc.current is not None)
        if not getattr(actor, "evaluates", False) and not trains:
            count += 1
            if count in numbers:
                disturbance()

    forward = actor._forward_micro_batch

    def striking_forward(*arguments: Any, **options: Any) -> Any:
        if where == "before the forward":
            strike()
        outputs = forward(*arguments, **options)
        if where == "after the forward":
            strike()
        return outputs

    def strike_in_backward(_module: torch.nn.Module, _arguments: Any, output: torch.Tensor) -> None:
        # Gradient checkpointing runs the forward again in the backward.
        if torch._C._current_graph_task_id() == -1 and output.requires_grad:
            output.register_hook(strike)

    layers = layers_of(actor)
    if where == "in a layer":
        layers[1].register_forward_hook(strike)
    elif where == "in a layer's backward":
        layers[1].register_forward_hook(strike_in_backward)
    elif where == "in the backward":
        actor._forward_micro_batch = with_hook_on_log_probs(forward, strike)
    else:
        actor._forward_micro_batch = striking_forward


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def run_out_of_memory(*_: Any) -> Any:
    raise OUT_OF_MEMORY


def failing(owner: Any, name: str, when: int, ranks: Sequence[int], error: Exception = OUT_OF_MEMORY) -> Any:
    """A patch of a function, whose call of this number, counted from 1, fails on some ranks."""
    calls, function = itertools.count(1), getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == when and dist.get_rank() in ranks:
            raise error
        return function(*arguments, **options)

    return mock.patch.object(owner, name, called)


def failing_search(
    case: Case, where: str, ranks: list[int], when: int, later_torch: bool = False
) -> tuple[dict[str, bool], Run]:
    """A run in which an extra pass runs out of memory on some ranks, compared with the unpatched actor."""

    def prepare(actor: Any) -> None:
        if later_torch:
            as_in_torch_2_15(actor.actor_module)
        if dist.get_rank() in ranks:
            disturb(actor, where, when, run_out_of_memory)

    return compared(case, prepare=prepare)


def torch_without(name: str, ranks: Sequence[int]) -> Any:
    """A patch of what looks at the model's shards first, after which torch lacks a name on some ranks."""
    make = LayerClip.__init__

    def make_without(self: LayerClip, module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        if dist.get_rank() in ranks:
            without_name((param_groups(module) or flat_handles(module))[0], name)
        make(self, module, *arguments, **options)

    return mock.patch.object(LayerClip, "__init__", make_without)


def layer_clip_without(case: Case, name: str) -> str:
    """What a run with LayerClip says at its start, on a torch that lacks a name."""
    with torch_without(name, range(dist.get_world_size())), pytest.raises(RuntimeError) as refused:
        train(case, layer_clip=LayerClipConfig(enable=True))
    return str(refused.value)


def without_a_name(case: Case, name: str, ranks: list[int]) -> tuple[dict[str, bool], Run, list[str]]:
    """A run on a torch that lacks a name on some ranks, compared with the unpatched actor; and the warnings."""
    with torch_without(name, ranks), warnings_of("verl.utils.gradloc.gradloc") as warnings:
        return *compared(case, spike_replay=1), warnings


def with_unseen_calls(case: Case) -> tuple[dict[str, bool], Run, list[str]]:
    """A run on a torch whose FSDP makes its collective calls by functions that nobody knows; and the warnings."""
    stock_run(case, 2)
    copied = types.SimpleNamespace(**vars(dist))
    parts = [mock.patch.object(part, "dist", copied) for part in (_fsdp_collectives, _flat_param, _runtime_utils)]
    with contextlib.ExitStack() as ended, warnings_of("verl.utils.gradloc.gradloc") as warnings:
        for part in parts:
            ended.enter_context(part)
        return *compared(case), warnings


def with_assertions(case: Case) -> tuple[dict[str, bool], Run]:
    """A run of a model that refuses hidden states of zero, compared with the unpatched actor."""

    def check(_module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        assert bool((hidden.abs().amax(-1) > 0).all()), "a hidden state is zero"

    def change(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            layer.register_forward_hook(check)

    return compared(case, both={"change_model": change})


def rehearsed(calls: list[int], failing: int | None) -> tuple[str, int | None]:
    """A rehearsal in which each rank makes so many calls, and one may fail before its last.

    Returns:
        tuple: This rank's error, and how many calls are known after it.
    """
    recorded = RecordedCollectives()

    def run() -> None:
        for number in range(calls[dist.get_rank()]):
            if dist.get_rank() == failing and number == calls[failing] - 1:
                run_out_of_memory()
            dist.all_gather([torch.zeros(3) for _ in calls], torch.ones(3))

    error = recorded.run(run, torch.device("cpu"), gathers=True)
    return str(error), None if recorded.needs_rehearsal else len(recorded._recorded_calls)


def out_of_time(case: Case, others: float) -> tuple[dict[str, bool], Run]:
    """A run whose clock shows a second more at each reading on rank 0, and that many more on the others."""

    def prepare(actor: Any) -> None:
        now = 1e5 * dist.get_rank()

        def clock() -> float:
            nonlocal now
            now += others if dist.get_rank() else 1.0
            return now

        actor.gradloc._search_time = SearchTime(4.5, clock)

    return compared(case, prepare=prepare, bisect_budget_seconds=4.5, bisect_until="exhaustive")


def evaluate_before_updates(actor: Any) -> None:
    """Has each update follow a forward without gradients, as a trainer runs for the old log-probs."""
    update_policy = actor.update_policy
    module, inputs = actor.actor_module, ("input_ids", "attention_mask", "position_ids")

    def after_an_evaluation(batch: DataProto) -> dict[str, Any]:
        actor.evaluates = True
        with actor.engine.eval_mode() if ENGINE else contextlib.nullcontext(), torch.no_grad():
            module(**{name: batch.batch[name] for name in inputs}, use_cache=False)
        actor.evaluates = False
        return update_policy(batch)

    actor.update_policy = after_an_evaluation


def failing_after_an_evaluation(case: Case, where: str, when: list[int]) -> tuple[dict[str, bool], Run]:
    """Rank 1 runs out of memory in an extra pass, in a run with a forward without gradients before each update."""

    def prepare(actor: Any) -> None:
        evaluate_before_updates(actor)
        if dist.get_rank() == 1:
            disturb(actor, where, when, run_out_of_memory)

    stock = _stock_with_evaluations(case)
    run = train(case, calls=2, prepare=prepare, **DETECTION)
    return compare_runs(run, stock), run


@functools.cache
def _stock_with_evaluations(case: Case) -> Run:
    return train(case, stock_dp_actor(), calls=2, prepare=evaluate_before_updates)


def failing_without_an_expert(case: Case) -> tuple[dict[str, bool], Run]:
    """Rank 1 runs out of memory in its first extra pass over more than one token of one row."""

    def prepare(actor: Any) -> None:
        def strike(_module: torch.nn.Module, arguments: tuple[torch.Tensor], _output: torch.Tensor) -> None:
            if actor.gradloc.current is None and arguments[0].shape[:2] != (1, PROMPT + 1):
                run_out_of_memory()

        if dist.get_rank() == 1:
            layers_of(actor)[1].register_forward_hook(strike)

    return compared(case, both={"change_model": without_an_expert}, prepare=prepare)


def without_an_expert(model: torch.nn.Module) -> None:
    """No token is ever routed to the last expert of a layer, which so has no gradient."""

    def avoid(_module: torch.nn.Module, _arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits[..., :-1], torch.full_like(logits[..., -1:], -1e9)], -1)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(avoid)


def dropping_without_an_expert(case: Case) -> tuple[list[int], list[int], str]:
    """How many parameters have a gradient in each optimizer step, without and with a drop; and the drop's events."""
    stock = train(case, stock_dp_actor(), change_model=without_an_expert)
    run = train(case, change_model=without_an_expert, **{**DETECTION, "spike_action": "drop"})
    return [len(step) for step in stock.gradients], [len(step) for step in run.gradients], run.events[0]


def with_other_arithmetic(case: Case) -> Run:
    """A search on ranks of which each one makes something else of suspicion, as other processors might."""
    suspicion = micro_batch.suspicion

    def other(tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        return suspicion(tokens) * (1 + dist.get_rank() * torch.rand_like(tokens["weight"]))

    with mock.patch.object(micro_batch, "suspicion", other):
        return train(case, **DETECTION)


def with_other_sums(case: Case) -> tuple[float, float, Run]:
    """A run in which rank 1's copy of each all-reduced float64 sum is a little too large.

    Returns:
        tuple: The norm of the reduced gradient; the threshold, which lies just over it, and under what rank 1's copy
            would give; the run.
    """
    options = {"spike_detection": True, "spike_trigger": "global"}
    first = train(case, **options, grad_norm_threshold=1.0, bisect_budget_steps=1)
    (event,) = json.loads(first.events[0])
    trigger = event["trigger"]
    threshold = trigger["norm"] / trigger["threshold"] * (1 + 1e-9)
    all_reduce = dist.all_reduce

    def inexact(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        work = all_reduce(tensor, *arguments, **keywords)
        if tensor.dtype == torch.float64 and dist.get_rank() == 1:
            tensor.mul_(1 + 1e-8)
        return work

    with mock.patch.object(dist, "all_reduce", inexact):
        run = train(case, **options, grad_norm_threshold=threshold)
    return trigger["norm"], threshold * trigger["threshold"], run


def failing_beside_the_passes(case: Case, what: str) -> tuple[dict[str, bool], Run]:
    """A rank runs out of memory where a search only looks at figures; compared with the unpatched actor.

    Args:
        case (Case): The actor.
        what (str): "the units", which are shared before the first probe; "a norm", read after one; "its culprits", of
            which it tells the other ranks at the end; "the event", which rank 0 writes down. Else it is rank 1.
    """

    def prepare(actor: Any) -> None:
        if dist.get_rank() != 1:
            return
        if what == "a norm":
            norms = actor.gradloc._model.meter
            stop = norms.stop
            norms.stop = lambda: stop() if actor.gradloc.current else run_out_of_memory()
        elif what != "the event":
            measure = actor.gradloc._measure

            def measured(where: Any) -> Any:
                mini_batch = measure(where)
                if what == "the units":
                    mini_batch._own_figures = run_out_of_memory
                for each in mini_batch.micro_batches if what == "its culprits" else ():
                    portable = each.portable
                    # With their inputs, they are sent to be searched.
                    each.portable = lambda scale, inputs=True, p=portable: p(scale) if inputs else run_out_of_memory()
                return mini_batch

            actor.gradloc._measure = measured

    with failing(event, "_trigger", 1, [0] if what == "the event" else []):
        return compared(case, prepare=prepare)


# What is read of a training pass or of a mini-batch, and which time it fails; with TokenClip, before the backward.
READ = {
    "norms": (local_norms, "norms_of_all", 2),
    "weights": (loss_weights, "policy_weights", 2),
    "weights and TokenClip": (loss_weights, "policy_weights", 2),
    "sums": (metrics, "own_sums", 1),
}


def with_an_unread_pass(case: Case, what: str, ranks: list[int]) -> tuple[dict[str, bool], Run]:
    """A run in which some ranks run out of memory over the first update, compared with the unpatched actor."""
    clip = {"token_clip": token_clip_config(enable=True, action="log")} if "TokenClip" in what else {}
    with failing(*READ[what], ranks):
        return compared(case, **clip)


def failing_alone(case: Case) -> None:
    """Rank 1 fails where the others cannot know of it."""

    def prepare(actor: Any) -> None:
        if dist.get_rank() == 1:
            measure = actor.gradloc._measure
            actor.gradloc._measure = lambda where: measure(where) and run_out_of_memory()

    train(case, prepare=prepare, **DETECTION)


def failing_on_shared_data(case: Case) -> None:
    """Rank 1 runs out of memory in an extra pass, whose collective calls depend on its data."""

    def prepare(actor: Any) -> None:
        if dist.get_rank() == 1:
            disturb(actor, "in a layer", 2, run_out_of_memory)

    reduced_meter_cases.train(case, 2, prepare=prepare, **DETECTION)


def killed(case: Case, stock: bool) -> None:
    """Rank 1 is killed in the middle of an extra pass, or of an ordinary one of an unpatched actor."""

    def prepare(actor: Any) -> None:
        if dist.get_rank() == 1:
            disturb(actor, "in a layer", 2, lambda: os.kill(os.getpid(), signal.SIGKILL))

    if stock:
        train(case, stock_dp_actor(), prepare=prepare)
    else:
        train(case, prepare=prepare, **DETECTION)


def unequal_lengths(case: Case) -> tuple[dict[str, bool], Run]:
    """All responses of rank 0 are cut to one token: under dynamic batch sizes it would need fewer micro-batches."""

    def change_batch(batch: DataProto) -> None:
        if dist.get_rank() == 0:
            batch.batch["attention_mask"][:, PROMPT + 1 :] = 0
            batch.batch["response_mask"][:, 1:] = 0

    return compared(case, 1, {"change_batch": change_batch})
