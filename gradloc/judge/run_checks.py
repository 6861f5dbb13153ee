# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every step that need no spike: collects what the ranks have summed up, and warns."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ..lines import RunWarning
from ..saved import checked
from .advantages import AdvantageChecks
from .layers import LayerChecks
from .log_probs import ENGINES_APART, LogProbChecks
from .loss import AT_ONCE, loss_warning
from .progress import IN_A_ROW, Progress, RunCheck, resume_note

# What a checkpoint keeps of how far a run is.
_KEPT = ("rates", "last_rates", "last_rate", "largest_rate")


class RunChecks:
    """Collects the sums of a run's mini-batches, and warns; on rank 0."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.log_probs = LogProbChecks(self.progress)
        self.advantages = AdvantageChecks(self.progress)
        self.layers = LayerChecks(self.progress)
        # The warning of a wrong loss, of the last mini-batch and of the update; and how many mini-batches in a
        # row had one.
        self._wrong_loss: RunWarning | None = None
        self._wrong_loss_in_update: RunWarning | None = None
        self._wrong_loss_times = 0

    def start_update(self, global_step: int | None) -> None:
        """Begins an update."""
        self._end_update()
        self.progress.step, self.progress.rates_before = global_step, self.progress.rates
        self._wrong_loss_in_update = None
        if self.progress.since_resume is not None:
            self.progress.since_resume += 1

    def take_in(
        self,
        sums: Sequence[float] | None,
        alignment: Sequence[float] | None = None,
        columns: Sequence[float] | None = None,
        of_loss: Sequence[Sequence[float]] = (),
    ) -> None:
        """Adds a mini-batch.

        Args:
            sums (Sequence, optional): What `own_sums` returned, added up over the ranks; None after the first PPO
                epoch, whose responses the others have again.
            alignment (Sequence, optional): The same of `own_alignment`.
            columns (Sequence, optional): The same of `own_columns`.
            of_loss (Sequence): What `own_loss_figures` returned, of each rank. A wrong loss is said at once where it
                is far too large, else once there are three in a row.
        """
        wrong_loss = loss_warning(of_loss) if of_loss else None
        self._wrong_loss_times = 0 if wrong_loss is None else self._wrong_loss_times + 1
        is_large = wrong_loss is not None and wrong_loss.get("factor", 0.0) >= AT_ONCE
        self._wrong_loss = wrong_loss if is_large or self._wrong_loss_times >= IN_A_ROW else None
        self._wrong_loss_in_update = self._wrong_loss or self._wrong_loss_in_update
        self.log_probs.take_in(sums, alignment)
        self.advantages.take_in(columns)

    def add_step(self, learning_rate: float) -> None:
        """Adds an optimizer step that is taken."""
        self.progress.rates += learning_rate
        self.progress.rate = max(self.progress.rate, learning_rate)

    def warnings(self, of_mini_batch: bool = False) -> list[RunWarning]:
        """The warnings of the update so far, the weightiest first: dicts of `name`, `sentence`, `check` and, where it
        is known, `share` (of the responses).

        Args:
            of_mini_batch (bool): Leave out that of a wrong loss if the last mini-batch's was right.
        """
        wrong_loss = self._wrong_loss if of_mini_batch else self._wrong_loss_in_update
        found = [*self.advantages.warnings(), *self.layers.warnings(), *self.log_probs.warnings()]
        if wrong_loss is not None:
            found.append(wrong_loss)
        found += self.log_probs.unsampled()
        found.sort(key=lambda warning: warning["name"] == ENGINES_APART)
        note = resume_note(self.progress.since_resume)
        return [{**warning, "sentence": warning["sentence"] + note} for warning in found]

    def state_dict(self) -> dict[str, Any]:
        """What later updates are compared with, for any number of ranks."""
        # Of a copy: a checkpoint may be saved within an update, and by rank 0 alone.
        ended = copy.deepcopy(self)
        ended._end_update()
        state = {name: getattr(ended.progress, name) for name in _KEPT}
        for check in ended._checks:
            state |= check.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict` after a resume; with None (no saved state) the next step is the first one seen."""
        state = {} if state is None else checked(state, {}, "run_checks")
        vars(self).update(vars(RunChecks()))
        for name in _KEPT:
            setattr(self.progress, name, checked(state.get(name, 0.0), 0.0, name))
        self.progress.rates_before, self.progress.since_resume = self.progress.rates, 0
        for check in self._checks:
            check.load_state_dict(state)

    @property
    def _checks(self) -> tuple[RunCheck, ...]:
        return self.log_probs, self.advantages, self.layers

    def _end_update(self) -> None:
        """Takes the update's figures into what later ones are compared with."""
        for check in self._checks:
            check.end_update()
        progress = self.progress
        # Last: the checks compare those of the updates before.
        if rates := progress.rates - progress.rates_before:
            progress.largest_rate = max(progress.largest_rate, progress.last_rate)
            progress.last_rates, progress.last_rate, progress.rate = rates, progress.rate, 0.0
