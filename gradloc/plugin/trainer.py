# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's part, as a mixin over verl's V1 trainers."""

# The mixin uses what only the trainer behind it has.
# mypy: disable-error-code="attr-defined,misc"

import functools
from typing import Any

from verl.utils.debug import marked_timer

from ..adapters.spike_stop import SpikeStop, start_spike_stop
from ..config import is_on
from . import status
from .status import expect


class SpikeTrainer:
    """Checks the settings, tells the workers the step, and ends a run after repeated spikes."""

    spike_stop: SpikeStop
    _saved_step: int | None = None

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if is_on(self.config.actor_rollout_ref.actor):
            status.require()
        self.spike_stop = start_spike_stop(self.config, self.total_training_steps)

    def on_step_begin(self) -> None:
        # Only now is the step before this one logged.
        self.spike_stop.end_if_due(self.global_steps - 1)
        super().on_step_begin()

    def on_train_end(self) -> None:
        self.spike_stop.end_if_due(self.global_steps - 1)
        super().on_train_end()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        batch = super().step(metrics, timing_raw)
        self.spike_stop.is_due(metrics, self.global_steps)
        return batch

    def on_step_end(self) -> None:
        if self.spike_stop.ends_run and self._saved_step != self.global_steps:
            with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                self._save_checkpoint()
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info.update({"training_step": self.global_steps})
        return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        update = self.local_trigger_step, self.parameter_sync_step
        told = {"update_of_step": update, "rollout_is_current": self.trainer_mode == "sync"}
        batch.extra_info.update({"training_step": self.global_steps, **told})
        return super()._update_actor(batch, metrics)


def check_trainer_class(trainer: type) -> None:
    """Raises Unfit if the mixin cannot stand over this trainer."""
    for name in ("_init_dataloader", "on_step_begin", "on_step_end", "on_train_end", "_save_checkpoint"):
        expect(trainer, name, "self")
    expect(trainer, "step", "self", "metrics", "timing_raw")
    for name in ("_update_actor", "_update_critic"):
        expect(trainer, name, "self", "batch", "metrics")


@functools.cache
def with_spikes(trainer: type) -> type:
    """The trainer with the mixin, under its own name."""
    return type(
        trainer.__name__, (SpikeTrainer, trainer), {"__module__": trainer.__module__, "__doc__": trainer.__doc__}
    )
