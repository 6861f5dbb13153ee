"""The checks of a run in the patched actor: rank 0 judges the sums of all, and an event's verdict is the warning's."""

import itertools
import json
import math
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from actor_cases import train
from actors import Case, events_of
from notation import cases
from reduced_meter_cases import train as train_on_shared_data
from test_actor import Launch, on_engine, on_ranks
from verl import DataProto

import gradloc.judge
from gradloc import guarded, judging
from gradloc.facts import NAMES

DETECTION = {"spike_detection": True, "grad_norm_threshold": 1e-6, "bisect_budget_steps": 2}


def judged_run(case: Case, stale_ranks: tuple[int, ...], calls: int, late: int = 0) -> tuple[Any, ...]:
    """What is said after the last update of several.

    The policy moves away from the reference with each update, either way: in the first one they are the same.

    Args:
        case (Case): What is trained.
        stale_ranks (tuple): Whose rollout has the reference's weights.
        calls (int): The number of updates.
        late (int): By how many positions the rollout's lists are late: a token in front has a log-prob, too.

    Returns:
        tuple: The answer, the state for a checkpoint, the verdicts of the last update's events, and its metrics.
    """
    actors: list[Any] = []
    updates = itertools.count()

    def change(batch: DataProto) -> None:
        columns, update = batch.batch, next(updates)
        generator = torch.Generator().manual_seed(dist.get_rank())
        old = columns["old_log_probs"]
        columns["ref_log_prob"] = old - 0.2 * update * torch.randn(old.shape, generator=generator)
        source = columns["ref_log_prob"] if dist.get_rank() in stale_ranks else old
        columns["rollout_log_probs"] = source.roll(late, 1) + 0.01 * torch.randn(old.shape, generator=generator)

    train(case, calls=calls, prepare=actors.append, change_batch=change, **DETECTION)
    gradloc = actors[0].gradloc
    verdicts = [event["verdict"] for event in events_of(actors[0])]
    return gradloc.answer(), gradloc.state_dict()["run_checks"], verdicts, gradloc.metrics()


def named(answer: Any) -> dict[str, str]:
    """The names of what is broken, by identity."""
    return {warning["identity"]: warning["name"] for warning in answer["warnings"]}


ORDINARY = Case("fsdp2", mini_batch=4, kl=True, rollout=True)


def test_rank_0_judges_the_sums_of_all_ranks(launch: Launch) -> None:
    first, other = launch(2, judged_run, ORDINARY, (1,), 8)
    assert other[:2] == (None, None) and other[2:] == first[2:]
    answer, state, verdicts, _ = first
    # The old log-probs are 0.04 nats off, by a noise that is the same in each update.
    assert named(answer)["rollout_log_probs"] == "partly_stale"
    (warning,) = [each for each in answer["warnings"] if each["name"] == "partly_stale"]
    assert int(warning["claim"].split("%")[0]) == pytest.approx(50, abs=10) and warning["since"] > 7
    assert len(state["records"]) == 8 and all(record["readings"]["rate"] > 0 for record in state["records"])
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {answer["warnings"][0]["name"]}


@on_ranks(on_engine(2, Case("fsdp1", mini_batch=4, epochs=2, kl=True, rollout=True, dynamic=True)))
def test_log_probs_of_other_positions_are_told_at_once(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, judged_run, case, (), 1, 1)
    assert all(other[2:] == results[0][2:] for other in results)
    answer, _, verdicts, metrics = results[0]
    assert named(answer)["rollout_log_probs"] == "misaligned"
    (warning,) = [each for each in answer["warnings"] if each["name"] == "misaligned"]
    assert "1 position earlier" in warning["claim"] and warning["column"] == "rollout"
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {answer["warnings"][0]["name"]}
    assert metrics["actor/gradloc/misplaced_share"] == 1


SMALL = {"layers.0", "layers.1", "norm"}  # the layers that have a norm's weights


