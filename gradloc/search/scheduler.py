# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Decides what to measure next, over several units at once."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .explanation import Explanation
from .probes import Probe, Segment, UnitKey, is_single
from .tokens import UnitTokens
from .tree import Tree

# A unit whose search takes more passes than this from here waits until the other units have been looked at. Once one of
# them is diffuse, so is the event, and each of the others gets this many passes.
_LONG = 8


@dataclass(frozen=True)
class Culprit:
    """A single token over the threshold; `candidate` is its index among the candidates given to `add_unit`."""

    unit: UnitKey
    candidate: int
    norm: float


class _Unit:
    """One unit: the segments to measure first (the whole unit, or the empty segment), and then its search.

    Args:
        tokens (UnitTokens): Its candidates.
        until (str): See `Search`.
        ordinary (float | None): The root mean square of ordinary tokens' gradient norms.
        probe_empty (bool): Whether to measure the unit without any token after its first non-finite norm.
    """

    def __init__(self, tokens: UnitTokens, until: str, ordinary: float | None, probe_empty: bool) -> None:
        self.tokens = tokens
        self.first: list[Segment] = []
        self.search: Explanation | Tree | None = None
        self.broken = False
        self.norm: float | None = None
        self.whole = tokens.segment(range(len(tokens.squares)))
        self._empty = tokens.segment([])
        self._until, self._ordinary, self._probe_empty = until, ordinary, probe_empty

    def measure_whole(self) -> None:
        self.first.append(self.whole)

    def begin(self, norm: float) -> None:
        """Starts the search if the unit's norm is over its threshold."""
        self.norm = norm
        self._look_at(norm)
        if self.tokens.is_over(self.whole.candidates, norm):
            kinds: dict[str, type[Explanation] | type[Tree]] = {"explained": Explanation, "exhaustive": Tree}
            self.search = kinds[self._until](self.tokens, self.whole, norm, self._ordinary)

    @property
    def ended(self) -> bool:
        return not self.first and (self.search is None or self.search.ended)

    def probes(self, count: int, passes_left: float) -> list[Probe]:
        found: list[Probe] = [*self.first[:count]]
        if self.search is not None and len(found) < count:
            found = found + self.search.probes(count - len(found), passes_left)
        return found

    def record(self, measured: Sequence[tuple[Probe, float]], count: int) -> None:
        self.tokens.alone |= {probe.candidates[0]: norm for probe, norm in measured if is_single(probe)}
        first, self.first = self.first, [segment for segment in self.first if segment not in dict(measured)]
        others = [(probe, norm) for probe, norm in measured if probe not in first]
        if self.search is not None and others:
            self.search.record(others, count)
        for probe, norm in measured:
            if probe is self._empty:
                self.broken = not norm <= 0
            elif probe in first:
                self.begin(norm)
            else:
                self._look_at(norm)
        if self.broken:
            self.first, self.search = [], None

    def _look_at(self, norm: float) -> None:
        if self._probe_empty and not math.isfinite(norm):
            self._probe_empty = False
            self.first.append(self._empty)


