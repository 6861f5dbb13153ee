# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds a few tokens, each over τ, without which their group is under its threshold."""

import math
from collections.abc import Sequence

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


class FewTokens:
    """Finds a few tokens that explain a group's spike: the rest of the group is measured under its threshold.

    It estimates every token's energy (see `Estimate`). The estimate says whether a few tokens are expected to be enough
    to explain the spike. The states:

    - few: a few tokens are expected to be enough. The rest without them is measured, and each of them alone, until the
      tokens measured over τ are enough
    - beyond: a few tokens are not expected to be enough. The rest without the likeliest few is measured. If suspicion
      is wrong about how much they carry, a `Bisection` searches for the tokens that suspicion does not point at
    - sample: the spike is diffuse; the likeliest tokens are measured alone
    - ended: the spike is explained or diffuse

    Args:
        tokens (Candidates): The group's tokens.
        whole (TokenSet): All of them.
        norm (float): The group's norm, which is over its threshold.
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms.
    """

    def __init__(self, tokens: Candidates, whole: TokenSet, norm: float, ordinary: float | None) -> None:
        self.tokens = tokens
        self._ordinary = ordinary
        self._size = len(whole.candidates)
        self._few = min(max(math.ceil(_FEW * self._size), _FEW_LEAST), _FEW_MOST, self._size)
        self._most = min(math.ceil(_OVERRUN * self._few), self._size)
        # The norm of the group without a set of tokens, by that set; and the sets for which it was under its threshold.
        self._rests: dict[frozenset[int], float] = {}
        self._enough: list[frozenset[int]] = []
        self._add_rest(frozenset(), norm)
        if self._most == self._size:
            self._add_rest(frozenset(range(self._size)), 0.0)
        # Whether a few tokens were ever expected to be enough.
        self._few_expected = False
        # How many tokens that were expected to explain the spike were not over τ, since the last one that was.
        self._misled = 0
        # How many passes in a row have found no token over τ and no rest under its threshold.
        self._vain = 0
        # The likeliest candidates in the order of the first estimate, more than "a few".
        self._likeliest: list[int] = []
        self._bisection: Bisection | None = None
        self._sample: list[int] | None = None
        # How many more passes it may take; infinite unless curtailed.
        self._passes_left = math.inf

    @property
    def culprits(self) -> list[int]:
        """The smallest known set of tokens that explains the spike; if none does, all tokens over τ so far."""
        explaining = self._explaining()
        return [t for t in self.tokens.over if explaining is None or t in explaining]

    @property
    def rest(self) -> tuple[TokenSet, float] | None:
        """The group without its culprits, and the norm of that; None if it was not measured."""
        removed = frozenset(self.culprits)
        return (self.tokens.without(removed), self._rests[removed]) if removed in self._rests else None

    @property
    def explained(self) -> bool:
        return self._explaining() is not None

    @property
    def ended(self) -> bool:
        if self.explained or self._sample is None:
            return self.explained
        return self.tokens.alone.keys() >= set(self._sample) and frozenset(self.tokens.over) in self._rests

    @property
    def open_sets(self) -> list[TokenSet]:
        return [] if self.ended else [self._smallest_rest_over()[0]]

    @property
    def open_count(self) -> int:
        """The number of `open_sets`."""
        return int(not self.ended)

    @property
    def given_up(self) -> list[TokenSet]:
        if not self.ended or self.explained or len(self.tokens.alone) == self._size:
            return []
        return [self.tokens.without(self.tokens.alone)]

    @property
    def diffuse(self) -> list[tuple[TokenSet, float]]:
        return [self._smallest_rest_over()] if self.ended and not self.explained else []

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

    @property
    def _smallest_enough(self) -> frozenset[int] | None:
        """The smallest set that is enough to explain the spike and has a token that was not measured alone."""
        return min((r for r in self._enough if not r <= self.tokens.alone.keys()), key=len, default=None)

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        """At most `count` probes to measure next, best first; none when the search is over."""
        if self.ended:
            return []
        if self._sample is None and self.unnamed <= self._passes_left * count:
            estimate = self._estimate()
            order = estimate.likeliest(self._most + 1 + count + len(self.tokens.over))
            few = self._expect(estimate, order)
            self._likeliest = self._likeliest or order
            enough = self._smallest_enough
            patient = self._vain <= patience(self._size, count) and self._passes_left > 0
            most = min(self._most if self._few_expected else self._few, self._passes_left * count)
            if patient and self._misled < SAMPLE and (enough or few <= most):
                self._few_expected = True
                alone = estimate.sort(enough) if enough else order
                return self._probe_few(frozenset(order[:few]), alone, enough)[:count]
            found = self._probe_beyond(count, passes_left) if patient else []
            if found:
                return found
        if self._sample is None:
            sampled = math.isinf(self._passes_left) or self._smallest_enough is not None
            self._sample = self._likeliest[:SAMPLE] if sampled else []
            if self.ended:
                return []
        sample: list[Probe] = [self.tokens.token_set([t]) for t in self._sample if t not in self.tokens.alone]
        return sample[:count] or [self.tokens.without(self.tokens.over)]

    def add_measurements(self, measured: Sequence[tuple[Probe, float]], count: int) -> None:
        """Records the norms of a pass of up to `count` probes; NaN and Inf count as over the threshold."""
        self._passes_left -= 1
        promising, enough = frozenset().union(*self._enough), len(self._enough)
        if self._bisection is not None:
            self._bisection.add_measurements(measured, count)
        for probe, norm in measured:
            removed = self._size - len(probe.candidates)
            if isinstance(probe, TokenSet) and removed <= max(self._most, len(self.tokens.over)):
                self._add_rest(frozenset(self.tokens.left_out(probe)), norm)
        singles = {probe.candidates[0] for probe, _ in measured if is_single(probe)}
        found = not singles.isdisjoint(self.tokens.over)
        self._misled = 0 if found else self._misled + len(singles & promising)
        self._vain = 0 if found or len(self._enough) > enough else self._vain + 1

    def _probe_few(self, guess: frozenset[int], likeliest: list[int], enough: frozenset[int] | None) -> list[Probe]:
        """Probes for the rest without the guessed tokens, and for each of the likeliest tokens alone."""
        over = set(self.tokens.over)
        alone = [t for t in likeliest if t not in over]
        if enough:  # these tokens explain the spike, and perhaps not all of them are needed
            alone = [t for t in alone if t not in self.tokens.alone]
        wanted = guess not in self._rests and (not enough or guess <= over)
        rests = [self.tokens.without(guess)] if wanted else []
        return [*rests, *(self.tokens.token_set([t]) for t in alone)]

    def _probe_beyond(self, count: int, passes_left: float) -> list[Probe]:
        """Probes for rests that test whether suspicion is right, and the bisection's; none for a diffuse spike."""
        likeliest = list(dict.fromkeys([*self.tokens.over, *self._likeliest]))[: self._few]
        few = set(likeliest)
        # Large tokens that suspicion already points at would only add noise to the search for the others.
        over = (r for r in self._rests if r not in self._enough and r < few)
        base = max((r for r in over if len(r) <= self._few / 2), key=len)
        checks: list[Probe] = []
        if math.isfinite(self._rests[base]) and self._misled < SAMPLE:
            sizes = [len(likeliest), len(likeliest) // 2] if math.isinf(self._passes_left) else [len(likeliest)]
            parts = [frozenset(likeliest[:size]) for size in sizes]
            parts = [part for part in parts if base < part]
            if all(self._is_as_expected(base, part) for part in parts if part in self._rests):
                checks = [self.tokens.without(part) for part in parts if part not in self._rests]
                if not checks and (self._bisection is None or not self._bisection.has_named):
                    return []
        first, later = checks[: max(count // 2, 1)], checks[max(count // 2, 1) :]
        if len(first) == count:
            return first
        if self._bisection is None:
            self._bisection = Bisection(self.tokens, self.tokens.without(base), self._rests[base], self._ordinary)
        found = self._bisection.next_probes(count - len(first), passes_left)
        named = [probe for probe in found if probe in self._bisection.named]
        # A named token may explain the spike together with those already over τ.
        guess = frozenset(self.tokens.over).union(*(probe.candidates for probe in named))
        rests = [self.tokens.without(guess)] if named and guess not in self._rests else []
        known = [probe.candidates for probe in (*named, *rests, *checks)]
        others = [probe for probe in found if probe.candidates not in known]
        return [*named, *rests, *first, *others, *later][:count]

    def _is_as_expected(self, base: frozenset[int], few: frozenset[int]) -> bool:
        """Whether the likeliest few tokens carry about as much of the energy as suspicion predicts."""
        expected = self.tokens.prior_of
        carried = 1 - (self._rests[few] / self._rests[base]) ** 2
        rest = self.tokens.exact_prior.without(expected[[*base]].tolist())
        part = math.fsum(expected[[*few - base]].tolist()) / rest
        return _LEAST_CARRIED * part <= carried <= _MOST_CARRIED * (1 - (1 - part) ** 2)

    def _estimate(self) -> Estimate:
        """What is known of every token, starting at the smallest set of tokens left out of a rest of a finite norm."""
        finite = [removed for removed, norm in self._rests.items() if math.isfinite(norm)]
        base = min(finite, key=len) if finite else frozenset(range(self._size))
        return Estimate(self.tokens, self._rests, base)

    def _expect(self, estimate: Estimate, order: list[int]) -> int:
        """How many of the likeliest tokens are expected to be enough.

        The number is larger than `_most` if even that many are not enough, or if no finite norm is known.
        """
        few, excess = estimate.count_in_base, estimate.excess
        gains = estimate.gains(order[: self._most + 1])
        while few <= self._most and (excess > 0 or frozenset(order[:few]) in self._rests):
            if few == estimate.count:
                return self._most + 1
            excess -= gains[few]
            few += 1
        return few if estimate.base in self._rests else self._most + 1

    def _add_rest(self, removed: frozenset[int], norm: float) -> None:
        self._rests[removed] = norm
        if not self.tokens.is_over_without(removed, norm):
            self._enough.append(removed)

    def _explaining(self) -> frozenset[int] | None:
        over = frozenset(self.tokens.over)
        return min((removed for removed in self._enough if removed <= over), key=len, default=None)

    def _smallest_rest_over(self) -> tuple[TokenSet, float]:
        """The smallest rest that was measured over its threshold."""
        removed = max((r for r in self._rests if r not in self._enough), key=len)
        return self.tokens.without(removed), self._rests[removed]