def facts_of_run(case: Case, size: int = 1) -> tuple[dict[str, float], list[float], list[Any], dict[str, str]]:
    """The second of two updates by groups of `size` ranks that split their data.

    Returns:
        tuple: Its sums by name; how small weights have moved; what is known of the layers; and the identities' states.
    """
    actors: list[Any] = []
    others: Any = {"size": size, "meter": "reduced"} if size > 1 else {}
    run = (train_on_shared_data if size > 1 else train)(
        case, calls=2, prepare=actors.append, **others, **(DETECTION | {"grad_norm_threshold": 1e9})
    )
    facts = actors[0].gradloc._facts
    *layers, moved, reduced_sums, sums_of_passes = facts._layers
    # NaN, of layers without a small tensor, is unlike itself.
    layers[0] = {name: tuple(None if math.isnan(x) else x for x in of) for name, of in layers[0].items()}
    # The sum of a small tensor's gradient is linear, so that it is the passes', whatever is sharded or averaged.
    assert (reduced_sums is None) == (size > 1)
    for layer in SMALL if reduced_sums else ():
        value, square = reduced_sums[layer]
        assert value == pytest.approx(sums_of_passes[layer], rel=1e-4, abs=1e-5 * square**0.5) and value, layer
    return facts._sums, moved, layers, run.identities


def run_with_another_gradient(case: Case, factors: Sequence[float]) -> Any:
    """What is said after three updates, each of whose reduced gradient is multiplied on a rank before the step."""
    actors: list[Any] = []

    def change(actor: Any) -> None:
        actors.append(actor)
        step = actor.watch.step

        def changed(*arguments: Any) -> Any:
            for parameter in actor.actor_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factors[dist.get_rank()])
            return step(*arguments)

        actor.watch.step = changed

    train(case, calls=3, prepare=change, **(DETECTION | {"grad_norm_threshold": 1e9}))
    return actors[0].gradloc.answer()


@cases(
    "wrap factors said",
    *((wrap, (1.0, 1.0), "") for wrap in ("fsdp1", "fsdp2")),
    *((wrap, (0.5, 0.5), "50% off the sum of the passes': 0.5 times") for wrap in ("fsdp1", "fsdp2")),
    ("fsdp2", (1.0, 0.0), "% off"),
)
def test_a_gradient_that_is_changed_between_the_passes_and_the_step_is_told(
    launch: Launch, wrap: str, factors: tuple[float, ...], said: str
) -> None:
    answer, _ = launch(2, run_with_another_gradient, Case(wrap, mini_batch=4), factors)
    claims = [each["claim"] for each in answer["warnings"] if each["identity"] == "gradient"]
    assert bool(claims) == bool(said) and all(said in claim for claim in claims), answer["warnings"]


def check_same(sums: Sequence[float], expected: Sequence[float]) -> None:
    for name, of, other in zip(NAMES, sums, expected, strict=True):
        assert of == pytest.approx(other, rel=1e-4, abs=1e-4), name


