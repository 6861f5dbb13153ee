# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The updates of a run, as the identities see them: a list of records, the last one being the present."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..levels import LASTS, LEVEL
from ..lines import Change, RunRecords

# So many updates are kept: the first, of which some things can be told that no later one tells, and the last ones.
MOST_RECORDS = 64
Readings = dict[str, float]
# The readings whose changes are told, which need not be wrong, and what each is.
_WATCHED: Mapping[str, str] = {
    "rate": "the learning rate of an update",
    "advantages.size": "the typical advantage",
    "rewarded": "the share of responses with a reward other than 0",
    "prompts": "distinct prompts per response",
    "length": "trained tokens per response",
}


@dataclass(frozen=True)
class Streak:
    """How long an identity has been off, and how far."""

    score: float = 0.0  # the sum of log_LEVEL(times) of its updates: with `LASTS`, the identity is broken
    since: int | None = None  # the step of the first of them; None if that has no number
    quiet: int = 0  # how many updates in a row it has held since: with `LASTS` of them, the streak is over

    @property
    def is_broken(self) -> bool:
        """Whether the identity is broken: until it has held for a while."""
        return self.score >= LASTS

    def then(self, times: float, step: int | None) -> "Streak":
        """After another update, in which the residual is so many times the usual."""
        if times >= LEVEL:
            since = self.since if self.score else step
            return Streak(self.score + math.log(min(times, LEVEL**LASTS), LEVEL), since, 0)
        if not self.score or self.quiet + 1 >= LASTS:
            return Streak()
        return Streak(self.score, self.since, self.quiet + 1)


@dataclass(frozen=True)
class Record:
    """An update."""

    step: int | None = None  # its number
    readings: Readings = field(default_factory=dict)  # made of its sums; what is not known is missing
    times: dict[str, float] = field(default_factory=dict)  # by residual, how many times the usual it is
    streaks: dict[str, Streak] = field(default_factory=dict)  # by identity

    @property
    def is_first(self) -> bool:
        """Whether no optimizer step was taken before it: then all engines have the same weights."""
        return self.readings.get("has_moved") == 0

    @property
    def rate(self) -> float:
        """The sum of the learning rates of its optimizer steps."""
        return self.readings.get("rate", 0.0)

    @property
    def moved(self) -> float:
        """How far it has moved the policy: twice what its later mini-batches, in the mean half-way, have seen."""
        return 2 * self.readings.get("step.gap", 0.0)

    def is_usual(self, residual: str) -> bool:
        """Whether a residual is known, and not off."""
        return self.times.get(residual, math.inf) < LEVEL


def as_state(records: Sequence[Record]) -> RunRecords:
    """What a checkpoint keeps of them."""
    found: Any = [asdict(each) for each in records]
    return {"version": 3, "records": found}


def from_state(state: RunRecords) -> list[Record]:
    """Restores `as_state`."""
    records: Any = state["records"]
    streaks = ({name: Streak(**of) for name, of in each["streaks"].items()} for each in records)
    return [Record(**{**each, "streaks": of}) for each, of in zip(records, streaks, strict=True)]


def changes(records: Sequence[Record]) -> list[Change]:
    """What has changed in the last update: is `LEVEL` times what it was in the ones before, or so much less."""
    found: list[Change] = []
    for name, what in _WATCHED.items():
        values = [each.readings[name] for each in records if name in each.readings]
        if name in records[-1].readings and _is_other(values) and not _is_other(values[:-1]):
            now, before = values[-1], statistics.median(values[:-1])
            sentence = f"In step {records[-1].step}, {what} is {now:.3g}, and was {before:.3g} before."
            found.append({"what": name, "now": now, "before": before, "sentence": sentence})
    return found


def _is_other(values: Sequence[float]) -> bool:
    """Whether the last one is unlike the ones before."""
    before = statistics.median(values[:-1]) if len(values) > LASTS else 0.0
    return before > 0 and not 1 / LEVEL < values[-1] / before < LEVEL
