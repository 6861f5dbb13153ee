# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Ends a run in which spikes come again and again (`spike_action=stop`): what the trainer calls."""

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import is_on
from ..version import __version__
from .trainer_checks import check_trainer

# The exit code after `spike_action=stop`. A scheduler that restarts failed jobs can be told to leave this one alone.
EXIT_CODE = 76


class RepeatedSpikes(RuntimeError):
    """Ends a run; the message is one sentence that names the evidence and the checkpoint."""


class SpikeStop:
    """Counts the events of the last steps, by verl's whole configuration. A run in its last step is not stopped.

    It also says where nothing checks the run any more: workers, whose logs say why, may be on another node.

    With `spike_action=stop`, the trainer ends a run in which spikes come again and again: it saves a checkpoint and
    raises `RepeatedSpikes`. The actor takes its optimizer steps as with `spike_action=log`.

    Attributes:
        ends_run (bool): Whether the last step that was taken in is the run's last one.
    """

    def __init__(self, config: Any, total_training_steps: int) -> None:
        actor = config.actor_rollout_ref.actor
        on = actor.get("spike_detection", False) and actor.get("spike_action", "log") == "stop"
        self._after: int | None = actor.spike_stop_after if on else None
        self._last_step = total_training_steps
        self._evidence: str = actor.get("bisect_dump_dir", "")
        self._checkpoints: str = config.trainer.default_local_dir
        self._events: deque[int] = deque(maxlen=self._after)  # of each of the last N steps
        self._was_checked = True
        self.ends_run = False

    def is_due(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Takes in a step; returns whether there were N events within the last N steps, N being `spike_stop_after`.

        The metrics are those of the actor, before or after they are reduced over its workers.
        """
        missing = {"checked": self._was_checked, "triggered": 0}
        found = (metrics.get(f"actor/gradloc/{name}", value) for name, value in missing.items())
        checked, triggered = (value[0] if isinstance(value, (list, tuple)) else value for value in found)
        if self._was_checked and not checked:
            said = (
                "GradLoc does not check the run (actor/gradloc/checked is 0). The logs of the actor's workers say why."
            )
            print(f"Step {step}: {said}", flush=True)
        self._was_checked = bool(checked)
        if self._after is not None:
            self._events.append(int(triggered))
            self.ends_run = sum(self._events) >= self._after and step < self._last_step
        return self.ends_run

    def end_if_due(self, step: int) -> None:
        """Raises RepeatedSpikes if `is_due` has said so of this step. To be called when the step is logged."""
        if not self.ends_run:
            return
        count = sum(self._events)
        spikes = "1 gradient spike" if count == 1 else f"{count} gradient spikes"
        steps = "step" if self._after == 1 else f"{self._after} steps"
        checkpoint = os.path.join(self._checkpoints, f"global_step_{step}")
        raise RepeatedSpikes(
            f"Training ends after step {step}, because of {spikes} in the last {steps} (spike_action=stop): "
            f"the evidence is in {self._evidence}, the checkpoint in {checkpoint}."
        )


@contextmanager
def exit_at_repeated_spikes() -> Iterator[None]:
    """Turns RepeatedSpikes, also of a remote run, into the end of this process: its sentence and `EXIT_CODE`."""
    try:
        yield
    except RepeatedSpikes as error:
        # Ray raises an error of its own that also is the remote one, and has that as its cause.
        print(getattr(error, "cause", error), file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)


def start_spike_stop(config: Any, total_training_steps: int) -> SpikeStop:
    """Refuses settings that cannot work, once the number of steps is known; returns what counts the run's spikes."""
    check_trainer(config, total_training_steps)
    if is_on(config.actor_rollout_ref.actor):
        print(f"GradLoc {__version__} is used from {Path(__file__).parents[1]}", flush=True)
    return SpikeStop(config, total_training_steps)
