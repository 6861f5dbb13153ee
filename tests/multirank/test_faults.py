"""Whatever happens during a search: it ends on all ranks alike, and training goes on, or fails as it would without."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import cluster
import pytest
import reduced_meter_cases
import torch
import torch.distributed as dist
from action_cases import DETECTION, compared, layers_of
from actor_cases import Run, compare_runs, stock_run, train, warnings_of
from actors import ENGINE, PROMPT, Case, stock_dp_actor
from cluster import Cluster, RankFailed
from notation import cases
from test_actor import ON_ENGINE, ONE, THREE, Launch, as_list, harmless, on_engine, on_ranks, places, same_events
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch_stand_ins import as_in_torch_2_15, without_name
from valid_events import valid_events
from verl import DataProto

from gradloc import metrics
from gradloc.adapters import loss_weights
from gradloc.adapters.actor_config import LayerClipConfig, TokenClipConfig
from gradloc.evidence import event
from gradloc.fsdp.failed_pass import RecordedCollectives
from gradloc.fsdp.state import flat_handles
from gradloc.fsdp.torch_compat import param_groups
from gradloc.layers.layer_clip import LayerClip
from gradloc.measure import local_norms, micro_batch
from gradloc.search.investigation import SearchTime


def disturb(
    actor: Any,
    where: str,
    when: int | Sequence[int],
    ranks: Sequence[int] = (1,),
    disturbance: Callable[[], None] | None = None,
) -> None:
    """Has these ranks run out of memory, or something else happen there, in extra passes with these numbers."""
    if dist.get_rank() not in ranks:
        return
    numbers = [when] if isinstance(when, int) else when
    count = 0

    def strike(*_: Any) -> None:
        nonlocal count
        # In verl 0.7 a training pass begins within the forward.
        trains = getattr(actor, "_watching", False) or actor.gradloc.current is not None
        if not getattr(actor, "evaluates", False) and not trains:
            count += 1
            if count in numbers:
                (disturbance or run_out_of_memory)()

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
        disturb(actor, where, when, ranks)

    return compared(case, prepare=prepare)


def torch_without(name: str, ranks: Sequence[int]) -> Any:
    """A patch of what looks at the model's shards first, after which torch lacks a name on some ranks."""
    make = LayerClip.__init__

    def make_without(self: LayerClip, module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        if dist.get_rank() in ranks:
            without_name((param_groups(module) or flat_handles(module))[0], name)
        make(self, module, *arguments, **options)

    return mock.patch.object(LayerClip, "__init__", make_without)


def with_assertions(case: Case) -> tuple[dict[str, bool], Run]:
    """A run of a model that refuses hidden states of zero, compared with the unpatched actor."""

    def check(_module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        assert bool((hidden.abs().amax(-1) > 0).all()), "a hidden state is zero"

    def change(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            layer.register_forward_hook(check)

    return compared(case, both={"change_model": change})


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
        disturb(actor, where, when)

    stock = train(case, stock_dp_actor(), calls=2, prepare=evaluate_before_updates)
    run = train(case, calls=2, prepare=prepare, **DETECTION)
    return compare_runs(run, stock), run


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


# Functions that read a training pass or a mini-batch, and which call fails; with TokenClip, before the backward.
READ = {
    "norms": (local_norms, "norms_of_all", 2),
    "weights": (loss_weights, "policy_weights", 2),
    "weights and TokenClip": (loss_weights, "policy_weights", 2),
    "sums": (metrics, "own_facts", 1),
}


def failing_alone(case: Case) -> None:
    """Rank 1 fails where the others cannot know of it."""

    def prepare(actor: Any) -> None:
        if dist.get_rank() == 1:
            measure = actor.gradloc._measure
            actor.gradloc._measure = lambda where: measure(where) and run_out_of_memory()

    train(case, prepare=prepare, **DETECTION)


def failing_on_shared_data(case: Case) -> None:
    """Rank 1 runs out of memory in an extra pass, whose collective calls depend on its data."""
    reduced_meter_cases.train(case, 2, prepare=partial(disturb, where="in a layer", when=2), **DETECTION)


def check_search(results: list[Any], case: Case, error: str = "") -> dict[str, Any]:
    """The event of a search that has found the planted tokens, or has ended with an error; the next call has none."""
    (event,), second = harmless(results)
    assert second == [] and event["complete"] == (not error)
    if error:
        assert error in event["error"]
    else:
        assert places(event) == sorted(case.planted) and event["error"] is None
    return event


@on_ranks(
    (1, Case("fsdp2", planted=((0, 0, 4), (0, 6, 1))), "in a layer"),
    (2, Case("fsdp1", planted=THREE), "in a layer", pytest.mark.every_target),
    (2, Case("fsdp2", checkpointing=True, activation_offload=True, planted=THREE), "in a layer"),
    *[(2, Case("fsdp2", planted=THREE), where) for where in ("before the forward", "after the forward")],
    (2, Case("fsdp2", planted=THREE), "in a layer's backward", pytest.mark.every_target),
    (4, Case("fsdp1", hsdp=True, planted=THREE), "in a layer's backward"),
    (4, Case("fsdp2", hsdp=True, planted=THREE), "in a layer"),
    names="world case where",
)
def test_out_of_memory_in_a_pass_ends_the_search_on_all_ranks(
    launch: Launch, world: int, case: Case, where: str
) -> None:
    failing, when = {1: ([0], 1), 2: ([1], 2), 4: ([1, 2], 2)}[world]
    check_search(launch(world, failing_search, case, where, failing, when), case, "OutOfMemoryError")


ORDINARY = Case("fsdp2", planted=THREE)
EXPERTS = Case("fsdp2", model="moe", micro_batch=8, planted=((0, 0, 4), (0, 6, 1), (1, 6, 9)))
# A forward without gradients may leave parameters unsharded, so that the training passes make fewer calls.
UNSHARDED = Case("fsdp1", stays_unsharded=True, planted=THREE)
UNSHARDED_2 = dataclasses.replace(UNSHARDED, wrap="fsdp2", deferred=True)
# The first extra pass is the rehearsal in the first update. If that fails, the search begins with another one.
REHEARSAL = partial(failing_after_an_evaluation, where="in a layer's backward", when=[1])
BOTH = partial(failing_after_an_evaluation, where="in a layer", when=[1, 2])
of_single_experts = pytest.mark.skipif(ENGINE, reason="transformers 5 has all experts of a layer in one parameter")


@cases(
    "function case passes",
    (partial(failing_search, where="in a layer's backward", when=2, ranks=[1], later_torch=True), ORDINARY, 1),
    # A rehearsal without communication would see parameters of zero.
    (with_assertions, ORDINARY, None),
    (REHEARSAL, UNSHARDED, None),
    pytest.param(BOTH, UNSHARDED_2, 1, marks=ON_ENGINE),
    # Probes make larger collective calls than training does there, also the first of them.
    pytest.param(failing_without_an_expert, EXPERTS, 1, marks=of_single_experts),
    ids=["torch 2.15", "assertions", "rehearsal", "both", "expert"],
)
def test_searches_of_unusual_models_end_on_all_ranks(
    launch: Launch, function: Callable[..., Any], case: Case, passes: int | None
) -> None:
    """They find the tokens or, where a number of passes is given, end out of memory."""
    event = check_search(launch(2, function, case), case, "OutOfMemoryError" if passes else "")
    assert passes is None or event["passes"] == passes


@cases(
    "wrap name ranks",
    ("fsdp1", "FlatParamHandle._prefetched", [0, 1]),
    ("fsdp2", "FSDPParamGroup.reduce_grads", [1]),
)
def test_what_torch_lacks_turns_the_search_off_on_all_ranks(
    launch: Launch, wrap: str, name: str, ranks: list[int]
) -> None:
    """And LayerClip, which a run is not to do without, is refused with a sentence."""

    def without_a_name() -> tuple[dict[str, bool], Run, list[str]]:
        with torch_without(name.partition(".")[2], ranks), warnings_of("gradloc.gradloc") as warnings:
            found = compared(Case(wrap, planted=THREE), spike_replay=1)
        said = r"LayerClip cannot be built with torch .* \(rank 0: AttributeError: process_group\); take a torch"
        with torch_without("process_group", [0, 1]), pytest.raises(RuntimeError, match=said):
            train(Case("fsdp1"), layer_clip=LayerClipConfig(enable=True))
        return *found, warnings

    results = launch(2, without_a_name)
    assert harmless(results) == [[], []]
    (warning,), other = [warnings for _, _, warnings in results]
    assert name in warning and other == []
    assert "off" in warning and f"rank {ranks[0]}" in warning


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_unseen_collective_calls_leave_no_rank_waiting(launch: Launch, wrap: str) -> None:
    """They are unknown, and there is no search, in which they would have to be made after an error."""
    case = Case(wrap, planted=THREE)

    def with_unseen_calls() -> tuple[dict[str, bool], Run, list[str]]:
        stock_run(case, 2)
        copied = types.SimpleNamespace(**vars(dist))  # whose functions nobody knows
        with contextlib.ExitStack() as ended, warnings_of("gradloc.gradloc") as warnings:
            for part in (_fsdp_collectives, _flat_param, _runtime_utils):
                ended.enter_context(mock.patch.object(part, "dist", copied))
            return *compared(case), warnings

    results = launch(2, with_unseen_calls)
    (event,), second = harmless(results)
    assert "none of the collective calls" in event["error"] and event["culprits"] == [] and second == []
    (warning,), other = [warnings for _, _, warnings in results]
    assert "none of the collective calls" in warning and other == []


@cases(
    "calls failing errors known",
    ([3, 3], None, ["None", "None"], 3),
    ([3, 1], 1, ["None", "out of memory"], None),
    ([3, 2], None, ["different numbers", "different numbers"], None),
    ([0, 0], None, ["none of the collective calls"] * 2, None),
)
def test_a_rehearsal_ends_on_all_ranks(
    launch: Launch, calls: list[int], failing: int | None, errors: list[str], known: int | None
) -> None:
    """Each rank makes so many calls, and one may fail before its last."""

    def rehearsed() -> tuple[str, int | None]:
        def run() -> None:
            for number in range(calls[dist.get_rank()]):
                if dist.get_rank() == failing and number == calls[failing] - 1:
                    run_out_of_memory()
                dist.all_gather([torch.zeros(3) for _ in calls], torch.ones(3))

        recorded = RecordedCollectives()
        error = recorded.run(run, torch.device("cpu"), gathers=True)
        return str(error), None if recorded.needs_rehearsal else len(recorded._recorded_calls)

    for (error, found), expected in zip(launch(2, rehearsed), errors, strict=True):
        assert expected in error and found == known


@pytest.mark.parametrize("others", [0.0, 1e6])
def test_the_clock_of_the_first_rank_ends_the_search_on_all(launch: Launch, others: float) -> None:
    """Other ranks would search on, or not at all, by their own clocks."""

    def prepare(actor: Any) -> None:
        first = dist.get_rank() == 0
        readings = itertools.count(0 if first else 1e5, 1.0 if first else others)
        actor.gradloc._search_time = SearchTime(4.5, partial(next, readings))

    options = {"prepare": prepare, "bisect_budget_seconds": 4.5, "bisect_until": "exhaustive"}
    results = launch(2, partial(compared, Case("fsdp2", planted=THREE), **options))
    (event,), second = harmless(results)
    assert event["out_of_time"] and not event["complete"] and second == []
    # A reading when it begins, and one before each pass.
    assert event["budget_seconds"] == 4.5 and event["passes"] == 3 and event["error"] is None


@of_single_experts
def test_a_drop_gives_no_gradient_to_what_had_none(launch: Launch) -> None:
    case = Case("fsdp2", model="moe", micro_batch=8, planted=THREE)

    def runs() -> tuple[Run, Run]:
        stock = train(case, stock_dp_actor(), change_model=without_an_expert)
        return stock, train(case, change_model=without_an_expert, spike_action="drop", **DETECTION)

    for stock, dropped in launch(2, runs):
        (event,) = valid_events(dropped.events[0])
        assert event["applied"] and len(event["culprits"]) == len(THREE)
        assert [len(step) for step in dropped.gradients] == [len(step) for step in stock.gradients]


@on_ranks(
    (2, Case(planted=THREE)),
    *[(2, Case("fsdp1-orig", hsdp=True, trigger=trigger, planted=ONE)) for trigger in ("unit", "global")],
)
def test_ranks_with_other_arithmetic_search_alike(launch: Launch, world: int, case: Case) -> None:
    """Each makes something else of suspicion; where verl's fsdp_size is 1, FSDP1 neither shards nor averages."""

    def with_other_arithmetic() -> Run:
        suspicion = micro_batch.suspicion

        def other(tokens: dict[str, torch.Tensor]) -> torch.Tensor:
            return suspicion(tokens) * (1 + dist.get_rank() * torch.rand_like(tokens["weight"]))

        with mock.patch.object(micro_batch, "suspicion", other):
            return train(case, calls=2, spike_trigger=case.trigger, **DETECTION)

    (event,), second = same_events(launch(world, with_other_arithmetic))
    assert places(event) == sorted(case.planted) and event["complete"] and second == []


@on_ranks((2, Case("fsdp1", trigger="global")), (2, Case("fsdp2", model="tiled")))
def test_ranks_whose_copies_of_a_sum_differ_decide_alike(launch: Launch, world: int, case: Case) -> None:
    """An all-reduce does not promise that all ranks get the same bits; at the threshold they would part."""

    def with_other_sums() -> tuple[float, float, Run]:
        options = {"spike_detection": True, "spike_trigger": "global"}
        first = train(case, **options, grad_norm_threshold=1.0, bisect_budget_steps=1)
        trigger = json.loads(first.events[0])[0]["trigger"]
        # Just over the norm, and under what rank 1's copy of the sum would give.
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

    for norm, threshold, run in launch(world, with_other_sums):
        assert norm < threshold < norm * (1 + 4e-9) and run.events == ["[]"]


@pytest.mark.parametrize("what", ["the units", "a norm", "the event"])
def test_out_of_memory_between_passes_ends_the_search(launch: Launch, what: str) -> None:
    """On rank 1, in what is shared before the first probe or read after one; or as rank 0 writes."""

    def prepare(actor: Any) -> None:
        if dist.get_rank() != 1 or what == "the event":
            return
        if what == "a norm":
            norms = actor.gradloc._model.meter
            stop = norms.stop
            norms.stop = lambda: stop() if actor.gradloc.current else run_out_of_memory()
            return
        measure = actor.gradloc._measure

        def measured(where: Any) -> Any:
            mini_batch = measure(where)
            mini_batch._own_figures = run_out_of_memory
            return mini_batch

        actor.gradloc._measure = measured

    def failing_beside_the_passes() -> tuple[dict[str, bool], Run]:
        with failing(event, "_trigger", 1, [0] if what == "the event" else []):
            return compared(Case("fsdp2", planted=THREE), prepare=prepare)

    results = launch(2, failing_beside_the_passes)
    first, second = harmless(results)
    assert second == []
    if what == "a norm":
        (found,) = first
        assert "OutOfMemoryError" in found["error"] and not found["complete"]
    else:
        assert first == [] and [run.metrics[0]["actor/gradloc/triggered"] for _, run in results] == [1, 1]


@on_ranks(on_engine(2, Case(mini_batch=4, planted=THREE)))
@cases("what ranks", ("norms", [1]), ("weights", [0, 1]), ("weights and TokenClip", [1]), ("sums", [1]))
def test_an_unread_pass_ends_the_searches_of_an_update(
    launch: Launch, world: int, case: Case, what: str, ranks: list[int]
) -> None:
    """And not training. The next update is watched again."""
    clip = {"token_clip": TokenClipConfig(enable=True, action="log")} if "TokenClip" in what else {}

    def with_an_unread_pass() -> tuple[dict[str, bool], Run]:
        with failing(*READ[what], ranks):
            return compared(case, **clip)

    results = launch(world, with_an_unread_pass)
    assert harmless(results) == [[], []]
    for _, run in results:
        first, second = (max(as_list(metrics["actor/gradloc/token_norm_max"])) for metrics in run.metrics)
        assert first == 0 and second > 0


@pytest.mark.slow
@cases(
    "function case said",
    (failing_alone, Case(planted=THREE), "gradient was not checked for a spike: an error on this rank"),
    # With sequence parallelism, no other pass's collective calls can be made in place of the rest of this one's.
    pytest.param(
        failing_on_shared_data,
        Case(packed=True, planted=((0, 0, 4),)),
        "an extra pass .*OutOfMemoryError(.|\n)*sequence parallelism",
        marks=ON_ENGINE,
    ),
    ids=["unknown to others", "shared sequences"],
)
def test_an_error_that_would_leave_ranks_waiting_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Case], None], case: Case, said: str
) -> None:
    monkeypatch.setattr(cluster, "SECONDS_AFTER_FAILURE", 5.0)
    with pytest.raises(RankFailed, match=f"rank 1: (.|\n)*RankLostError: .*{said}"):
        Cluster(2).run(function, case)


@ON_ENGINE
@pytest.mark.slow
def test_the_rank_left_by_a_killed_one_fails_by_itself() -> None:
    """Rank 1 is killed in the middle of a pass of a search."""
    kill = partial(disturb, where="in a layer", when=2, disturbance=lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9") as failure:
        Cluster(2).run(partial(train, prepare=kill, **DETECTION), Case("fsdp2", planted=THREE))
    message = str(failure.value)
    assert "rank 0: Traceback" in message and "RankLostError" in message and "no answer" not in message
