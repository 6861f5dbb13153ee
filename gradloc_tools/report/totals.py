# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the report says of all spikes, also of those that it does not keep."""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .drills import MiniBatch, mini_batch_of
from .figures import count, excess, number
from .verdicts import Verdicts

Key = TypeVar("Key")

# At most so many different errors are told apart.
_ERRORS = 1000


@dataclass
class Totals:
    """Sums over spikes.

    Attributes:
        events (int): How many there are, and mini-batches that were recorded and are not known to have one.
        recorded (int): How many of these there are.
        by_step (Counter): How many each step has; those without a step are left out.
        mini_batches (set): The mini-batches that have one, of known steps.
        thresholds (set): Their thresholds.
        verdicts (Verdicts): Their verdicts.
        diagnoses (Counter): By diagnosis.
        not_applied (Counter): By action, those whose action could not be carried out.
        errors (Counter): By the error that their search met.
        ended_early, passes, seconds: Sums.
        parts (list): The parts of diffuse events that are farthest over their thresholds; a heap.
    """

    events: int = 0
    recorded: int = 0
    by_step: Counter[int] = field(default_factory=Counter)
    mini_batches: set[MiniBatch] = field(default_factory=set)
    thresholds: set[float] = field(default_factory=set)
    verdicts: Verdicts = field(default_factory=Verdicts)
    diagnoses: Counter[str] = field(default_factory=Counter)
    not_applied: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    ended_early: int = 0
    passes: int = 0
    seconds: float = 0.0
    parts: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    _parts_seen: int = 0

    def add(self, event: Mapping[str, Any], most_parts: int) -> None:
        """Adds an event.

        Args:
            event (Mapping): What `condensed_event` returned.
            most_parts (int): How many parts are kept.
        """
        self.events += 1
        self.recorded += not event["is_spike"]
        if event["global_step"] is not None:
            self.by_step[event["global_step"]] += 1
            self.mini_batches.add(mini_batch_of(event))
        self.thresholds.add(number(event["threshold"]))
        self.verdicts.add(event["verdict"])
        self.diagnoses[event["diagnosis"]] += 1
        # Nothing is to be applied with "log"; a recorded spike has nothing to apply.
        if not event["applied"] and event["action"] != "log":
            self.not_applied[event["action"]] += 1
        if event["error"] is not None:
            count_bounded(self.errors, event["error"], _ERRORS)
        self.ended_early += event["ended_early"]
        self.passes += event["passes"]
        self.seconds += event["seconds"]
        for part in event["diffuse"]:
            self._parts_seen += 1
            heapq.heappush(self.parts, (excess(part), -self._parts_seen, {"global_step": event["global_step"], **part}))
            if len(self.parts) > most_parts:
                heapq.heappop(self.parts)

    @property
    def named(self) -> str:
        """How many there are of what, in words."""
        spikes, recorded = self.events - self.recorded, self.recorded
        parts = [count(spikes, "gradient spike")] if spikes else []
        parts += [count(recorded, "recorded mini-batch", "recorded mini-batches")] if recorded else []
        return " and ".join(parts)

    def largest_parts(self, most: int) -> list[dict[str, Any]]:
        return [part for *_, part in heapq.nlargest(most, self.parts)]


def count_bounded(counter: Counter[Key], key: Key, most: int) -> None:
    """Counts one more of `key`, unless it is new and `most` others are known."""
    if key in counter or len(counter) < most:
        counter[key] += 1
