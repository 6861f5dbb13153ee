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


@dataclass
class _Parent:
    """A segment over its threshold, and what its unmeasured parts still hold together.

    `rest` is a lower bound of the norm of their sum: by the triangle inequality the segment's own norm less the norms
    of the parts measured so far. `parts` counts the unmeasured ones; `explained` says whether a part was over its own
    threshold.
    """

    segment: Segment
    norm: float
    rest: float
    parts: int = 1
    explained: bool = False


class _Unit:
    """The candidates of one unit, most suspicious first, with running sums of prior and squared weight."""

    def __init__(self, number: int, norm: float, suspicion: Tensor, weights: Tensor) -> None:
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
        self.order: list[int] = order.tolist()
        self.prior: list[float] = [0.0, *prior[order].cumsum(0).tolist()]
        self.square: list[float] = [0.0, *weights[order].square().cumsum(0).tolist()]

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
    finite number. A segment under it is dropped, a single token over it is a culprit, any other is split. Splits halve
    the prior probability, so that a likely token is soon alone in its segment.

    Args:
        threshold (float): τ.

    Attributes:
        culprits (list[Culprit]): The single tokens over the threshold so far.
        diffuse (list[tuple[Segment, float]]): Segments over their threshold, with their norms, of which no part is: the
            smallest that hold a spike without a culprit.
        broken (list[Hashable]): Units whose gradient is not a number even without any token.
    """

    def __init__(self, threshold: float) -> None:
        self.culprits: list[Culprit] = []
        self.diffuse: list[tuple[Segment, float]] = []
        self.broken: list[Hashable] = []
        self._threshold = threshold
        self._units: dict[Hashable, _Unit] = {}
        self._open: dict[Segment, _Parent] = {}

    @property
    def open_segments(self) -> list[Segment]:
        """The segments still to be measured, best first."""
        return sorted(self._open, key=self._urgency)

    def add_unit(self, unit: Hashable, norm: float, suspicion: Tensor, weights: Tensor) -> None:
        """Opens a unit that is known to be over its threshold.

        Args:
            unit (Hashable): Its name in `Segment.unit`.
            norm (float): The norm of the unit's whole gradient.
            suspicion (Tensor): s_t of each candidate, shape (n,).
            weights (Tensor): w_t of each candidate, shape (n,), not zero.
        """
        if len(weights) == 0:
            return
        self._units[unit] = _Unit(len(self._units), norm, suspicion, weights)
        whole = Segment(unit, 0, len(weights))
        parent = _Parent(whole, norm, rest=norm)
        if not math.isfinite(norm):
            empty = Segment(unit, 0, 0)
            self._open[empty] = _Parent(empty, norm, rest=0.0)
        if whole.size == 1:
            self._open[whole] = parent
        else:
            self._split(whole, parent)

    def next(self, count: int) -> list[Segment]:
        """The up to `count` segments to measure in the next pass, all different."""
        while 0 < len(self._open) < count:
            widest = max((s for s in self._open if s.size > 1), key=self._expected_square, default=None)
            if widest is None:
                break
            self._split(widest, self._open.pop(widest))
        return self.open_segments[:count]

    def record(self, measured: list[tuple[Segment, float]]) -> None:
        """Takes in the norms of segments that `next` named. A NaN or Inf counts as over the threshold."""
        for segment, norm in measured:
            parent = self._open.pop(segment)
            parent.parts -= 1
            parent.rest = _remainder(parent.rest, norm)
            over = not norm <= self.threshold(segment)
            if over and segment.size == 0:
                self.broken.append(segment.unit)
            elif over and segment.size == 1:
                self.culprits.append(Culprit(segment.unit, self.candidates(segment)[0], norm))
            elif over:
                self._split(segment, _Parent(segment, norm, rest=norm))
            parent.explained |= over
            if parent.parts == 0 and not parent.explained and parent.segment.size > 0:
                self.diffuse.append((parent.segment, parent.norm))
        self._close_broken_units()
        self._split_without_measuring()

    def threshold(self, segment: Segment) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        square = self._units[segment.unit].square
        return self._threshold * math.sqrt(max(square[segment.high] - square[segment.low], 0.0))

    def candidates(self, segment: Segment) -> list[int]:
        """The segment's tokens, as indices into the candidates given to `add_unit`."""
        return self._units[segment.unit].order[segment.low : segment.high]

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

    def _expected_square(self, segment: Segment) -> float:
        unit = self._units[segment.unit]
        if segment.size == 0:  # first of all, since it may settle the whole unit
            return math.inf
        norm = unit.norm if math.isfinite(unit.norm) else 1e150
        return norm**2 * unit.mass(segment)

    def _urgency(self, segment: Segment) -> tuple:
        return (-self._expected_square(segment), self._units[segment.unit].number, segment.low)


def _remainder(whole: float, part: float) -> float:
    """A lower bound of ‖x − y‖, from ‖x‖ and ‖y‖."""
    if not math.isfinite(part):
        return 0.0
    return whole - part if math.isfinite(whole) else math.inf
