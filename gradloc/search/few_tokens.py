# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds a few tokens, each over τ, without which their group is under its threshold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .bisection import SAMPLE, Bisection, patience
from .candidates import Candidates
from .codes import Probe, TokenSet, is_single
from .estimate import Estimate

# "A few" tokens are at most this fraction of a group's tokens; this limit is at least 4 and at most 64 tokens.
_FEW, _FEW_LEAST, _FEW_MOST = 1 / 8, 4, 64

# If a few tokens were expected to be enough, up to this multiple of "a few" is tried, because suspicion does not always
# rank the largest tokens first.
_OVERRUN = 1.5

# Suspicion is taken to be right about a spike if the likeliest few tokens carry at least _LEAST_CARRIED times the
# energy expected of them, and at most _MOST_CARRIED times what they would carry if all gradients were parallel. In
# natural spikes they carry 0.75 to 1.3 times the expected energy; in coherent spikes, up to 1.9 times.
_LEAST_CARRIED, _MOST_CARRIED = 0.6, 1.5


class _Known:
    """What was measured of a group, but for its tokens alone, which its candidates have.

    Attributes:
        few (int), most (int): How many tokens are "a few", and how many are tried once a few seemed to be enough.
    """

    def __init__(self, tokens: Candidates, norm: float) -> None:
        self.tokens = tokens
        self.size = size = len(tokens.square_of)
        self.few = min(max(math.ceil(_FEW * size), _FEW_LEAST), _FEW_MOST, size)
        self.most = min(math.ceil(_OVERRUN * self.few), size)
        self.rests: dict[frozenset[int], float] = {}  # the norm of the group without a set of tokens, by that set
        self.enough: list[frozenset[int]] = []  # the sets for which it was under its threshold
        self.add_rest(frozenset(), norm)
        if self.most == size:
            self.add_rest(frozenset(range(size)), 0.0)

    def add_rest(self, removed: frozenset[int], norm: float) -> None:
        self.rests[removed] = norm
        if not self.tokens.is_over_without(removed, norm):
            self.enough.append(removed)

    @property
    def explaining(self) -> frozenset[int] | None:
        """The smallest set of tokens over τ that is enough."""
        over = frozenset(self.tokens.over)
        return min((removed for removed in self.enough if removed <= over), key=len, default=None)

    @property
    def smallest_enough(self) -> frozenset[int] | None:
        """The smallest set that is enough to explain the spike and has a token that was not measured alone."""
        return min((r for r in self.enough if not r <= self.tokens.alone.keys()), key=len, default=None)

    @property
    def smallest_rest_over(self) -> tuple[TokenSet, float]:
        """The smallest rest that was measured over its threshold."""
        removed = max((r for r in self.rests if r not in self.enough), key=len)
        return self.tokens.without(removed), self.rests[removed]

    def estimate(self) -> Estimate:
        """What is known of every token, starting at the smallest set of tokens left out of a rest of a finite norm."""
        finite = [removed for removed, norm in self.rests.items() if math.isfinite(norm)]
        base = min(finite, key=len) if finite else frozenset(range(self.size))
        return Estimate(self.tokens, self.rests, base)

    def expect(self, estimate: Estimate, order: list[int]) -> int:
        """How many of the likeliest tokens are expected to be enough.

        The number is larger than `most` if even that many are not enough, or if no finite norm is known.
        """
        few, excess = estimate.count_in_base, estimate.excess
        gains = estimate.gains(order[: self.most + 1])
        while few <= self.most and (excess > 0 or frozenset(order[:few]) in self.rests):
            if few == estimate.count:
                return self.most + 1
            excess -= gains[few]
            few += 1
        return few if estimate.base in self.rests else self.most + 1

    def is_as_expected(self, base: frozenset[int], few: frozenset[int]) -> bool:
        """Whether the likeliest few tokens carry about as much of the energy as suspicion predicts."""
        expected = self.tokens.prior_of
        carried = 1 - (self.rests[few] / self.rests[base]) ** 2
        rest = self.tokens.exact_prior.without(expected[[*base]].tolist())
        part = math.fsum(expected[[*few - base]].tolist()) / rest
        return _LEAST_CARRIED * part <= carried <= _MOST_CARRIED * (1 - (1 - part) ** 2)


