# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds a few tokens, each over τ, without which their group is under its threshold."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bisection import SAMPLE, Bisection, patience
from .candidates import Candidates, Found, TokenSet

# "A few" tokens are at most this fraction of a group's tokens; this limit is at least 4 and at most 64 tokens.
_FEW, _FEW_LEAST, _FEW_MOST = 1 / 8, 4, 64

# If a few tokens were expected to be enough, up to this multiple of "a few" is tried, because suspicion does not always
# rank the largest tokens first.
_OVERRUN = 1.5

# Suspicion is taken to be right about a spike if the likeliest few tokens carry at least _LEAST_CARRIED times the
# energy expected of them, and at most _MOST_CARRIED times what they would carry if all gradients were parallel. In
# natural spikes they carry 0.75 to 1.3 times the expected energy; in coherent spikes, up to 1.9 times.
_LEAST_CARRIED, _MOST_CARRIED = 0.6, 1.5


# The smallest factor that an estimate is scaled by, so that a later measurement can raise it again; and the largest
# energy, so that sums of them are finite.
_LEAST_SCALE, _LARGEST = 1e-6, 1e250


class Estimate(NamedTuple):
    """How much of a group's excess over its threshold goes if a token is left out."""

    base: frozenset[int]  # the tokens that are left out already
    excess: float  # what the group without them has over the square of its threshold
    # The tokens that may be culprits: those not measured alone, or measured over τ. Those of `base` come first, then
    # the likeliest.
    order: list[int]
    gains: Tensor  # how much of the excess goes without each token, float64 of shape (n,)
    in_base: int  # how many of `order` are in `base`


def estimate(tokens: Candidates, rests: Mapping[frozenset[int], float]) -> Estimate:
    """Estimates every token's energy (squared norm) from its suspicion and from what was measured.

    It is in proportion to suspicion, and scaled to match each measurement of a rest (the norm of the group without a
    set of tokens, by that set), from oldest to newest; that of a token measured alone is known. The smallest set with a
    finite norm is the `base`.
    """
    size, over = len(tokens.square_of), set(tokens.over)
    alone = {t: norm * norm if math.isfinite(norm) else 0.0 for t, norm in tokens.alone.items()}
    finite = {removed: norm * norm for removed, norm in rests.items() if math.isfinite(norm)}
    base = min(finite, key=len, default=frozenset(range(size)))
    energy = finite.get(base, 0.0) * tokens.suspected
    energy[[*alone]] = torch.tensor([*alone.values()], dtype=energy.dtype)
    for removed, square in finite.items():
        free = torch.ones(size, dtype=torch.bool)
        free[[*removed, *alone]] = False
        expected = math.fsum(energy[free].tolist())
        if expected > 0:
            left = square - math.fsum(energy for t, energy in alone.items() if t not in removed)
            scale = min(max(left / expected, _LEAST_SCALE), _LARGEST)
            energy[free] = (energy[free] * scale).clamp(max=_LARGEST)
    gains = energy - tokens.tau * tokens.tau * tokens.square_of
    may_be, is_in_base = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    may_be[[t for t in alone if t not in over]] = False
    is_in_base[[*base]] = True
    likeliest = gains.sort(descending=True, stable=True).indices
    of_base, others = (likeliest[(may_be & where)[likeliest]].tolist() for where in (is_in_base, ~is_in_base))
    excess = math.fsum(gains[~is_in_base].tolist())
    return Estimate(base, excess, of_base + others, gains, len(of_base))


