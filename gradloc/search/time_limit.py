# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Limits the time of searches, on rank 0's clock, so that all ranks stop together."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..fsdp import collectives

# With "auto", searches may take this fraction of the run's time so far, and this many seconds more, so that the first
# search of a run is not refused because the run is young.
SHARE = 0.03
HEAD_START = 300.0

Clock = Callable[[], float]


class TimeLimit:
    """How long one search may take."""

    def __init__(self, seconds: float | None, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds  # the same on every rank; None for no limit
        self._clock, self._begun = clock, clock()
        self.has_ended_search = False  # whether the search was told to end

    def is_up(self) -> bool:
        """Whether the search must end, the same on every rank. A collective call, unless there is no limit."""
        if self.seconds is not None and not self.has_ended_search:
            limit = self.seconds
            self.has_ended_search = collectives.broadcast(lambda: self._clock() - self._begun >= limit, 0)
        return self.has_ended_search


class SearchTime:
    """How long the searches of a run took, and how long the next one may take.

    Every rank counts by its own clock, and only what rank 0 has counted is used.
    """

    def __init__(self, setting: float | str | None, clock: Clock = time.monotonic) -> None:
        self._setting = setting  # `bisect_budget_seconds`
        self._clock = clock
        self._begun = clock()  # when the run would have begun without interruptions
        self._spent = 0.0

    @contextmanager
    def search(self) -> Iterator[TimeLimit]:
        """Wraps a search, whose time is counted, also after an error. A collective call."""
        begun = self._clock()
        try:
            yield self._limit(lambda: max(HEAD_START + SHARE * self._run() - self._spent, 0.0))
        finally:
            self._spent += self._clock() - begun

    def drill(self) -> TimeLimit:
        """The limit for a drill, which is not counted: that of a run's first search. A collective call."""
        return self._limit(lambda: HEAD_START)

    def state_dict(self) -> dict[str, float]:
        """What is known of the run: that of rank 0 is to be saved."""
        return {"run": self._run(), "searches": self._spent}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None the run starts over."""
        state = state or {"run": 0.0, "searches": 0.0}
        self._begun, self._spent = self._clock() - float(state["run"]), float(state["searches"])

    def _run(self) -> float:
        return self._clock() - self._begun

    def _limit(self, auto: Callable[[], float]) -> TimeLimit:
        """One of `bisect_budget_seconds`; with "auto", of what `auto` returns on rank 0. A collective call."""
        setting = self._setting
        if setting is None:
            return TimeLimit(None, self._clock)
        seconds = collectives.broadcast(lambda: auto() if setting == "auto" else float(setting), 0)
        return TimeLimit(seconds, self._clock)
