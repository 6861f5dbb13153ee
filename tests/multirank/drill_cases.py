"""Updates with a spike drill, and the same without."""

import json
from typing import Any

import reduced_meter_cases
import torch.distributed as dist
from action_cases import DETECTION, fill_with_nan
from actor_cases import Run, compare_runs, train
from actors import IDENTITY_THRESHOLD, Case
from batches import build_batch
from fault_cases import disturb, run_out_of_memory
from oracle import Unit, brute_force
from verl.workers.config import LayerClipConfig

# That of the first call's batch.
STEP = 7


def both(case: Case, options: dict[str, Any]) -> tuple[dict[str, bool], list[list[dict[str, Any]]], Run, Run]:
    """Two calls with a drill in the first, and without.

    Returns:
        tuple: What is bit-identical; the events of the calls without the drill; the runs.
    """
    options = with_detection(options)
    states: list[str] = []

    def keep_state(actor: Any) -> None:
        def hook(*_: Any) -> None:
            learned = [
                actor.gradloc.state_dict() | {"search_time": None},
                actor.layer_clip and actor.layer_clip.state_dict(),
            ]
            states.append(repr([learned, actor.scaler and actor.scaler.get_scale()]))

        actor.actor_optimizer.register_step_post_hook(hook)

    drilled = train(case, calls=2, prepare=keep_state, spike_drill_step=STEP, **options)
    plain = train(case, calls=2, prepare=keep_state, **options)
    same = compare_runs(drilled, plain)
    half = len(states) // 2
    same["learned"] = half > 0 and states[:half] == states[half:]
    # Extra passes take time and are counted apart.
    same["own metrics"] = [of_gradloc(metrics) for metrics in drilled.metrics] == [
        of_gradloc(metrics) for metrics in plain.metrics
    ]
    passes = [[sum(event["passes"] for event in spikes(events)) for events in run.events] for run in (drilled, plain)]
    same["passes"] = passes[0] == passes[1]
    return same, [json.loads(events) for events in plain.events], drilled, plain


def with_detection(options: dict[str, Any]) -> dict[str, Any]:
    options = DETECTION | options
    if options.pop("clip_layers", False):
        options["layer_clip"] = LayerClipConfig(enable=True, warmup_steps=1, rule="ratio", ratio=1.5)
    return options


def spikes(events: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(events) if event["drill"] is None]


def of_gradloc(metrics: dict[str, Any]) -> str:
    left_out = ("drill_found", "seconds", "passes")
    return repr({name: value for name, value in metrics.items() if "gradloc" in name and not name.endswith(left_out)})


def sensitivities(case: Case) -> list[Unit]:
    """The brute force of the first mini-batch, in which each token's norm is divided by its coefficient's size."""
    units, _ = brute_force(case, build_batch(case, dist.get_rank()), tokens=True, steps=1)
    for unit in units:
        for token in unit.each:
            token.norm *= token.weight / abs(token.coefficient)
    return units


def with_shared_sequences(case: Case, size: int) -> tuple[dict[str, bool], str, dict[str, Any]]:
    """With groups of `size` ranks that share their data: what a drill leaves as it was, its events and metrics."""
    options = {"grad_norm_threshold": IDENTITY_THRESHOLD}
    drilled = reduced_meter_cases.train(case, size, spike_drill_step=STEP, **options)
    plain = reduced_meter_cases.train(case, size, **options)
    same = compare_runs(drilled, plain) | {"no spike": plain.events == ["[]"]}
    return same, drilled.events[0], drilled.metrics[0]


def without_weights(case: Case) -> tuple[dict[str, bool], Run]:
    """A drill in a mini-batch without a response token on any rank."""

    def reject(batch: Any) -> None:
        if batch.meta_info["global_steps"] == STEP:
            batch.batch["response_mask"].zero_()

    options = with_detection({})
    drilled = train(case, calls=2, change_batch=reject, spike_drill_step=STEP, **options)
    return compare_runs(drilled, train(case, calls=2, change_batch=reject, **options)), drilled


def with_broken_weights(case: Case, options: dict[str, Any]) -> tuple[dict[str, bool], Run]:
    """A drill while every parameter is NaN."""

    drilled = train(case, prepare=fill_with_nan, spike_drill_step=STEP, **with_detection(options))
    return {"no step": drilled.gradients == []}, drilled


def with_a_failing_pass(case: Case, rank: int, number: int) -> tuple[dict[str, bool], Run]:
    """One rank's pass of the drill with that number, counted from 0, fails; before it, there is the rehearsal."""

    def prepare(actor: Any) -> None:
        if dist.get_rank() == rank:
            disturb(actor, "before the forward", number + 2, run_out_of_memory)

    options = with_detection({})
    drilled = train(case, calls=2, prepare=prepare, spike_drill_step=STEP, **options)
    return compare_runs(drilled, train(case, calls=2, **options)), drilled
