# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What to measure next: a best-first search for the culprits of many suspect units at once.

Pure bookkeeping on every rank alike: the same calls give the same answers, so no rank needs to be asked.
"""

import math
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

# The prior's share that follows suspicion. The rest is spread evenly over the tokens, so that each of n tokens has at
# least 0.1/n of the prior and is reached by at most log2(10 n) splits, however misleading suspicion is.
_TRUST = 0.9

# A bound must clear the threshold by this share of the norms that it comes from before it replaces a measurement: in
# half precision, two measurements of one gradient differ by as much.
_SLACK = 1e-2

# A segment under its threshold is still searched for a token over τ if its norm is this many times what ordinary tokens
# give it. Sets of ordinary tokens, whose norms have heavy tails, seldom reach that.
_LOUD = 1.75

# A code's base is at most the norm of its segment over what ordinary tokens give it, as they blur the reading; what it
# is where that is not known; and its limit. A reading may be off by this share of a digit.
_BASE_UNKNOWN, _BASE_MOST = 8, 64
_READING_ERROR = 0.45

# So many numbers of tokens of a unit are read without finding a culprit.
_READINGS = 3

# Where the tokens that a pass can measure alone hold this much of the prior, they are measured before a number is read.
_CONCENTRATED = 0.5

# After so many probes in a row that point at no token, in so many passes at least, a unit's spike may be a matter of
# all its tokens; where that is so of several units, they share the probes, down to so many for each. Of a unit that is
# left, so many of the likeliest tokens are measured.
_POINTLESS_PROBES, _POINTLESS_PASSES, _POINTLESS_LEAST = 24, 3, 8
_SAMPLE = 3

# So many probes, or at least so many passes, in a row may go into loud segments without finding a culprit.
_PATIENCE_PROBES, _PATIENCE_PASSES = 16, 4


@dataclass(eq=False)
class Segment:
    """Some tokens of a unit, whose gradient is to be measured as it is.

    An empty one measures what a unit's gradient is without any token: anything but zero means that it is broken.

    Args:
        unit (Hashable): The unit.
        candidates (list[int]): Indices into the candidates given to `add_unit`, the most suspicious first.
        prior (float): How likely it is to hold the unit's culprit.
        weight (float): Σ |w_t|.
        square (float): Σ w_t².
        lightest (float): The smallest |w_t|.
    """

    factors: ClassVar[None] = None

    unit: Hashable
    candidates: list[int]
    prior: float = 0.0
    weight: float = 0.0
    square: float = 0.0
    lightest: float = 0.0

    @property
    def size(self) -> int:
        return len(self.candidates)


@dataclass(frozen=True)
class Culprit:
    """A single token over the threshold; `candidate` is its index among the candidates given to `add_unit`."""

    unit: Hashable
    candidate: int
    norm: float


@dataclass(eq=False)
class Code:
    """Numbers for tokens of which one is a culprit, written in digits, of which a probe reads one.

    In the probe of a digit d, each token's share of the gradient is multiplied by sqrt(d / (base - 1)). If one token
    outweighs all others, the squared norm over that of them all is d / (base - 1) of that token. So a culprit that the
    prior does not expect is named by about log(n) / log(base) probes, which need not wait for each other as in
    bisection.

    Args:
        unit (Hashable): Their unit.
        norm (float): The norm of their gradient.
        candidates (list[int]): The tokens, as indices into the candidates given to `add_unit`.
        base (int): Of the digits.
        digits (int): How many each number has.
    """

    unit: Hashable
    norm: float
    candidates: list[int]
    base: int
    digits: int
    norms: dict[int, float] = field(default_factory=dict)

    @property
    def unread(self) -> "list[Digit]":
        return [Digit(self, digit) for digit in range(self.digits) if digit not in self.norms]

    def read(self) -> int | None:
        """The candidate that the norms of all digits' probes name; None if they do not fit a single token."""
        number = 0
        for digit, norm in self.norms.items():
            reading = (norm / self.norm) ** 2 * (self.base - 1)
            value = round(reading) if math.isfinite(reading) else -1
            if not 0 <= value < self.base or abs(reading - value) > _READING_ERROR:
                return None
            number += value * self.base**digit
        return self.candidates[number] if number < len(self.candidates) else None