@dataclass(frozen=True)
class _Few:
    """A few tokens are expected to be enough: the rest without them is measured, and each of them alone."""

    known: _Known
    guess: frozenset[int]  # these few
    likeliest: list[int]  # to measure alone, in this order
    enough: frozenset[int] | None  # tokens that are enough; perhaps not all of them are needed

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        tokens, over = self.known.tokens, set(self.known.tokens.over)
        alone = [t for t in self.likeliest if t not in over and not (self.enough and t in tokens.alone)]
        wanted = self.guess not in self.known.rests and (not self.enough or self.guess <= over)
        found: list[Probe] = [tokens.without(self.guess)] if wanted else []
        return [*found, *(tokens.token_set([t]) for t in alone[:count])][:count]


@dataclass(frozen=True)
class _Beyond:
    """A few tokens are not expected to be enough: rests without the likeliest test whether suspicion is right."""

    known: _Known
    first: list[TokenSet]  # such rests, before what the bisection measures
    later: list[TokenSet]  # and after it
    bisection: Bisection | None  # searches for the tokens that suspicion does not point at

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        if self.bisection is None:
            return [*self.first]
        tokens = self.known.tokens
        found = self.bisection.next_probes(count - len(self.first), passes_left)
        named = [probe for probe in found if probe in self.bisection.named]
        # A named token may explain the spike together with those already over τ.
        guess = frozenset(tokens.over).union(*(probe.candidates for probe in named))
        rests = [tokens.without(guess)] if named and guess not in self.known.rests else []
        twice = [probe.candidates for probe in (*named, *rests, *self.first, *self.later)]
        others = [probe for probe in found if probe.candidates not in twice]
        best_first: list[Probe] = [*named, *rests, *self.first, *others, *self.later]
        return best_first[:count]


@dataclass(frozen=True)
class _Sample:
    """The spike is diffuse: the likeliest tokens are measured alone, and the rest without those over τ."""

    known: _Known
    tokens: list[int]

    @property
    def is_measured(self) -> bool:
        known = self.known
        return known.tokens.alone.keys() >= set(self.tokens) and frozenset(known.tokens.over) in known.rests

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        tokens = self.known.tokens
        sample: list[Probe] = [tokens.token_set([t]) for t in self.tokens if t not in tokens.alone]
        return sample[:count] or [tokens.without(tokens.over)]


class _Ended:
    """The spike is explained or diffuse."""

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        return []


