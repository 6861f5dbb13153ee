"""grad_norm_threshold=auto in actors that have no norms to go by."""

from actor_cases import Run, train
from actors import Case
from notation import cases
from test_actor import Launch
from valid_events import valid_events

AUTO = {"spike_replay": 0, "spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50}


def warm_up(case: Case) -> Run:
    return train(case, calls=2, **AUTO)


def test_in_the_warm_up_only_nan_is_a_spike(launch: Launch) -> None:
    case = Case("fsdp2", planted=((1, 3, 6),), nan=((0, 2, 7),))
    for run in launch(2, warm_up, case):
        first, second = (valid_events(events) for events in run.events)
        (event,) = first
        assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} >= {(0, 2, 7)}
        assert second == []
        for metrics in run.metrics:
            assert not {"actor/gradloc/spike_margin", "actor/gradloc/threshold"} & metrics.keys()


@cases(
    "world case",
    (1, Case("none", rows=4, mini_batch=4, micro_batch=4, nan=((0, 2, 7),))),
    (2, Case("fsdp2", model="tiled", rows=4, mini_batch=4, nan=((0, 2, 7),))),
)
def test_without_any_finite_norm_only_nan_is_a_culprit(launch: Launch, world: int, case: Case) -> None:
    """One micro-batch in all, and the reduced meter: a NaN leaves nothing to tell ordinary norms from."""
    for run in launch(world, warm_up, case):
        first, second = (valid_events(events) for events in run.events)
        (event,) = first
        assert event["complete"] and second == []
        assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} == {(0, 2, 7)}
