# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Warnings that need no spike: what the checks of the run and of the loss's scale are given, and what they say."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .fsdp import collectives
from .guarded import guarded
from .judge.alignment import ALIGNMENT_SUMS
from .judge.loss_scale import SCALE_FIGURES, loss_scale_warning
from .judge.rules import HOLDS
from .judge.run_checks import COLUMN_SUMS, RunChecks
from .measure.alignment import own_alignment
from .measure.micro_batch import MicroBatch
from .measure.run_sums import own_columns, own_scale_figures, own_sums

logger = logging.getLogger(__name__)


class RunWarnings:
    """Checks each mini-batch of a run; the same on every rank. Each warning is logged once.

    Args:
        learning_rate (Callable): See `GradLoc`.
        loss_agg_mode (str, optional): See `GradLoc`.

    Attributes:
        checks (RunChecks): The checks, with what they have learned.
        of_update (list[dict]): The warnings of the update so far; see `RunChecks.warnings`.
    """

    def __init__(self, learning_rate: Callable[[], float | Tensor], loss_agg_mode: str | None) -> None:
        self.of_update: list[dict[str, Any]] = []
        self._learning_rate = learning_rate
        self._loss_agg_mode = loss_agg_mode
        self.checks = RunChecks()
        self._global_step: int | None = None
        self._logged: set[str] = set()

    def start_update(self, global_step: int | None) -> None:
        """Begins an update."""
        self.of_update, self._global_step = [], global_step
        self.checks.start_update(global_step)

    def own_figures(self, micro_batches: Sequence[MicroBatch], scale: float, where: Mapping[str, Any]) -> Tensor:
        """What one rank knows of a mini-batch, for `take_in`: float64 of one dimension. No host sync.

        Args:
            micro_batches (Sequence[MicroBatch]): Its micro-batches.
            scale (float): Their loss scale.
            where (Mapping): Its `epoch` and `mini_batch`.
        """
        tokens = [micro_batch.tokens for micro_batch in micro_batches]
        checked = [{**each, "unsampled": HOLDS["unsampled"](each, {})} for each in tokens]
        first = (where["epoch"], where["mini_batch"]) == (0, 0)
        sums = own_sums(checked, first, self.checks.bypass)
        scales = own_scale_figures(tokens, scale, self._mode_of(micro_batches))
        return torch.cat([sums, own_alignment(tokens), own_columns(tokens), scales])

    def take_in(self, by_rank: Tensor, epoch: int) -> None:
        """Adds a mini-batch.

        Args:
            by_rank (Tensor): What `own_figures` returned on each rank, on the CPU.
            epoch (int): Its PPO epoch: all after the first have the same responses again.
        """
        rest = by_rank.shape[1] - ALIGNMENT_SUMS - COLUMN_SUMS - SCALE_FIGURES
        sizes = [rest, ALIGNMENT_SUMS, COLUMN_SUMS, SCALE_FIGURES]
        *to_add, of_scale = by_rank.split(sizes, dim=1)
        sums, alignment, columns = (each.sum(0).tolist() if epoch == 0 else None for each in to_add)
        self.checks.take_in(sums, loss_scale_warning(of_scale.tolist()), alignment, columns)
        self.of_update = self.checks.warnings()
        for warning in self.of_update:
            if warning["name"] not in self._logged and collectives.rank() == 0:
                logger.warning("Step %s: %s %s", self._global_step, warning["sentence"], warning["check"])
            self._logged.add(warning["name"])

    def add_step(self) -> None:
        """Adds an optimizer step that is about to be taken."""
        rate = 0.0
        with guarded("the learning rate cannot be read; run checks take it for 0", self._logged):
            rate = float(self._learning_rate())  # an optimizer may have a tensor
        self.checks.add_step(rate)

    def _mode_of(self, micro_batches: Sequence[MicroBatch]) -> str | None:
        """How the losses of these micro-batches are aggregated; None if that is unknown, or not the same for all."""
        modes = {micro_batch.loss_agg_mode or self._loss_agg_mode for micro_batch in micro_batches}
        return modes.pop() if len(modes) == 1 else None