class Search:
    """Finds the tokens behind the spikes of the units added to it.

    It makes no collective call. Every rank makes the same calls to it and gets the same results.

    Args:
        threshold (float): τ.
        until (str): "explained": search until a few tokens explain each unit's spike (see `Explanation`).
            "exhaustive": search until every token over τ is found (see `Tree`).
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms.
    """

    def __init__(self, threshold: float, until: str = "explained", ordinary: float | None = None) -> None:
        self._threshold = threshold
        self._until = until
        self._ordinary = ordinary
        self._units: dict[UnitKey, _Unit] = {}

    @property
    def culprits(self) -> list[Culprit]:
        """The culprits found so far, each measured alone over τ."""
        return [
            Culprit(name, candidate, search.tokens.alone[candidate])
            for name, search in self._searches()
            for candidate in search.culprits
        ]

    @property
    def broken(self) -> list[UnitKey]:
        """Units whose gradient is non-finite even without any token."""
        return [name for name, unit in self._units.items() if unit.broken]

    @property
    def open_segments(self) -> list[Segment]:
        """The segments over their thresholds whose search has not ended."""
        waiting = [segment for unit in self._units.values() for segment in unit.first if segment.candidates]
        return waiting + [segment for _, search in self._searches() for segment in search.open_segments]

    @property
    def given_up(self) -> list[Segment]:
        """The unmeasured segments of units whose search was given up."""
        return [segment for _, search in self._searches() for segment in search.given_up]

    @property
    def diffuse(self) -> list[tuple[Segment, float]]:
        """The smallest segments with a spike but no culprit, with their norms."""
        return [found for _, search in self._searches() for found in search.diffuse]

    def rest(self, unit: UnitKey) -> tuple[Segment, float] | None:
        """The unit without its culprits, and the norm of that; None if it was not measured."""
        state = self._units[unit]
        if state.search is not None:
            return state.search.rest
        return None if state.norm is None else (state.whole, state.norm)

    def explained(self, unit: UnitKey) -> bool:
        """Whether the unit without its culprits was measured under its threshold."""
        rest = self.rest(unit)
        return rest is not None and not self.is_over(*rest)

    def knows(self, unit: UnitKey) -> bool:
        """Whether this unit was added, with at least one candidate."""
        return unit in self._units

    def threshold(self, segment: Segment) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        return self._units[segment.unit].tokens.threshold(segment.candidates)

    def is_over(self, segment: Segment, norm: float) -> bool:
        return self._units[segment.unit].tokens.is_over(segment.candidates, norm)

    def more_over(self) -> int | None:
        """Estimates from suspicion how many more tokens are over τ; None if no norm was measured to scale it."""
        ratios, scores, more = [], [], 0
        for _, search in self._searches():
            culprits, tokens = set(search.culprits), search.tokens
            for candidate, suspicion in enumerate(tokens.suspicion):
                weight = math.sqrt(tokens.squares[candidate])
                norm = tokens.alone.get(candidate)
                if norm is None:
                    scores.append(suspicion / weight)
                elif math.isfinite(norm):
                    ratios += [norm / suspicion] if suspicion > 0 else []
                    more += candidate not in culprits and tokens.is_over([candidate], norm)
        if not ratios:
            return None
        scale = statistics.median(ratios)
        return more + sum(scale * score > self._threshold for score in scores)

    def add_unit(
        self,
        unit: UnitKey,
        norm: float | None,
        suspicion: Tensor,
        weights: Tensor,
        probe_empty: bool = True,
    ) -> None:
        """Adds a unit to search.

        Args:
            unit (UnitKey): Its name in `Segment.unit`.
            norm (float | None): The norm of the candidates' gradient; None if it must be measured first.
            suspicion (Tensor): s_t of each candidate, shape (n,).
            weights (Tensor): w_t of each candidate, shape (n,), not zero.
            probe_empty (bool): Whether to measure the unit without any token after a non-finite norm.
        """
        if len(weights) == 0:
            return
        tokens = UnitTokens(unit, self._threshold, suspicion, weights)
        self._units[unit] = _Unit(tokens, self._until, self._ordinary, probe_empty)
        if norm is None:
            self._units[unit].measure_whole()
        else:
            self._units[unit].begin(norm)

    def next(self, count: int, passes_left: float = math.inf) -> list[Probe]:
        """The probes to measure in the next pass; none when the search is over.

        Args:
            count (int): The maximum number of probes.
            passes_left (float): How many passes the budget still allows. A code that needs more is not started.
        """
        explanations = [search for _, search in self._searches() if isinstance(search, Explanation)]
        if any(search.diffuse for search in explanations):
            for search in explanations:
                search.curtail(_LONG)
        later = self._later(count, passes_left)
        first = [unit for unit in self._units.values() if not unit.ended and unit not in later]
        probes: list[Probe] = []
        for units in first, later:
            while units and len(probes) < count:
                unit = units.pop(0)
                # The remaining probes are divided equally among the remaining units.
                part = max((count - len(probes)) // (len(units) + 1), 1)
                probes += unit.probes(part, passes_left)
        return probes

    def has_room(self, count: int, passes_left: float = math.inf) -> bool:
        """Whether another unit should be added before the next pass of `count` probes."""
        return len(self.open_segments) - len(self._later(count, passes_left)) < count

    def _later(self, count: int, passes_left: float) -> list[_Unit]:
        """The units with a long search ahead; those whose spike may still turn out to be diffuse come first.

        None if the passes that are left would not be enough for them.
        """
        searches = [
            (unit, unit.search)
            for unit in self._units.values()
            if isinstance(unit.search, Explanation) and not unit.ended
        ]
        if math.fsum(search.passes_ahead(count) for _, search in searches) >= passes_left:
            return []
        found = [(unit, search) for unit, search in searches if search.passes_ahead(count) > _LONG]
        return [unit for unit, _ in sorted(found, key=lambda pair: pair[1].unnamed > 0)]

    def record(self, measured: Sequence[tuple[Probe, float]]) -> None:
        """Records the norms of the probes that `next` returned. NaN and Inf count as over the threshold."""
        for name, unit in self._units.items():
            mine = [(probe, norm) for probe, norm in measured if probe.unit == name]
            if mine:
                unit.record(mine, len(mine))

    def _searches(self) -> Iterator[tuple[UnitKey, Explanation | Tree]]:
        return ((name, unit.search) for name, unit in self._units.items() if unit.search is not None)