class FewTokens:
    """Finds a few tokens that explain a group's spike: the rest of the group is measured under its threshold.

    It estimates every token's energy (see `Estimate`). The estimate says whether a few tokens are expected to be enough
    to explain the spike. It is `_Few`, `_Beyond`, `_Sample` or `_Ended`: what was measured decides, and asking a second
    time changes nothing.

    Args:
        norm (float): The group's norm, which is over its threshold.
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms.
    """

    def __init__(self, tokens: Candidates, whole: TokenSet, norm: float, ordinary: float | None) -> None:
        self.tokens = tokens
        self._ordinary = ordinary
        self._known = _Known(tokens, norm)
        self._state: _Few | _Beyond | _Sample | _Ended | None = None
        # Whether a few tokens were ever expected to be enough.
        self._few_expected = False
        # How many tokens that were expected to explain the spike were not over τ, since the last one that was.
        self._misled = 0
        # How many passes in a row have found no token over τ and no rest under its threshold.
        self._vain = 0
        # The likeliest candidates in the order of the first estimate, more than "a few".
        self._likeliest: list[int] = []
        self._bisection: Bisection | None = None
        # How many more passes it may take; infinite unless curtailed.
        self._passes_left = math.inf

    @property
    def culprits(self) -> list[int]:
        """The smallest known set of tokens that explains the spike; if none does, all tokens over τ so far."""
        explaining = self._known.explaining
        return [t for t in self.tokens.over if explaining is None or t in explaining]

    @property
    def rest(self) -> tuple[TokenSet, float] | None:
        """The group without its culprits, and the norm of that; None if it was not measured."""
        removed, rests = frozenset(self.culprits), self._known.rests
        return (self.tokens.without(removed), rests[removed]) if removed in rests else None

    @property
    def explained(self) -> bool:
        return self._known.explaining is not None

    @property
    def ended(self) -> bool:
        is_measured = isinstance(self._state, _Ended) or (isinstance(self._state, _Sample) and self._state.is_measured)
        return self.explained or is_measured

    @property
    def open_sets(self) -> list[TokenSet]:
        return [] if self.ended else [self._known.smallest_rest_over[0]]

    @property
    def given_up(self) -> list[TokenSet]:
        if not self.ended or self.explained or len(self.tokens.alone) == self._known.size:
            return []
        return [self.tokens.without(self.tokens.alone)]

    @property
    def diffuse(self) -> list[tuple[TokenSet, float]]:
        return [self._known.smallest_rest_over] if self.ended and not self.explained else []

    @property
    def unnamed(self) -> int:
        """How many tokens are to be measured alone of a set that is enough to explain the spike; 0 without one."""
        enough = None if self._is_diffuse else self._known.smallest_enough
        return len(enough.difference(self.tokens.alone)) if enough else 0

    def passes_ahead(self, count: int) -> float:
        """How many passes of `count` probes the known next steps may take; 0 while only rests are measured."""
        searching = self._bisection is not None and not self._is_diffuse
        return self.unnamed / count or (patience(self._known.size, count) if searching else 0.0)

    def curtail(self, passes: int) -> None:
        """Limits the passes from here on, because the spike of another group is diffuse. Later calls do nothing."""
        if math.isinf(self._passes_left):
            self._passes_left = passes

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        """At most `count` probes to measure next, best first; none when the search is over."""
        self._state = self._decide(count)
        found = self._state.next_probes(count, passes_left)
        if not found and isinstance(self._state, _Beyond):
            self._state = self._sample()
            found = self._state.next_probes(count, passes_left)
        return found

    def add_measurements(self, measured: Sequence[tuple[Probe, float]], count: int) -> None:
        """Records the norms of a pass of up to `count` probes; NaN and Inf count as over the threshold."""
        self._passes_left -= 1
        known = self._known
        promising, enough = frozenset().union(*known.enough), len(known.enough)
        if self._bisection is not None:
            self._bisection.add_measurements(measured, count)
        for probe, norm in measured:
            removed = known.size - len(probe.candidates)
            if isinstance(probe, TokenSet) and removed <= max(known.most, len(self.tokens.over)):
                known.add_rest(frozenset(self.tokens.left_out(probe)), norm)
        singles = {probe.candidates[0] for probe, _ in measured if is_single(probe)}
        found = not singles.isdisjoint(self.tokens.over)
        self._misled = 0 if found else self._misled + len(singles & promising)
        self._vain = 0 if found or len(known.enough) > enough else self._vain + 1

    @property
    def _is_diffuse(self) -> bool:
        return isinstance(self._state, (_Sample, _Ended))

    def _decide(self, count: int) -> _Few | _Beyond | _Sample | _Ended:
        """The state in which the next pass of `count` probes is."""
        if self.ended:
            return _Ended()
        if isinstance(self._state, _Sample):
            return self._state
        known = self._known
        if self.unnamed > self._passes_left * count:
            return self._sample()
        estimate = known.estimate()
        order = estimate.likeliest(known.most + 1 + count + len(self.tokens.over))
        few, enough = known.expect(estimate, order), known.smallest_enough
        self._likeliest = self._likeliest or order
        if self._vain > patience(known.size, count) or self._passes_left <= 0:
            return self._sample()
        most = min(known.most if self._few_expected else known.few, self._passes_left * count)
        if self._misled < SAMPLE and (enough or few <= most):
            self._few_expected = True
            return _Few(known, frozenset(order[:few]), estimate.sort(enough) if enough else order, enough)
        return self._beyond(count) or self._sample()

    def _beyond(self, count: int) -> _Beyond | None:
        """None if the spike is diffuse: it is where suspicion expects it, and too many tokens are behind it."""
        known = self._known
        likeliest = list(dict.fromkeys([*self.tokens.over, *self._likeliest]))[: known.few]
        few = set(likeliest)
        # Large tokens that suspicion already points at would only add noise to the search for the others.
        over = (r for r in known.rests if r not in known.enough and r < few)
        base = max((r for r in over if len(r) <= known.few / 2), key=len)
        checks: list[TokenSet] = []
        if math.isfinite(known.rests[base]) and self._misled < SAMPLE:
            sizes = [len(likeliest), len(likeliest) // 2] if math.isinf(self._passes_left) else [len(likeliest)]
            parts = [frozenset(likeliest[:size]) for size in sizes]
            parts = [part for part in parts if base < part]
            if all(known.is_as_expected(base, part) for part in parts if part in known.rests):
                checks = [self.tokens.without(part) for part in parts if part not in known.rests]
                if not checks and (self._bisection is None or not self._bisection.has_named):
                    return None
        first, later = checks[: max(count // 2, 1)], checks[max(count // 2, 1) :]
        if len(first) < count and self._bisection is None:
            self._bisection = Bisection(self.tokens, self.tokens.without(base), known.rests[base], self._ordinary)
        return _Beyond(known, first, later, self._bisection if len(first) < count else None)

    def _sample(self) -> _Sample | _Ended:
        sampled = math.isinf(self._passes_left) or self._known.smallest_enough is not None
        sample = _Sample(self._known, self._likeliest[:SAMPLE] if sampled else [])
        return _Ended() if sample.is_measured else sample
