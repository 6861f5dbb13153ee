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
"""Which segment of tokens to measure next: a best-first search over many suspect units at once.

Pure bookkeeping on every rank alike: the same calls give the same answers, so no rank needs to be asked.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

# The prior's share that follows suspicion. The rest is spread evenly over the tokens, so that each of n tokens has at
# least 0.1/n of the prior and is reached by at most log2(10 n) splits, however misleading suspicion is.
_TRUST = 0.9

# A bound must clear the threshold by this much before it replaces a measurement: far over float32's rounding.
_SLACK = 1e-3

# A segment under its threshold is still searched for a token over τ if its norm is this many times what ordinary tokens
# give it. Sets of ordinary tokens, whose norms have heavy tails, seldom reach that.
_LOUD = 2.0

# A code's base is at most this many times the norm of its unit over what ordinary tokens give it, which blur the
# reading; what it is where that is not known; and its limit. A reading may be off by this share of a digit.
_BASE_PER_CONTRAST, _BASE_UNKNOWN, _BASE_MOST = 1.0, 8, 64
_READING_ERROR = 0.45

# After so many probes in a row that point at no token, a unit's spike is a matter of all its tokens. Of a unit that is
# left, so many of the likeliest tokens are measured.
_POINTLESS = 24
_SAMPLE = 3

# So many passes in a row may go into loud segments without finding a culprit.
_PATIENCE = 4


@dataclass(frozen=True)
class Segment:
    """Tokens `low` to `high` (exclusive) of a unit's candidates in order of suspicion.

    An empty one measures what a unit's gradient is without any token: anything but zero means that it is broken.
    """

    unit: Hashable
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class Culprit:
    """A single token over the threshold; `candidate` is its index among the candidates given to `add_unit`."""

    unit: Hashable
    candidate: int
    norm: float


@dataclass(frozen=True)
class Code:
    """Numbers for a unit's open tokens, written in digits, of which a probe reads one.

    In the probe of a digit d, each token's share of the gradient is multiplied by sqrt(d / (base - 1)). If one token
    outweighs all others, the squared norm over the unit's is d / (base - 1) of that token. So a culprit that the prior
    does not expect is named by about log(n) / log(base) probes, which need not wait for each other as in bisection.

    Args:
        unit (Hashable): The unit.
        norm (float): The norm of its gradient.
        candidates (list[int]): Its open tokens, as indices into the candidates given to `add_unit`.
        base (int): Of the digits.
        digits (int): How many each number has.
    """

    unit: Hashable
    norm: float
    candidates: list[int]
    base: int
    digits: int

    def factors(self, digit: int) -> list[float]:
        """What the probe of a digit multiplies each of the tokens with."""
        values = [number // self.base**digit % self.base for number in range(len(self.candidates))]
        return [math.sqrt(value / (self.base - 1)) for value in values]

    def read(self, norms: list[float]) -> int | None:
        """The candidate that the norms of all digits' probes name; None if they do not fit a single token."""
        number = 0
        for digit, norm in enumerate(norms):
            reading = (norm / self.norm) ** 2 * (self.base - 1)
            value = round(reading) if math.isfinite(reading) else -1
            if not 0 <= value < self.base or abs(reading - value) > _READING_ERROR:
                return None
            number += value * self.base**digit
        return self.candidates[number] if number < len(self.candidates) else None


@dataclass
class _Parent:
    """A segment over its threshold, and what its unmeasured parts still hold together.

    `rest` is a lower bound of the norm of their sum: by the triangle inequality the segment's own norm less the norms
    of the parts measured so far. `parts` counts the unmeasured ones; `explained` says whether a part of it, or of its
    parts, was over its own threshold; `loud` that the segment itself is not.
    """

    segment: Segment
    norm: float
    rest: float
    above: "_Parent | None" = None
    loud: bool = False
    parts: int = 1
    explained: bool = False

    def explain(self) -> None:
        self.explained = True
        if self.above is not None and not self.above.explained:
            self.above.explain()


