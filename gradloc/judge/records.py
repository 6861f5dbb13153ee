# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The updates of a run, as the identities see them: a list of records, the last one being the present."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..levels import LASTS, LEVEL

# So many updates are kept: the first, of which some things can be told that no later one tells, and the last ones.
MOST_RECORDS = 64
_VERSION = 1
Readings = dict[str, float]


@dataclass(frozen=True)
class Streak:
    """How long an identity has been off, and how far.

    Args:
        score (float): The sum of log_LEVEL(times) of its updates: with `LASTS`, the identity is broken.
        since (int, optional): The step of the first of them; None if that has no number.
        quiet (int): How many updates in a row it has held since. With `LASTS` of them, the streak is over.
    """

    score: float = 0.0
    since: int | None = None
    quiet: int = 0

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
    """An update.

    Args:
        step (int, optional): Its number.
        rate (float): The sum of the learning rates of its optimizer steps.
        is_first (bool): Whether no optimizer step was taken before it: then all engines have the same weights.
        readings (dict): Numbers by name, made of its sums; what is not known is missing.
        times (dict): By residual, how many times the usual it is.
        streaks (dict): By identity.
    """

    step: int | None = None
    rate: float = 0.0
    is_first: bool = False
    readings: Readings = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    streaks: dict[str, Streak] = field(default_factory=dict)


def latest(records: Sequence[Any]) -> list[Any]:
    """Those that are kept."""
    return [*records[:1], *records[1:][1 - MOST_RECORDS :]]


def as_state(records: Sequence[Record]) -> dict[str, Any]:
    """What a checkpoint keeps of them."""
    return {"version": _VERSION, "records": [asdict(each) for each in records]}


def from_state(state: Any) -> list[Record]:
    """Restores `as_state`.

    Raises:
        ValueError: It is of another form, or of another version.
    """
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        raise ValueError(f"run records of version {_VERSION} are expected")
    return [_record(each) for each in latest(state["records"])]


def _record(state: Mapping[str, Any]) -> Record:
    known = {each.name for each in fields(Record)}
    if not isinstance(state, Mapping) or state.keys() != known:
        raise ValueError(f"a run record has the fields {sorted(known)}")
    numbers = {name: {str(key): float(value) for key, value in state[name].items()} for name in ("readings", "times")}
    streaks = {
        str(name): Streak(float(each["score"]), _step(each["since"]), int(each["quiet"]))
        for name, each in state["streaks"].items()
    }
    return Record(_step(state["step"]), float(state["rate"]), bool(state["is_first"]), **numbers, streaks=streaks)


def _step(value: Any) -> int | None:
    return None if value is None else int(value)
