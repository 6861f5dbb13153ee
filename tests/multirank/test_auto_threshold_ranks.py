"""grad_norm_threshold=auto in actors with checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from actor_cases import Run, train
from actors import Case, build_actor, checkpoints, events_of
from batches import build_batch
from test_actor import Launch
from valid_events import valid_events

AUTO = {"spike_replay": 0, "spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50}


def resume(case: Case, folder: str) -> tuple[list[float | None], list[float | None], list[float | None], str]:
    """Thresholds after a checkpoint, of the run that went on, of one resumed from it, and of one that begins anew.

    Returns:
        tuple: The three lists, and the events of the run that went on, whose last update has a spike.
    """

    def start() -> tuple[Any, Any]:
        actor = build_actor(case, **AUTO)
        return actor, checkpoints(actor, torch.optim.lr_scheduler.ConstantLR(actor.actor_optimizer, factor=1.0))

    def update(actor: Any, seeds: list[int]) -> list[float | None]:
        batches = [build_batch(case, dist.get_rank(), seed) for seed in seeds]
        return [actor.update_policy(batch).get("actor/gradloc/threshold") for batch in batches]

    actor, manager = start()
    update(actor, list(range(1, 7)))
    manager.save_checkpoint(folder)
    # The batch of seed 0 has the planted tokens.
    straight = update(actor, [7, 8, 0])
    events = json.dumps(events_of(actor))
    actor, manager = start()
    manager.load_checkpoint(folder)
    resumed = update(actor, [7, 8, 0])
    actor, _ = start()
    return straight, resumed, update(actor, [7, 8, 0]), events


def warm_up(case: Case) -> Run:
    return train(case, calls=2, **AUTO)


@pytest.mark.target(version="0.9.1")
def test_a_resumed_run_has_the_same_thresholds_and_finds_the_spike(launch: Launch, tmp_path: Path) -> None:
    case = Case("fsdp2", rows=8, mini_batch=2, planted=((1, 3, 6),))
    results = launch(2, resume, case, str(tmp_path))
    for straight, resumed, anew, events in results:
        assert None not in straight
        assert resumed == pytest.approx(straight, rel=1e-12)
        assert anew == [None, None, None]  # 12 mini-batches are no warm-up
        assert events == results[0][-1]
        (event,) = valid_events(events)
        assert [(c["rank"], c["micro_batch"], c["position"]) for c in event["culprits"]] == [(1, 0, 6)]
        assert event["trigger"]["threshold"] < event["trigger"]["norm"]


def test_in_the_warm_up_only_nan_is_a_spike(launch: Launch) -> None:
    case = Case("fsdp2", planted=((1, 3, 6),), nan=((0, 2, 7),))
    for run in launch(2, warm_up, case):
        first, second = (valid_events(events) for events in run.events)
        (event,) = first
        assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} >= {(0, 2, 7)}
        assert second == [] and "actor/gradloc/threshold" not in run.metrics[0]


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (1, Case("none", rows=4, mini_batch=4, micro_batch=4, nan=((0, 2, 7),))),
        (2, Case("fsdp2", model="tiled", rows=4, mini_batch=4, nan=((0, 2, 7),))),
    ],
)
def test_without_any_finite_norm_only_nan_is_a_culprit(launch: Launch, world: int, case: Case) -> None:
    """One micro-batch in all, and the reduced meter: a NaN leaves nothing to tell ordinary norms from."""
    for run in launch(world, warm_up, case):
        first, second = (valid_events(events) for events in run.events)
        (event,) = first
        assert event["complete"] and second == []
        assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} == {(0, 2, 7)}
