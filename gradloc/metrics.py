# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics of an update, the same on every rank."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .evidence.sources import MISALIGNED_FRACTION
from .evidence.token_facts import MISALIGNED_NATS, off_the_rollout
from .fsdp import collectives
from .measure.meter import Level
from .measure.micro_batch import MicroBatch
from .update_figures import UpdateFigures
from .update_figures import own_figures as own_update_figures

logger = logging.getLogger(__name__)


def own_figures(micro_batches: Sequence[MicroBatch]) -> Tensor:
    """What one rank knows of a mini-batch, for `UpdateMetrics.take_in`. No host sync.

    Returns:
        Tensor: float64 of shape (n,): how many response tokens are misaligned with the rollout, of how many, and the
            figures of `UpdateFigures`.
    """
    counts = micro_batches[0].tokens["weight"].new_zeros(2, dtype=torch.float64)
    for tokens in (micro_batch.tokens for micro_batch in micro_batches):
        if "rollout_log_prob" in tokens:
            mask = tokens["response_mask"].bool()
            off = off_the_rollout(tokens["log_prob"] - tokens["rollout_log_prob"])
            counts += torch.stack([(mask & off).sum(), mask.sum()])
    return torch.cat([counts, own_update_figures([micro_batch.tokens for micro_batch in micro_batches])])


class UpdateMetrics:
    """Collects the figures and events of an update's mini-batches.

    Attributes:
        events (list[dict]): The update's events, drills included.
        drill_found (bool | None): Whether the update's drill found its token; None without a drill.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.drill_found: bool | None = None
        # Spikes that an error left without an event, and how many of them were skipped.
        self._without_event = self._skipped_without_event = 0
        self._misaligned = self._compared = 0.0
        self._token_norm_max = 0.0
        # τ of the mini-batch with the largest norm, and of the last one.
        self._threshold_of_max: float | None = None
        self._last_threshold: float | None = None
        self._figures = UpdateFigures()

    def take_in(self, by_rank: Tensor) -> None:
        """Adds what `own_figures` returned on each rank, shape (ranks, n), on the CPU."""
        misaligned, compared = by_rank[:, :2].sum(0).tolist()
        self._misaligned += misaligned
        self._compared += compared
        if misaligned > MISALIGNED_FRACTION * compared and collectives.rank() == 0:
            logger.warning(
                "%.0f of %.0f response tokens have log-probs that differ from the rollout's by more than %g nat: "
                "they may belong to other positions, weights or temperatures",
                misaligned,
                compared,
                MISALIGNED_NATS,
            )
        self._figures.take_in(by_rank[:, 2:])

    def take_in_level(self, level: Level, threshold: float | None) -> None:
        """Adds the size of a mini-batch's gradient and its τ; None in the warm-up of an automatic one."""
        self._last_threshold = threshold
        if level.token_norm >= self._token_norm_max:
            self._token_norm_max, self._threshold_of_max = level.token_norm, threshold
        self._figures.take_in_margin(level.token_norm, threshold)

    def add_spike_without_event(self, skipped: bool) -> None:
        """Counts a spike that an error left without an event, and whether its step was skipped."""
        self._without_event += 1
        self._skipped_without_event += skipped

    def metrics(self) -> dict[str, float]:
        """The metrics; see `GradLoc.metrics`."""
        optional = {"actor/gradloc/misaligned_share": self._misaligned / self._compared} if self._compared else {}
        threshold = self._last_threshold if self._threshold_of_max is None else self._threshold_of_max
        if threshold is not None:
            optional["actor/gradloc/threshold"] = threshold
        if self.drill_found is not None:
            optional["actor/gradloc/drill_found"] = float(self.drill_found)
        spikes = [event for event in self.events if event["drill"] is None]
        return (
            optional
            | self._figures.metrics()
            | {
                "actor/gradloc/token_norm_max": self._token_norm_max,
                "actor/gradloc/triggered": len(spikes) + self._without_event,
                "actor/gradloc/culprits": sum(len(event["culprits"]) for event in spikes),
                "actor/gradloc/passes": sum(event["passes"] for event in spikes),
                "actor/gradloc/seconds": sum(event["seconds"] for event in spikes),
                "actor/gradloc/out_of_time": sum(event["out_of_time"] for event in spikes),
                "actor/gradloc/skipped": self._skipped_without_event
                + sum(event["action"] == "skip" and event["applied"] for event in spikes),
            }
        )