@dataclass(eq=False)
class Digit:
    """A probe that reads one digit of a code: the candidates, and what each one's share is multiplied with."""

    code: Code
    digit: int

    @property
    def unit(self) -> Hashable:
        return self.code.unit

    @property
    def candidates(self) -> list[int]:
        return self.code.candidates

    @property
    def factors(self) -> list[float]:
        base = self.code.base
        digits = (number // base**self.digit % base for number in range(len(self.candidates)))
        return [math.sqrt(digit / (base - 1)) for digit in digits]


Probe = Segment | Digit


@dataclass(eq=False)
class _Parent:
    """A segment over its threshold, and what its unmeasured parts still hold together.

    Args:
        segment (Segment): The segment; empty for parts that are measured for another reason.
        norm (float): Its norm.
        rest (float): A lower bound of the norm of the unmeasured parts' sum: by the triangle inequality the segment's
            own norm less the norms of the parts measured so far.
        above (list[_Parent]): What it is a part of.
        joined (bool): Whether it stands for open parts of all those above.
        loud (bool): Whether the segment is not over its threshold, but loud.
        single (bool): Whether, for all that is known, one culprit may be all that is over it.
        tried (bool): Whether a number has been given to its tokens.
        parts (int): How many parts are unmeasured.
        explained (bool): Whether a part of it, or of its parts, was over its own threshold.
        over (list[_Parent]): Its parts that were.
    """

    segment: Segment
    norm: float
    rest: float = 0.0
    above: "list[_Parent]" = field(default_factory=list)
    joined: bool = False
    loud: bool = False
    single: bool = True
    tried: bool = False
    parts: int = 0
    explained: bool = False
    over: "list[_Parent]" = field(default_factory=list)
    energy: float = field(init=False)
    prior: float = field(init=False)

    def __post_init__(self) -> None:
        # What of the squared norm and of the prior is in the unmeasured parts.
        self.energy = self.norm * self.norm
        self.prior = self.segment.prior if self.segment.size else 1.0

    def explain(self) -> None:
        if not self.explained:
            self.explained = True
            for parent in self.above:
                parent.explain()

    def lineage(self) -> "set[_Parent]":
        """It, and all that it is a part of."""
        found, queue = {self}, [self]
        while queue:
            above = set(queue.pop().above) - found
            found |= above
            queue += above
        return found


class _Unit:
    """The candidates of one unit, their priors and weights, and what is known of the unit as a whole."""

    def __init__(
        self, name: Hashable, number: int, norm: float, suspicion: Tensor, weights: Tensor, probe_empty: bool
    ) -> None:
        weights = weights.double().abs()
        # A token's expected share of the squared norm, per squared weight: what is compared with the threshold.
        energy = (suspicion.double() / weights).square()
        finite = energy.isfinite()
        ceiling = 10 * energy[finite].max() if finite.any() and energy[finite].max() > 0 else torch.ones(())
        energy = torch.where(finite, energy, ceiling)
        n = len(energy)
        # Exact, so that it is the same on every rank: a tensor's sum depends on the number of threads.
        total = math.fsum(energy.tolist())
        prior = _TRUST * energy / total + (1 - _TRUST) / n if total > 0 else torch.full_like(energy, 1 / n)
        order = torch.argsort(prior, descending=True, stable=True)
        self.name = name
        self.number = number
        self.norm = norm
        self.probe_empty = probe_empty
        self.passes = 0
        # The probes over their threshold that point at no token, in each of the last passes.
        self.pointless: list[int] = []
        # The segment that is followed down to a single token before the unit is left.
        self.focus: _Parent | None = None
        self.has_loud = False
        self.readings = 0
        self.left = False
        self.measured_alone: set[int] = set()
        self.place: list[int] = order.argsort().tolist()
        self.prior: list[float] = prior.tolist()
        self.weights: list[float] = weights.tolist()
        self.whole = self.segment(order.tolist())
        # Of the parts that are not settled, as in `_Parent`.
        self.rest = norm
        self.energy = norm * norm

    def segment(self, candidates: Sequence[int]) -> Segment:
        weights = [self.weights[candidate] for candidate in candidates]
        return Segment(
            self.name,
            sorted(candidates, key=self.place.__getitem__),
            prior=sum(self.prior[candidate] for candidate in candidates),
            weight=sum(weights),
            square=sum(weight**2 for weight in weights),
            lightest=min(weights, default=0.0),
        )

    def halves(self, segment: Segment) -> tuple[Segment, Segment]:
        """Two parts that hold about half of the prior each."""
        sums = list(accumulate(self.prior[candidate] for candidate in segment.candidates))
        cut = min(range(segment.size - 1), key=lambda i: abs(sums[i] - segment.prior / 2)) + 1
        return self.segment(segment.candidates[:cut]), self.segment(segment.candidates[cut:])

    def is_concentrated(self, count: int) -> bool:
        """Whether the prior expects the culprit among its `count` likeliest tokens."""
        return sum(self.prior[candidate] for candidate in self.whole.candidates[:count]) > _CONCENTRATED

    def settle(self, norm: float) -> None:
        """Takes in the norm of a part that is under its threshold, or a single token."""
        self.rest, self.energy = _remainder(self.rest, norm), _less(self.energy, norm)


class Search:
    """Finds every single token over the threshold in the units given to it.

    A segment S of a unit is over its threshold when the norm of its gradient exceeds τ·sqrt(Σ_{t∈S} w_t²), or is not a
    finite number. A single token over it is a culprit, any other segment over it is split. Splits halve the prior
    probability, so that a likely token is soon alone in its segment. Where the prior expects no token, the culprit's
    number is read instead (see `Code`). Once a culprit is found, what is open beside it is measured as one.

    A segment of n tokens under its threshold may still hide a token between τ and τ·sqrt(n). It is dropped if its norm
    is too small for one token over τ, or is what ordinary tokens account for. Any other is loud: it is split as well,
    but after all that are over their thresholds, and only while that finds culprits.

    Where ordinary tokens pull the same way, every segment of theirs is over its threshold, down to pairs of them. The
    way to a culprit looks different: a part that holds it is further over its threshold than the whole, or tokens are
    over τ even if they share the norm evenly. Where no probe shows that any more, the loudest segment is followed down
    to a single token. If that is not over τ either, the unit is left: it is diffuse.

    Args:
        threshold (float): τ.
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms; without it no segment is
            loud.

    Attributes:
        culprits (list[Culprit]): The single tokens over the threshold so far.
        broken (list[Hashable]): Units whose gradient is not a number even without any token.
        given_up (list[Segment]): What was not measured of diffuse units, and of segments over their threshold.
    """

    def __init__(self, threshold: float, ordinary: float | None = None) -> None:
        self.culprits: list[Culprit] = []
        self.broken: list[Hashable] = []
        self.given_up: list[Segment] = []
        self._threshold = threshold
        self._ordinary = ordinary
        self._units: dict[Hashable, _Unit] = {}
        self._open: dict[Segment, _Parent] = {}
        self._first: set[Segment] = set()
        self._codes: list[Code] = []
        self._unexplained: list[_Parent] = []
        self._fruitless = 0
        # Whether it goes for single tokens: after more passes without any culprit than bisection takes.
        self._passes = 0
        self._deep = False

    @property
    def open_segments(self) -> list[Segment]:
        """The parts, still to be measured, of what is over its threshold, best first."""
        return sorted((s for s, parent in self._open.items() if not parent.loud), key=self._urgency)

    @property
    def diffuse(self) -> list[tuple[Segment, float]]:
        """Segments over their threshold, with their norms, of which no part is: the smallest that hold a spike without
        a culprit."""
        return [(parent.segment, parent.norm) for parent in self._unexplained if not parent.explained]

    def add_unit(
        self,
        unit: Hashable,
        norm: float,
        suspicion: Tensor,
        weights: Tensor,
        probe_empty: bool = True,
        measured: bool = True,
    ) -> None:
        """Opens a unit.

        Args:
            unit (Hashable): Its name in `Segment.unit`.
            norm (float): The norm of the unit's whole gradient.
            suspicion (Tensor): s_t of each candidate, shape (n,).
            weights (Tensor): w_t of each candidate, shape (n,), not zero.
            probe_empty (bool): Whether a norm that is not finite is to be measured without any token, too.
            measured (bool): Whether the norm is known, and over the unit's threshold. If not, it is what is expected,
                and the unit is measured as a whole first.
        """
        if len(weights) == 0:
            return
        whole = _Unit(unit, len(self._units), norm, suspicion, weights, probe_empty)
        self._units[unit] = whole
        if not measured:
            self._add(whole.whole, _Parent(Segment(unit, []), norm))
            return
        if not math.isfinite(norm):
            self._probe_empty(unit)
        parent = _Parent(whole.whole, norm, rest=norm)
        if whole.whole.size == 1:
            self._add(whole.whole, parent)
        else:
            self._split(whole.whole, parent)

    def next(self, count: int, passes_left: float = math.inf) -> list[Probe]:
        """What to measure in the next pass; none when the search is over.

        Args:
            count (int): At most so many probes.
            passes_left (float): So many passes can still be made: no number is begun that could not be made use of.
        """
        if not self.open_segments:
            if self._fruitless >= max(math.ceil(_PATIENCE_PROBES / count), _PATIENCE_PASSES):
                return []
            self._fruitless += 1
        most = max((segment.size for segment in self._open), default=0)
        self._deep = not self.culprits and self._passes > math.log(max(most, 2), count + 1) + 1
        self._begin_codes(count, passes_left)
        digits = [digit for code in self._codes for digit in code.unread][:count]
        while 0 < len(self._open) < count - len(digits):
            widest = max((s for s in self._open if s.size > 1), key=self._expected_square, default=None)
            if widest is None:
                break
            self._split(widest, self._take(widest))
        segments = sorted(self._open, key=self._urgency)
        first = [segment for segment in segments if segment in self._first]
        return [*first, *digits, *(segment for segment in segments if segment not in self._first)][:count]

    def record(self, measured: Sequence[tuple[Probe, float]]) -> None:
        """Takes in the norms of what `next` named. A NaN or Inf counts as over the threshold."""
        segments = [(probe, norm) for probe, norm in measured if isinstance(probe, Segment)]
        for name in dict.fromkeys(segment.unit for segment, _ in segments):
            self._units[name].passes += 1
            self._count_pointless(name, [(segment, norm) for segment, norm in segments if segment.unit == name])
        known = len(self.culprits)
        for segment, norm in segments:
            self._record(segment, norm)
        self._passes += 1
        for name in dict.fromkeys(culprit.unit for culprit in self.culprits[known:]):
            self._go_on_beside_culprit(name)
        for probe, norm in measured:
            if isinstance(probe, Digit):
                probe.code.norms[probe.digit] = norm
        for code in [code for code in self._codes if not code.unread]:
            self._codes.remove(code)
            self._units[code.unit].readings += 1
            candidate = code.read()
            if candidate is not None:
                self._suspect(code.unit, candidate)
        self._close_broken_units()
        self._split_without_measuring()
        for unit in self._units.values():
            self._follow(unit)

    def threshold(self, segment: Segment) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        return self._threshold * math.sqrt(segment.square)

    def _record(self, segment: Segment, norm: float) -> None:
        unit, parent = self._units[segment.unit], self._take(segment)
        parent.rest, parent.energy = _remainder(parent.rest, norm), _less(parent.energy, norm)
        parent.prior -= segment.prior
        over = not norm <= self.threshold(segment)
        if not math.isfinite(norm) and segment.size:
            self._probe_empty(segment.unit)
        if segment.size == len(unit.place):
            unit.norm, unit.rest, unit.energy = norm, norm, norm * norm
        if segment.size == 1:
            unit.measured_alone.add(segment.candidates[0])
        if segment.size == 1 or not over:
            unit.settle(norm)
        if over and segment.size == 0:
            self.broken.append(segment.unit)
        elif over and segment.size == 1:
            self.culprits.append(Culprit(segment.unit, segment.candidates[0], norm))
        elif over:
            child = _Parent(segment, norm, rest=norm, above=[parent], single=parent.single and not parent.tried)
            parent.over.append(child)
            if len(parent.over) > 1:  # what could not be read in them together may be read in each
                for part in parent.over:
                    part.single = True
            self._split(segment, child)
        elif segment.size > 1 and self._is_loud(segment, norm):
            unit.has_loud = True
            self._split(segment, _Parent(segment, norm, rest=norm, above=[parent], loud=True))
        if over:
            parent.explain()
            self._fruitless = 0
        elif parent.parts == 0:
            self._close(parent)

    def _probe_empty(self, name: Hashable) -> None:
        unit = self._units[name]
        if unit.probe_empty:
            unit.probe_empty = False
            empty = Segment(name, [])
            self._first.add(empty)  # it may settle the whole unit
            self._add(empty, _Parent(empty, unit.norm))

    def _add(self, segment: Segment, parent: _Parent) -> None:
        self._open[segment] = parent
        parent.parts += 1

    def _take(self, segment: Segment) -> _Parent:
        parent = self._open.pop(segment)
        parent.parts -= 1
        return parent

    def _split(self, segment: Segment, parent: _Parent) -> None:
        for half in self._units[segment.unit].halves(segment):
            self._add(half, parent)

    def _close(self, parent: _Parent) -> None:
        """Notes a segment whose parts are all measured if none of them was over its threshold."""
        if parent.joined:
            for above in parent.above:
                above.parts -= 1
                if above.parts == 0 and not above.explained:
                    self._close(above)
        elif not parent.loud and parent.segment.size and parent not in self._unexplained:
            self._unexplained.append(parent)

    def _is_loud(self, segment: Segment, norm: float) -> bool:
        if self._ordinary is None:
            return False
        unit = self._units[segment.unit]
        square = max(segment.square, segment.prior * unit.whole.square)
        return norm > max(self._threshold * segment.lightest, _LOUD * self._ordinary * math.sqrt(square))

    def _begin_codes(self, count: int, passes_left: float) -> None:
        """Numbers the open tokens of parents that may hold a single culprit, where that takes fewer passes."""
        parts: dict[_Parent, list[Segment]] = {}
        for segment, parent in self._open.items():
            parts.setdefault(parent, []).append(segment)
        spare = count - len(self.open_segments) - sum(len(code.unread) for code in self._codes)
        for parent in sorted(filter(self._is_readable, parts), key=lambda parent: -parent.norm):
            unit = self._units[parent.segment.unit]
            candidates = sorted(candidate for segment in parts[parent] for candidate in segment.candidates)
            if len(candidates) < 2:
                continue
            digits = max(math.ceil(math.log(len(candidates), self._largest_base(parent)) - 1e-9), 1)
            passes = math.ceil(digits / count) + 1
            splits = math.log(len(candidates), max(count, 2))
            if digits > spare and (passes >= splits or (unit.passes == 0 and unit.is_concentrated(count))):
                continue
            if passes > math.ceil(splits) or passes > passes_left:
                continue
            parent.tried = True
            spare -= digits
            # The smallest base that does tells digits apart best.
            base = max(math.ceil(len(candidates) ** (1 / digits) - 1e-9), 2)
            self._codes.append(Code(unit.name, parent.norm, candidates, base, digits))

    def _is_readable(self, parent: _Parent) -> bool:
        if not parent.segment.size or not math.isfinite(parent.norm):
            return False
        if parent.tried or not parent.single or parent.joined or parent.explained or parent.loud:
            return False
        return self._units[parent.segment.unit].readings < _READINGS

    def _largest_base(self, parent: _Parent) -> int:
        if not self._ordinary:
            return _BASE_UNKNOWN
        contrast = parent.norm / (self._ordinary * math.sqrt(parent.segment.square))
        return int(min(max(contrast, 2), _BASE_MOST))

    def _suspect(self, name: Hashable, candidate: int) -> None:
        """Has a candidate measured alone, and all beside it as one, if it has not been measured yet."""
        unit = self._units[name]
        for segment in list(self._open):
            if segment.unit == name and candidate in segment.candidates:
                parent = self._take(segment)
                alone = unit.segment([candidate])
                self._first.add(alone)
                self._add(alone, parent)
                if segment.size > 1:
                    self._add(unit.segment([other for other in segment.candidates if other != candidate]), parent)
                self._join(name, parent.lineage())
                return

    def _go_on_beside_culprit(self, name: Hashable) -> None:
        unit = self._units[name]
        unit.readings, unit.pointless, unit.focus = 0, [], None
        self._codes = [code for code in self._codes if code.unit != name]
        self._join(name)
        for parent in self._open.values():
            if parent.segment.unit == name:
                parent.single = True

    def _join(self, name: Hashable, lineage: Set[_Parent] = frozenset()) -> None:
        """Makes one segment of what is open of a unit, but for parents none of whose parts has been over yet.

        Args:
            lineage (set[_Parent]): Counts as having such a part.
        """
        unit = self._units[name]
        here = [(s, p) for s, p in self._open.items() if s.unit == name and s.size and not p.loud]
        joined = [(s, p) for s, p in here if (p.explained or p in lineage) and s not in self._first]
        if len(joined) < 2:
            return
        # What it holds at least is known if nothing else is open, nor parts of what has been settled as a whole.
        rest = unit.rest if len(joined) == len(here) and not unit.has_loud else 0.0
        parent = _Parent(unit.whole, unit.norm, rest=rest, above=[p for _, p in joined], joined=True, single=False)
        parent.energy, parent.prior = unit.energy, sum(segment.prior for segment, _ in joined)
        for segment, _ in joined:
            del self._open[segment]
        self._add(unit.segment([candidate for segment, _ in joined for candidate in segment.candidates]), parent)

    def _close_broken_units(self) -> None:
        broken = set(self.broken)
        self._open = {segment: parent for segment, parent in self._open.items() if segment.unit not in broken}
        self._codes = [code for code in self._codes if code.unit not in broken]
        self.culprits = [culprit for culprit in self.culprits if culprit.unit not in broken]
        self.given_up = [segment for segment in self.given_up if segment.unit not in broken]

    def _split_without_measuring(self) -> None:
        """Splits what must be over its threshold because its siblings cannot account for the parent's norm."""
        found = True
        while found:
            found = False
            for segment, parent in list(self._open.items()):
                slack = _SLACK * parent.norm if math.isfinite(parent.norm) else 0.0
                if parent.parts == 1 and segment.size > 1 and parent.rest > self.threshold(segment) + slack:
                    self._split(segment, self._take(segment))
                    found = True

    def _count_pointless(self, name: Hashable, measured: Sequence[tuple[Segment, float]]) -> None:
        """Counts the probes of a pass that are over their threshold, but point at no token, unless some other does."""
        count = 0
        for segment, norm in measured:
            parent = self._open[segment]
            if norm <= self.threshold(segment) or segment.size == 0 or parent.segment.size == 0:
                continue
            points = norm * self.threshold(parent.segment) > parent.norm * self.threshold(segment)
            shared = norm > self._threshold * segment.weight
            if points or shared or not math.isfinite(norm):
                self._units[name].pointless = []
                return
            count += 1
        if count:
            self._units[name].pointless.append(count)

    def _follow(self, unit: _Unit) -> None:
        """Where a unit's probes point at no token, follows its loudest segment down; if in vain, leaves the unit."""
        alike = sum(bool(other.pointless) for other in self._units.values())
        enough = max(_POINTLESS_PROBES // max(alike, 1), _POINTLESS_LEAST)
        pointless = len(unit.pointless) >= _POINTLESS_PASSES and sum(unit.pointless) >= enough
        if unit.left or not (pointless or unit.focus):
            return
        if unit.focus is None:
            parents = [p for s, p in self._open.items() if s.unit == unit.name and p.segment.size and not p.loud]
            unit.focus = max(parents, key=self._loudness, default=None)
        while unit.focus is not None and unit.focus.over:
            unit.focus = max(unit.focus.over, key=self._loudness)
        if unit.focus is not None and unit.focus.parts and unit.focus not in self._open.values():
            # Its parts have been joined to others.
            unit.focus = next((p for p in self._open.values() if p.joined and unit.focus in p.above), None)
        if unit.focus is None or unit.focus.parts == 0:
            self._leave(unit)

    def _loudness(self, parent: _Parent) -> float:
        return parent.norm / self.threshold(parent.segment) if math.isfinite(parent.norm) else math.inf

    def _leave(self, unit: _Unit) -> None:
        """Gives up what is open of a unit, but for a sample of its likeliest tokens."""
        unit.left, unit.focus = True, None
        self._codes = [code for code in self._codes if code.unit != unit.name]
        sample = set(unit.whole.candidates[:_SAMPLE]) - unit.measured_alone
        for segment in [segment for segment in self._open if segment.unit == unit.name]:
            parent = self._take(segment)
            for candidate in [candidate for candidate in segment.candidates if candidate in sample]:
                self._add(unit.segment([candidate]), parent)
            rest = [candidate for candidate in segment.candidates if candidate not in sample]
            if rest and not parent.loud:
                self.given_up.append(unit.segment(rest))
            if parent.parts == 0:
                self._close(parent)

    def _expected_square(self, segment: Segment) -> float:
        parent = self._open[segment]
        if segment in self._first or parent is self._units[segment.unit].focus:
            return math.inf
        energy = parent.energy if math.isfinite(parent.energy) else 1e300
        return energy * segment.prior / max(parent.prior, segment.prior)

    def _urgency(self, segment: Segment) -> tuple:
        # Among many culprits of one size, the parts with the most energy are the widest: none would be found for long.
        size = segment.size if self._deep and segment.size else 1
        return (self._open[segment].loud, -self._expected_square(segment) / size, self._units[segment.unit].number)


def _remainder(whole: float, part: float) -> float:
    """A lower bound of ‖x − y‖, from ‖x‖ and ‖y‖."""
    if not math.isfinite(part):
        return 0.0
    return whole - part if math.isfinite(whole) else math.inf


def _less(energy: float, norm: float) -> float:
    """What is left of a squared norm without a part, as if the two were orthogonal."""
    return max(energy - norm * norm, 0.0) if math.isfinite(norm) else energy