class FewTokens:
    """Finds a few tokens that explain a group's spike: the rest of the group is measured under its threshold.

    It estimates every token's energy (see `estimate`), and so how many tokens are expected to be enough. What was
    measured decides which of these it does (`Search` asks once before each pass):

    - few: a few tokens are expected to be enough; the rest without them is measured, and each of them alone
    - beyond: they are not; rests without the likeliest test whether suspicion is right, and a bisection searches for
      the tokens that it does not point at
    - sample: the spike is diffuse; the likeliest tokens are measured alone, and the rest without those over τ
    - ended: the spike is explained, or the sample is measured

    `norm` is that of the `whole` group, and over its threshold; `ordinary` is the root mean square of ordinary tokens'
    gradient norms.
    """

    def __init__(self, whole: TokenSet, norm: float, ordinary: float | None) -> None:
        self.tokens = tokens = whole.of
        self._ordinary = ordinary
        self._size = size = len(tokens.square_of)
        # How many tokens are "a few", and how many are tried once a few seemed to be enough.
        self._few = min(max(math.ceil(_FEW * size), _FEW_LEAST), _FEW_MOST, size)
        self._most = min(math.ceil(_OVERRUN * self._few), size)
        self._rests: dict[frozenset[int], float] = {}  # the norm of the group without a set of tokens, by that set
        self._enough: list[frozenset[int]] = []  # the sets for which it was under its threshold
        self._add_rest(frozenset(), norm)
        if self._most == size:
            self._add_rest(frozenset(range(size)), 0.0)
        self._sample: list[int] | None = None  # the tokens to measure alone once the spike is found to be diffuse
        self._few_expected = False  # whether a few tokens were ever expected to be enough
        # How many tokens that were expected to explain the spike were not over τ, since the last one that was.
        self._misled = 0
        self._vain = 0  # how many passes in a row have found no token over τ and no rest under its threshold
        self._likeliest = estimate(tokens, self._rests).order[: max(self._few, SAMPLE)]
        self._bisection: Bisection | None = None
        self._passes_left = math.inf  # how many more passes it may take; infinite unless curtailed

    def _add_rest(self, removed: frozenset[int], norm: float) -> None:
        self._rests[removed] = norm
        if not self.tokens.without(removed).is_over(norm):
            self._enough.append(removed)

    @property
    def _explaining(self) -> frozenset[int] | None:
        """The smallest set of tokens over τ that is enough."""
        over = frozenset(self.tokens.over)
        return min((removed for removed in self._enough if removed <= over), key=len, default=None)

    @property
    def _smallest_enough(self) -> frozenset[int] | None:
        """The smallest set that is enough to explain the spike and has a token that was not measured alone."""
        return min((r for r in self._enough if not r <= self.tokens.alone.keys()), key=len, default=None)

    @property
    def found(self) -> Found:
        """The result so far. Until a set of tokens explains the spike, all over τ are culprits."""
        explaining, tokens = self._explaining, self.tokens
        over = []
        if explaining is None:
            largest = max((r for r in self._rests if r not in self._enough), key=len)
            over = [(tokens.without(largest), self._rests[largest])]
        culprits = [t for t in tokens.over if explaining is None or t in explaining]
        removed = frozenset(culprits)
        is_given_up = self.is_diffuse and len(tokens.alone) < self._size
        return Found(
            culprits,
            (tokens.without(removed), self._rests[removed]) if removed in self._rests else None,
            diffuse=over if self.is_diffuse else [],
            given_up=[tokens.without(tokens.alone)] if is_given_up else [],
            open_sets=[] if self.ended else [token_set for token_set, _ in over],
        )

    @property
    def ended(self) -> bool:
        return self._explaining is not None or self.is_diffuse

    @property
    def is_diffuse(self) -> bool:
        if self._sample is None or self._explaining is not None:
            return False
        return self.tokens.alone.keys() >= set(self._sample) and frozenset(self.tokens.over) in self._rests

    @property
    def unnamed(self) -> int:
        """How many tokens are to be measured alone of a set that is enough to explain the spike; 0 without one."""
        enough = self._smallest_enough if self._sample is None else None
        return len(enough.difference(self.tokens.alone)) if enough else 0

    def passes_ahead(self, count: int) -> float:
        """How many passes of `count` probes the known next steps may take; 0 while only rests are measured."""
        searching = self._bisection is not None and self._sample is None
        return self.unnamed / count or (patience(self._size, count) if searching else 0.0)

    def curtail(self, passes: int) -> None:
        """Limits the passes from here on, because the spike of another group is diffuse. Later calls do nothing."""
        if math.isinf(self._passes_left):
            self._passes_left = passes

    def next_probes(self, count: int, passes_left: float) -> list[TokenSet]:
        """At most `count` probes to measure next, best first; none when the search is over."""
        if not self.ended and self._sample is None:
            probes = self._search(count, passes_left)
            if probes is not None:
                return probes
            sampled = math.isinf(self._passes_left) or self._smallest_enough is not None
            self._sample = self._likeliest[:SAMPLE] if sampled else []
        if self.ended or self._sample is None:
            return []
        sample = [self.tokens.token_set([t]) for t in self._sample if t not in self.tokens.alone]
        return sample[:count] or [self.tokens.without(self.tokens.over)]

    def add_measurements(self, measured: Sequence[tuple[TokenSet, float]], count: int) -> None:
        """Records the norms of a pass of up to `count` probes; NaN and Inf count as over the threshold."""
        self._passes_left -= 1
        promising, enough = frozenset().union(*self._enough), len(self._enough)
        if self._bisection is not None:
            self._bisection.add_measurements(measured, count)
        most_removed = max(self._most, len(self.tokens.over))
        for probe, norm in measured:
            removed = self._size - len(probe.places)
            if probe.factors is None and removed <= most_removed:
                # Not a difference of sets, which would keep the memory of all tokens.
                self._add_rest(frozenset(self.tokens.without(probe.places.tolist()).candidates), norm)
        singles = {probe.candidates[0] for probe, _ in measured if probe.is_single}
        found = not singles.isdisjoint(self.tokens.over)
        self._misled = 0 if found else self._misled + len(singles & promising)
        self._vain = 0 if found or len(self._enough) > enough else self._vain + 1
        if self.ended:
            self._bisection = None  # thousands of groups may have ended

    def _search(self, count: int, passes_left: float) -> list[TokenSet] | None:
        """The next probes while the spike may be explained; None if it is diffuse."""
        is_late = self.unnamed > self._passes_left * count or self._passes_left <= 0
        if is_late or self._vain > patience(self._size, count):
            return None
        found = estimate(self.tokens, self._rests)
        needed, enough = self._expect(found), self._smallest_enough
        most = min(self._most if self._few_expected else self._few, self._passes_left * count)
        if self._misled < SAMPLE and (enough or needed <= most):
            self._few_expected = True
            return self._probe_few(count, frozenset(found.order[:needed]), found.order, enough)
        return self._probe_beyond(count, passes_left) or None

    def _expect(self, found: Estimate) -> int:
        """How many of the likeliest tokens are expected to be enough.

        The number is larger than `_most` if even that many are not enough, or if no finite norm is known.
        """
        few, excess, order = found.in_base, found.excess, found.order
        gains = found.gains[order[: self._most + 1]].tolist()
        while few <= self._most and (excess > 0 or frozenset(order[:few]) in self._rests):
            if few == len(order):
                return self._most + 1
            excess -= gains[few]
            few += 1
        return few if found.base in self._rests else self._most + 1

    def _probe_few(
        self, count: int, guess: frozenset[int], order: list[int], enough: frozenset[int] | None
    ) -> list[TokenSet]:
        """The rest without these few, and tokens alone: of those that are `enough`, perhaps not all are needed."""
        tokens, over = self.tokens, set(self.tokens.over)
        if enough:
            alone = [t for t in order if t in enough and t not in tokens.alone]
        else:
            alone = [t for t in order if t not in over]
        wanted = guess not in self._rests and (not enough or guess <= over)
        rest = [tokens.without(guess)] if wanted else []
        return [*rest, *(tokens.token_set([t]) for t in alone[:count])][:count]

    def _probe_beyond(self, count: int, passes_left: float) -> list[TokenSet]:
        """None of them if the spike is where suspicion expects it, and too many tokens are behind it."""
        tokens = self.tokens
        likeliest = list(dict.fromkeys([*tokens.over, *self._likeliest]))[: self._few]
        few = set(likeliest)
        # Large tokens that suspicion already points at would only add noise to the search for the others.
        over = (r for r in self._rests if r not in self._enough and r < few)
        base = max((r for r in over if len(r) <= self._few / 2), key=len)
        checks: list[TokenSet] = []
        if math.isfinite(self._rests[base]) and self._misled < SAMPLE:
            sizes = [len(likeliest), len(likeliest) // 2] if math.isinf(self._passes_left) else [len(likeliest)]
            parts = [frozenset(likeliest[:size]) for size in sizes]
            parts = [part for part in parts if base < part]
            if all(self._is_as_expected(base, part) for part in parts if part in self._rests):
                checks = [tokens.without(part) for part in parts if part not in self._rests]
                if not checks and (self._bisection is None or not self._bisection.has_named):
                    return []
        first, later = checks[: max(count // 2, 1)], checks[max(count // 2, 1) :]
        if len(first) >= count:
            return first
        if self._bisection is None:
            self._bisection = Bisection(tokens.without(base), self._rests[base], self._ordinary)
        found = self._bisection.next_probes(count - len(first), passes_left)
        named = [probe for probe in found if probe in self._bisection.named]
        # A named token may explain the spike together with those already over τ.
        guess = frozenset(tokens.over).union(*(probe.candidates for probe in named))
        rests = [tokens.without(guess)] if named and guess not in self._rests else []
        twice = [probe.candidates for probe in (*named, *rests, *first, *later)]
        others = [probe for probe in found if probe.candidates not in twice]
        return [*named, *rests, *first, *others, *later][:count]

    def _is_as_expected(self, base: frozenset[int], few: frozenset[int]) -> bool:
        """Whether the likeliest few tokens carry about as much of the energy as suspicion predicts."""
        expected = self.tokens.prior_of
        carried = 1 - (self._rests[few] / self._rests[base]) ** 2
        part = math.fsum(expected[[*few - base]].tolist()) / self.tokens.without(base).expected
        return _LEAST_CARRIED * part <= carried <= _MOST_CARRIED * (1 - (1 - part) ** 2)