class _Unit:
    """The candidates of one unit, most suspicious first, with running sums of prior and squared weight."""

    def __init__(self, number: int, norm: float, suspicion: Tensor, weights: Tensor, probe_empty: bool) -> None:
        weights = weights.double().abs()
        # A token's expected share of the squared norm, per squared weight: what is compared with the threshold.
        energy = (suspicion.double() / weights).square()
        finite = energy.isfinite()
        ceiling = 10 * energy[finite].max() if finite.any() and energy[finite].max() > 0 else torch.ones(())
        energy = torch.where(finite, energy, ceiling)
        n = len(energy)
        total = energy.sum()
        prior = _TRUST * energy / total + (1 - _TRUST) / n if total > 0 else torch.full_like(energy, 1 / n)
        order = torch.argsort(prior, descending=True, stable=True)
        self.number = number
        self.norm = norm
        self.probe_empty = probe_empty
        self.passes = 0
        self.coded = False
        self.pointless = 0
        self.left = False
        self.alone: set[int] = set()
        self.order: list[int] = order.tolist()
        self.total: list[float] = [0.0, *weights[order].cumsum(0).tolist()]
        self.prior: list[float] = [0.0, *prior[order].cumsum(0).tolist()]
        self.square: list[float] = [0.0, *weights[order].square().cumsum(0).tolist()]
        self.weights: list[float] = weights[order].tolist()

    def mass(self, segment: Segment) -> float:
        return self.prior[segment.high] - self.prior[segment.low]

    def halve(self, low: int, high: int) -> int:
        """Where to cut so that both sides hold about half of the prior."""
        half = (self.prior[low] + self.prior[high]) / 2
        cut = bisect_left(self.prior, half, low + 1, high)
        if cut > low + 1 and half - self.prior[cut - 1] < self.prior[min(cut, high)] - half:
            cut -= 1
        return min(max(cut, low + 1), high - 1)