@cases(
    "world wrappings",
    (1, [{"wrap": "none"}, {"wrap": "fsdp1"}, {"wrap": "fsdp2"}]),
    (2, [{"wrap": "fsdp1"}, {"wrap": "fsdp1-orig"}, {"wrap": "fsdp2"}, {"wrap": "fsdp2", "offload_policy": True}]),
    # A flat parameter's small tensor is on few ranks, the others have no part of it.
    (4, [{"wrap": "fsdp1"}, {"wrap": "fsdp1-orig"}, {"wrap": "fsdp2"}]),
    (4, [{"wrap": "fsdp1", "hsdp": True}, {"wrap": "fsdp2", "hsdp": True}]),
)
def test_what_is_known_of_the_layers_is_the_same_however_they_are_sharded(
    launch: Launch, world: int, wrappings: list[dict[str, Any]]
) -> None:
    found = []
    for options in wrappings:
        results = launch(world, facts_of_run, Case(**options, mini_batch=8, rollout=True))
        assert all(other[:3] == results[0][:3] for other in results)
        sums, moved, layers, states = results[0]
        # A step of SGD goes straight against the gradient.
        assert min(moved[:2]) > 0 and moved[2] == pytest.approx(-((moved[0] * moved[1]) ** 0.5), rel=1e-4)
        assert (layers[3] is not None) == (world == 1)
        assert {name: states[name] for name in ("loss", "gradient", "weights")} == dict.fromkeys(
            ("loss", "gradient", "weights"), "held"
        )
        assert moved[3] == 0 and {layer for layer, (*_, changed) in layers[0].items() if changed} == SMALL
        numbers = [*moved, *(norm for norm, *_ in layers[0].values()), *layers[1].values(), *layers[2].values()]
        found.append([[*layers[0]], *([sums[name] for name in NAMES], numbers)])
    for names, sums, numbers in found[1:]:
        assert names == found[0][0]
        check_same(sums, found[0][1])
        assert numbers == pytest.approx(found[0][2], rel=1e-4, abs=1e-9)


def test_what_ranks_share_is_summed_up_once(launch: Launch) -> None:
    """Two pairs of ranks that split their data (Ulysses) have the sums of two ranks."""
    case = Case("fsdp2", mini_batch=8, packed=True, rollout=True, nested=True)
    (sums, moved, *_), *_ = launch(2, facts_of_run, case)
    shared, *others = launch(4, facts_of_run, case, 2)
    assert all(other[:3] == shared[:3] for other in others)
    check_same([*shared[0].values()], [*sums.values()])
    assert shared[1] == pytest.approx(moved, rel=1e-4)


def broken(method: str, how: str) -> tuple[Any, ...]:
    """Training with a judge that fails in a method: its answer, metrics, weights, and how often it was asked that.

    And whether the metrics say that the run is checked.
    """
    actors: list[Any] = []
    ends = threading.Event()
    fails = {"raises": ZeroDivisionError("a bug of the judge"), "exits": SystemExit(3), "hangs": lambda *_: ends.wait()}
    of_judge: Any = mock.Mock(side_effect=fails.get(how), return_value=None if method == "__init__" else 7)
    with (
        mock.patch.object(gradloc.judge.Run, method, of_judge, create=True),
        mock.patch.object(judging, "_thread", guarded.PatientThread("the judge")),
        mock.patch.object(guarded, "PATIENCE", 0.5 if how == "hangs" else guarded.PATIENCE),
    ):
        run = train(ORDINARY, calls=2, prepare=actors.append, spike_detection=True, grad_norm_threshold=1e-6)
        assert json.loads(run.events[-1])
        actors[0].gradloc.load_state_dict(actors[0].gradloc.state_dict())
        metrics = actors[0].gradloc.metrics()
        is_checked = metrics["actor/gradloc/checked"]
        answer = actors[0].gradloc.answer()
    ends.set()
    return answer, sorted(metrics), [each.tolist() for each in run.parameters], of_judge.call_count, is_checked


@cases(
    "method how",
    *((name, "raises") for name in ("start_update", "take_in", "add_step", "answer", "__init__", "load_state_dict")),
    *(("take_in", "hangs"), ("answer", "hangs"), ("take_in", "exits"), ("answer", "answers 7")),
)
def test_a_failure_of_the_judge_costs_its_answer_alone(launch: Launch, method: str, how: str) -> None:
    first, other = launch(2, broken, method, how)
    assert (first[0], other[0]) == (None, None) and first[1] == other[1]
    assert first[3] <= 1 + (method == "load_state_dict")  # which is tried once more, without what was saved
    # The last mini-batch's, before a state was loaded.
    assert first[4] == other[4] == float(method == "load_state_dict")
    whole = launch(2, broken, "unheard_of", "raises")[0]
    assert first[2] == whole[2] and whole[4] == 1
