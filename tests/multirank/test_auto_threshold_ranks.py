"""grad_norm_threshold=auto in actors that have no norms to go by."""

from functools import partial

from actor_cases import train
from actors import Case
from notation import cases
from test_actor import Launch, places
from valid_events import valid_events

AUTO = {"spike_replay": 0, "spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50}


@cases(
    "world case",
    (2, Case("fsdp2", planted=((1, 3, 6),), nan=((0, 2, 7),))),
    # One micro-batch in all, and the reduced meter: a NaN leaves nothing to tell ordinary norms from.
    (1, Case("none", rows=4, mini_batch=4, micro_batch=4, nan=((0, 2, 7),))),
    (2, Case("fsdp2", model="tiled", rows=4, mini_batch=4, nan=((0, 2, 7),))),
)
def test_in_the_warm_up_only_nan_is_a_spike(launch: Launch, world: int, case: Case) -> None:
    for run in launch(world, partial(train, calls=2, **AUTO), case):
        (event,), second = (valid_events(events) for events in run.events)
        assert {*case.nan} <= {*places(event)} <= {*case.nan, *case.planted} and second == []
        assert event["complete"]
        for metrics in run.metrics:
            assert not {"actor/gradloc/spike_margin", "actor/gradloc/threshold"} & metrics.keys()