class Search:
    """Finds every single token over the threshold in the units given to it.

    A segment S of a unit is over its threshold when the norm of its gradient exceeds τ·sqrt(Σ_{t∈S} w_t²), or is not a
    finite number. A single token over it is a culprit, any other segment over it is split. Splits halve the prior
    probability, so that a likely token is soon alone in its segment.

    A segment of n tokens under its threshold may still hide a token between τ and τ·sqrt(n). It is dropped if its norm
    is too small for one token over τ, or is what ordinary tokens account for. Any other is loud: it is split as well,
    but after all that are over their thresholds, and only while that finds culprits.

    Where ordinary tokens pull the same way, every segment of theirs is over its threshold, down to pairs of them. The
    way to a culprit looks different: a part that holds it is further over its threshold than the whole, or tokens are
    over τ even if they share the norm evenly. Where no probe shows that any more, the unit is left: it is diffuse.

    Args:
        threshold (float): τ.
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms; without it no segment is
            loud.

    Attributes:
        culprits (list[Culprit]): The single tokens over the threshold so far.
        diffuse (list[tuple[Segment, float]]): Segments over their threshold, with their norms, of which no part is: the
            smallest that hold a spike without a culprit.
        broken (list[Hashable]): Units whose gradient is not a number even without any token.
    """

    def __init__(self, threshold: float, ordinary: float | None = None) -> None:
        self.culprits: list[Culprit] = []
        self.broken: list[Hashable] = []
        self._threshold = threshold
        self._ordinary = ordinary
        self._units: dict[Hashable, _Unit] = {}
        self._open: dict[Segment, _Parent] = {}
        self._first: set[Segment] = set()
        self._unexplained: list[_Parent] = []
        self._patience = _PATIENCE

    @property
    def open_segments(self) -> list[Segment]:
        """The parts, still to be measured, of what is over its threshold, best first."""
        return sorted((s for s, parent in self._open.items() if not parent.loud), key=self._urgency)

    @property
    def diffuse(self) -> list[tuple[Segment, float]]:
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
        self._units[unit] = _Unit(len(self._units), norm, suspicion, weights, probe_empty)
        whole = Segment(unit, 0, len(weights))
        if not measured:
            self._open[whole] = _Parent(Segment(unit, 0, 0), norm, rest=0.0)
            return
        if not math.isfinite(norm):
            self._probe_empty(unit)
        parent = _Parent(whole, norm, rest=norm)
        if whole.size == 1:
            self._open[whole] = parent
        else:
            self._split(whole, parent)

    def next(self, count: int) -> list[Segment]:
        """The up to `count` segments to measure in the next pass, all different; none when the search is over."""
        if not self.open_segments:
            if self._patience == 0:
                return []
            self._patience -= 1
        while 0 < len(self._open) < count:
            widest = max((s for s in self._open if s.size > 1), key=self._expected_square, default=None)
            if widest is None:
                break
            self._split(widest, self._open.pop(widest))
        return sorted(self._open, key=self._urgency)[:count]

    def code(self, width: int) -> Code | None:
        """How to find the culprit of a unit by its number, where that takes fewer passes than going on as before.

        That is so for units in which a pass has found nothing; each is tried once.

        Args:
            width (int): How many probes a pass can measure.
        """
        found = {culprit.unit for culprit in self.culprits}
        for name, unit in self._units.items():
            if unit.coded or unit.passes == 0 or name in found or not math.isfinite(unit.norm):
                continue
            open_here = [segment for segment in self.open_segments if segment.unit == name]
            candidates = sorted(candidate for segment in open_here for candidate in self.candidates(segment))
            if len(candidates) < 2:
                continue
            base = self._largest_base(unit)
            digits = max(math.ceil(math.log(len(candidates), base) - 1e-9), 1)
            if math.ceil(digits / width) + 1 >= math.log(len(candidates), max(width, 2)):
                continue
            unit.coded = True
            # The smallest base that does tells digits apart best.
            base = max(math.ceil(len(candidates) ** (1 / digits) - 1e-9), 2)
            return Code(name, unit.norm, candidates, base, digits)
        return None

    def suspect(self, unit: Hashable, candidate: int) -> None:
        """Has a candidate measured alone and first, if it has not been measured yet."""
        place = self._units[unit].order.index(candidate)
        for segment, parent in list(self._open.items()):
            if segment.unit == unit and segment.low <= place < segment.high:
                del self._open[segment]
                alone = Segment(unit, place, place + 1)
                parts = [Segment(unit, segment.low, place), alone, Segment(unit, place + 1, segment.high)]
                parent.parts -= 1
                for part in parts:
                    if part.size:
                        parent.parts += 1
                        self._open[part] = parent
                self._first.add(alone)

    def record(self, measured: list[tuple[Segment, float]]) -> None:
        """Takes in the norms of segments that `next` named. A NaN or Inf counts as over the threshold."""
        for unit in {segment.unit for segment, _ in measured}:
            self._units[unit].passes += 1
        for segment, norm in measured:
            parent = self._open.pop(segment)
            parent.parts -= 1
            parent.rest = _remainder(parent.rest, norm)
            over = not norm <= self.threshold(segment)
            self._count_pointless(segment, norm, over, parent)
            if not math.isfinite(norm) and segment.size:
                self._probe_empty(segment.unit)
            if segment.size == len(self._units[segment.unit].order):
                self._units[segment.unit].norm = norm
            if segment.size == 1:
                self._units[segment.unit].alone.add(segment.low)
            if over and segment.size == 0:
                self.broken.append(segment.unit)
            elif over and segment.size == 1:
                self.culprits.append(Culprit(segment.unit, self.candidates(segment)[0], norm))
            elif over:
                self._split(segment, _Parent(segment, norm, rest=norm, above=parent))
            elif segment.size > 1 and self._is_loud(segment, norm):
                self._split(segment, _Parent(segment, norm, rest=norm, above=parent, loud=True))
            if over:
                parent.explain()
                self._patience = _PATIENCE
            elif parent.parts == 0 and not parent.loud and parent.segment.size > 0:
                self._unexplained.append(parent)
        self._close_broken_units()
        self._split_without_measuring()
        for name in [name for name, unit in self._units.items() if unit.pointless >= _POINTLESS and not unit.left]:
            self._leave(name)

    def threshold(self, segment: Segment) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        square = self._units[segment.unit].square
        return self._threshold * math.sqrt(max(square[segment.high] - square[segment.low], 0.0))

    def candidates(self, segment: Segment) -> list[int]:
        """The segment's tokens, as indices into the candidates given to `add_unit`."""
        return self._units[segment.unit].order[segment.low : segment.high]

    def _probe_empty(self, unit: Hashable) -> None:
        if self._units[unit].probe_empty:
            self._units[unit].probe_empty = False
            empty = Segment(unit, 0, 0)
            self._open[empty] = _Parent(empty, self._units[unit].norm, rest=0.0)

    def _largest_base(self, unit: _Unit) -> int:
        if not self._ordinary:
            return _BASE_UNKNOWN
        contrast = unit.norm / (self._ordinary * math.sqrt(unit.square[-1]))
        return int(min(max(_BASE_PER_CONTRAST * contrast, 2), _BASE_MOST))

    def _is_loud(self, segment: Segment, norm: float) -> bool:
        if self._ordinary is None:
            return False
        unit = self._units[segment.unit]
        ordinary = self._ordinary * self.threshold(segment) / self._threshold
        return norm > max(self._threshold * min(unit.weights[segment.low : segment.high]), _LOUD * ordinary)

    def _split(self, segment: Segment, parent: _Parent) -> None:
        cut = self._units[segment.unit].halve(segment.low, segment.high)
        parent.parts += 1
        self._open[Segment(segment.unit, segment.low, cut)] = parent
        self._open[Segment(segment.unit, cut, segment.high)] = parent

    def _close_broken_units(self) -> None:
        broken = set(self.broken)
        self._open = {segment: parent for segment, parent in self._open.items() if segment.unit not in broken}
        self.culprits = [culprit for culprit in self.culprits if culprit.unit not in broken]

    def _split_without_measuring(self) -> None:
        """Splits what must be over its threshold because its siblings cannot account for the parent's norm."""
        found = True
        while found:
            found = False
            for segment, parent in list(self._open.items()):
                if parent.parts == 1 and segment.size > 1 and parent.rest > (1 + _SLACK) * self.threshold(segment):
                    del self._open[segment]
                    self._split(segment, parent)
                    found = True

    def _count_pointless(self, segment: Segment, norm: float, over: bool, parent: _Parent) -> None:
        """Counts the probes in a row that are over their threshold, but point at no token."""
        unit = self._units[segment.unit]
        if not over or segment.size == 0 or parent.segment.size == 0 or unit.left:
            return
        points = norm * self.threshold(parent.segment) > parent.norm * self.threshold(segment)
        shared = norm > self._threshold * (unit.total[segment.high] - unit.total[segment.low])
        unit.pointless = 0 if points or shared or not math.isfinite(norm) else unit.pointless + 1

    def _leave(self, name: Hashable) -> None:
        """Closes what is open of a unit, but for a sample of its likeliest tokens."""
        unit = self._units[name]
        unit.left = True
        for segment in [segment for segment in self._open if segment.unit == name]:
            parent = self._open.pop(segment)
            if parent.segment.size and not parent.loud and all(parent is not other for other in self._unexplained):
                self._unexplained.append(parent)
        for i in range(min(_SAMPLE, len(unit.order))):
            if i not in unit.alone:
                self._open[Segment(name, i, i + 1)] = _Parent(Segment(name, 0, 0), unit.norm, rest=0.0)

    def _expected_square(self, segment: Segment) -> float:
        unit, parent = self._units[segment.unit], self._open[segment]
        if segment.size == 0 or segment in self._first:  # first of all, since it may settle the whole unit
            return math.inf
        norm = parent.norm if math.isfinite(parent.norm) else 1e150
        share = unit.mass(segment) / unit.mass(parent.segment) if parent.segment.size else unit.mass(segment)
        return norm**2 * share

    def _urgency(self, segment: Segment) -> tuple:
        unit = self._units[segment.unit]
        return (self._open[segment].loud, -self._expected_square(segment), unit.number, segment.low)


def _remainder(whole: float, part: float) -> float:
    """A lower bound of ‖x − y‖, from ‖x‖ and ‖y‖."""
    if not math.isfinite(part):
        return 0.0
    return whole - part if math.isfinite(whole) else math.inf
