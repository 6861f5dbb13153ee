"""The spike drill: the planted token is found in every configuration, and training is as without a drill."""

import json
from functools import partial
from typing import Any

import pytest
import reduced_meter_cases
from action_cases import DETECTION
from actor_cases import Run, compare_runs, train
from actors import ENGINE, IDENTITY_THRESHOLD, Case
from notation import cases
from test_actor import ON_ENGINE, ONE, THREE, Launch, harmless, on_ranks, same_events, skip_what_verl_cannot_train
from test_faults import disturb
from valid_events import valid_events
from verl.workers.config import LayerClipConfig

# That of the first call's batch.
STEP = 7


def both(case: Case, options: dict[str, Any]) -> tuple[dict[str, bool], list[list[dict[str, Any]]], Run, Run]:
    """Two calls with a drill in the first, and without.

    Returns:
        tuple: What is bit-identical; the events of the calls without the drill; the runs.
    """
    options = DETECTION | options
    if options.pop("clip_layers", False):
        options["layer_clip"] = LayerClipConfig(enable=True, warmup_steps=1)
    states: list[str] = []

    def keep_state(actor: Any) -> None:
        def hook(*_: Any) -> None:
            learned = actor.gradloc.state_dict() | {"search_time": None}
            clip, scaler = actor.layer_clip, actor.scaler
            states.append(repr([learned, clip and clip.state_dict(), scaler and scaler.get_scale()]))

        actor.actor_optimizer.register_step_post_hook(hook)

    drilled = train(case, calls=2, prepare=keep_state, spike_drill_step=STEP, **options)
    plain = train(case, calls=2, prepare=keep_state, **options)
    same = compare_runs(drilled, plain)
    half = len(states) // 2
    same["learned"] = half > 0 and states[:half] == states[half:]
    # Extra passes take time and are counted apart.
    of_drilled, of_plain = (list(map(of_gradloc, run.metrics)) for run in (drilled, plain))
    same["own metrics"] = of_drilled == of_plain
    return same, [json.loads(events) for events in plain.events], drilled, plain


def of_gradloc(metrics: dict[str, Any]) -> str:
    left_out = ("drill_found", "seconds", "passes")
    return repr({name: value for name, value in metrics.items() if "gradloc" in name and not name.endswith(left_out)})


def with_a_failing_pass(case: Case, number: int) -> tuple[dict[str, bool], Run]:
    """Rank 1's pass of the drill with that number, counted from 0, fails; before it, there is the rehearsal."""
    prepare = partial(disturb, where="before the forward", when=number + 2)
    drilled = train(case, calls=2, prepare=prepare, spike_drill_step=STEP, **DETECTION)
    return compare_runs(drilled, train(case, calls=2, **DETECTION)), drilled


def check_drill(event: dict[str, Any], metrics: dict[str, Any]) -> None:
    drill = event["drill"]
    assert drill["found"] and metrics["actor/gradloc/drill_found"] == 1.0, (drill, event["error"])
    assert drill["passes"] == event["passes"] > 0
    assert (event["global_step"], event["epoch"], event["mini_batch"]) == (STEP, 0, 0)
    assert (event["action"], event["applied"], event["diagnosis"]) == ("log", True, "tokens")
    culprits = [{name: c[name] for name in drill["planted"]} for c in event["culprits"]]
    assert drill["planted"] in culprits


@on_ranks(
    (2, Case(checkpointing=True, dropout=0.2, optimizer="adamw", mini_batch=4), {}),
    (2, Case(model="moe", micro_batch=8), {"bisect_until": "exhaustive"}),
    (2, Case("fsdp1", precision="float16", loss_scale=2.0**14), {}),
    (2, Case("fsdp1-orig", dynamic=True, mini_batch=4, epochs=2, kl=True, entropy=True), {}),
    (2, Case("fsdp1", packed=True, fused=True, trigger="global"), {"spike_trigger": "global"}, ON_ENGINE),
    (2, Case(model="tiled"), {}),
    (2, Case(offload_policy=True), {"grad_norm_threshold": "auto", "clip_layers": True}),
    (1, Case("none", loss_agg_mode="seq-mean-token-mean"), {"grad_norm_threshold": "auto"}),
    # A real spike in the mini-batch of the drill is found besides, and acted on.
    (2, Case(planted=THREE), {"spike_action": "drop"}),
    (2, Case(planted=ONE), {"spike_action": "skip", "spike_trigger": "global", "clip_layers": True}, ON_ENGINE),
    names="world case options",
)
def test_a_drill_finds_its_token_and_changes_no_bit(
    launch: Launch, world: int, case: Case, options: dict[str, Any]
) -> None:
    skip_what_verl_cannot_train(case)
    results = launch(world, both, case, options)
    runs: list[Run] = [drilled for _, _, drilled, _ in results]
    first, second = same_events(runs)
    for same, without, drilled, _ in results:
        assert all(same.values()), same
        assert [len(events) for events in without] == [len(first) - 1, len(second)]
        check_drill(first[0], drilled.metrics[0])
        assert "actor/gradloc/drill_found" not in drilled.metrics[1]
    assert all(event["drill"] is None for event in first[1:] + second)
    assert len(first) == (2 if case.planted else 1)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=ON_ENGINE)])
def test_a_drill_finds_its_token_in_shared_sequences(launch: Launch, size: int) -> None:
    """With sequence parallelism, and with the reduced meter on unshared data."""
    case = Case("fsdp2", packed=size > 1)

    def with_shared_sequences() -> tuple[dict[str, bool], str, dict[str, Any]]:
        options = {"grad_norm_threshold": IDENTITY_THRESHOLD}
        drilled = reduced_meter_cases.train(case, size, spike_drill_step=STEP, **options)
        plain = reduced_meter_cases.train(case, size, **options)
        same = compare_runs(drilled, plain) | {"no spike": plain.events == ["[]"]}
        return same, drilled.events[0], drilled.metrics[0]

    results = launch(2, with_shared_sequences)
    for same, events, metrics in results:
        assert all(same.values()), same
        assert events == results[0][1]
        (event,) = valid_events(events)
        assert event["search"] == "reduced"
        check_drill(event, metrics or results[0][2])
    # verl 0.9 reads the metrics of the first of the ranks that share their data.
    assert [metrics == {} for *_, metrics in results] == [False, ENGINE and size == 2]


@cases(
    "case number",
    # The pass that measures the token, and one of the mini-batch's four.
    (Case("fsdp1"), 0),
    (Case("fsdp1"), 2),
    # Parts of a micro-batch do not reach all experts: a dummy pass comes first.
    (Case("fsdp2", model="moe", micro_batch=8), 1),
)
def test_a_drill_that_fails_gives_a_reason_on_all_ranks(launch: Launch, case: Case, number: int) -> None:
    results = launch(2, with_a_failing_pass, case, number)
    (event, *_), *_ = harmless(results)
    assert [run.metrics[0]["actor/gradloc/drill_found"] for _, run in results] == [0.0, 0.0]
    assert event["diagnosis"] == "incomplete" and not event["drill"]["found"]
    assert "OutOfMemoryError" in event["error"]
