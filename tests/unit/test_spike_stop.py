"""`spike_action=stop`: when the trainer ends a run, and the exit code of that."""

from pathlib import Path
from typing import Any

import pytest
from notation import Capsys, cases
from omegaconf import OmegaConf
from scripts import run

from gradloc.adapters.spike_stop import EXIT_CODE, RepeatedSpikes, SpikeStop, exit_at_repeated_spikes

ACTOR = {"spike_detection": True, "spike_action": "stop", "spike_stop_after": 3, "bisect_dump_dir": "/run/bisect_dump"}


def spike_stop(last_step: int = 100, **changes: Any) -> SpikeStop:
    config = {"actor_rollout_ref": {"actor": ACTOR | changes}, "trainer": {"default_local_dir": "/run"}}
    return SpikeStop(OmegaConf.create(config), last_step)


def step_of_the_end(stop: SpikeStop, spikes: list[int]) -> int | None:
    """The step that ends a run with so many spikes in its steps, the first of which is 11."""
    for step, count in enumerate(spikes, 11):
        due = stop.is_due({"actor/gradloc/triggered": float(count), "actor/pg_loss": 0.0}, step)
        try:
            stop.end_if_due(step)
        except RepeatedSpikes:
            assert due
            return step
        assert not due
    return None


@cases(
    "spikes end",
    ([0, 1, 1, 0, 1, 1, 0, 1], None),  # never three within three steps
    ([1, 0, 1, 1, 1], 15),
    ([0, 2, 0, 1], 14),  # two in one step
    ([0, 2, 0, 0, 1], None),
)
def test_a_run_ends_after_the_given_spikes_within_some_steps(spikes: list[int], end: int | None) -> None:
    assert step_of_the_end(spike_stop(), spikes) == end


def test_a_run_is_not_stopped_in_its_last_step() -> None:
    assert step_of_the_end(spike_stop(last_step=12), [0, 9]) is None
    assert step_of_the_end(spike_stop(last_step=12), [9]) == 11
    # One spike is enough where that is asked for.
    assert step_of_the_end(spike_stop(spike_stop_after=1), [0, 0, 1]) == 13
    for off in ({"spike_action": "log"}, {"spike_detection": False}):
        assert step_of_the_end(spike_stop(**off), [9] * 9) is None
    # Metrics without any, and before they are reduced.
    stop = spike_stop(spike_stop_after=2)
    assert not stop.is_due({}, 1)
    assert not stop.is_due({"actor/gradloc/triggered": [1.0]}, 2)
    assert stop.is_due({"actor/gradloc/triggered": 1.0}, 3)


def test_where_nothing_checks_the_run_is_told_once(capsys: Capsys) -> None:
    stop = spike_stop(spike_action="log")
    for step, checked in enumerate((None, 1.0, [1.0], [0.0], None, 0.0, 1.0, 0.0)):
        stop.is_due({} if checked is None else {"actor/gradloc/checked": checked}, step)
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in told] == [
        f"Step {step}: GradLoc does not check the run" for step in (3, 7)
    ]


def test_other_errors_are_left_alone_and_the_exit_code_is_known() -> None:
    with exit_at_repeated_spikes():
        pass
    with pytest.raises(KeyError), exit_at_repeated_spikes():
        raise KeyError("x")
    # The embedded run and the documentation know the exit code.
    page = Path(__file__).parents[2] / "docs/use/configuration.md"
    assert run.STOPPED == EXIT_CODE and f"exit code {EXIT_CODE}" in page.read_text()
