# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds a few tokens, each over τ, without which their group is under its threshold."""

import math
from collections.abc import Collection, Iterable, Sequence

from .bisection import SAMPLE, Bisection, patience
from .candidates import LEAST, Candidates
from .codes import Probe, TokenSet, is_single

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

    It estimates every token's energy (squared norm): proportional to suspicion, and scaled to match the norms measured
    so far. The estimate says whether a few tokens are expected to be enough to explain the spike. The states:

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
        self._all = frozenset(whole.candidates)
        self._few = min(max(math.ceil(_FEW * len(self._all)), _FEW_LEAST), _FEW_MOST, len(self._all))
        self._most = min(math.ceil(_OVERRUN * self._few), len(self._all))
        # The norm of the group without a set of tokens, by that set; and the sets for which it was under its threshold.
        self._rests: dict[frozenset[int], float] = {}
        self._enough: list[frozenset[int]] = []
        self._add_rest(frozenset(), norm)
        if self._most == len(self._all):
            self._add_rest(self._all, 0.0)
        # Whether a few tokens were ever expected to be enough.
        self._few_expected = False
        # How many tokens that were expected to explain the spike were not over τ, since the last one that was.
        self._misled = 0
        # How many passes in a row have found no token over τ and no rest under its threshold.
        self._vain = 0
        # The candidates in the order of the first estimate.
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
        return (self._without(removed), self._rests[removed]) if removed in self._rests else None

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
    def given_up(self) -> list[TokenSet]:
        unmeasured = [t for t in sorted(self._all) if t not in self.tokens.alone]
        return [self.tokens.token_set(unmeasured)] if self.ended and not self.explained and unmeasured else []

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
        return self.unnamed / count or (patience(len(self._all), count) if searching else 0.0)

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
            order, few = self._plan()
            self._likeliest = self._likeliest or order
            enough = self._smallest_enough
            patient = self._vain <= patience(len(self._all), count) and self._passes_left > 0
            most = min(self._most if self._few_expected else self._few, self._passes_left * count)
            if patient and self._misled < SAMPLE and (enough or few <= most):
                self._few_expected = True
                return self._probe_few(order, few, enough)[:count]
            found = self._probe_beyond(count, passes_left) if patient else []
            if found:
                return found
        if self._sample is None:
            sampled = math.isinf(self._passes_left) or self._smallest_enough is not None
            self._sample = self._likeliest[:SAMPLE] if sampled else []
            if self.ended:
                return []
        sample: list[Probe] = [self.tokens.token_set([t]) for t in self._sample if t not in self.tokens.alone]
        return sample[:count] or [self._without(self.tokens.over)]

    def add_measurements(self, measured: Sequence[tuple[Probe, float]], count: int) -> None:
        """Records the norms of a pass of up to `count` probes; NaN and Inf count as over the threshold."""
        self._passes_left -= 1
        promising, enough = frozenset().union(*self._enough), len(self._enough)
        if self._bisection is not None:
            self._bisection.add_measurements(measured, count)
        for probe, norm in measured:
            removed = len(self._all) - len(probe.candidates)
            if isinstance(probe, TokenSet) and removed <= max(self._most, len(self.tokens.over)):
                self._add_rest(self._all.difference(probe.candidates), norm)
        singles = {probe.candidates[0] for probe, _ in measured if is_single(probe)}
        found = not singles.isdisjoint(self.tokens.over)
        self._misled = 0 if found else self._misled + len(singles & promising)
        self._vain = 0 if found or len(self._enough) > enough else self._vain + 1

    def _probe_few(self, order: list[int], few: int, enough: frozenset[int] | None) -> list[Probe]:
        """Probes for the rest without the likeliest tokens, and for each of these tokens alone."""
        over, guess = set(self.tokens.over), frozenset(order[:few])
        alone = [t for t in order if t not in over]
        if enough:  # these tokens explain the spike, and perhaps not all of them are needed
            alone = [t for t in alone if t in enough]
        wanted = guess not in self._rests and (not enough or guess <= over)
        return [*([self._without(guess)] if wanted else []), *(self.tokens.token_set([t]) for t in alone)]

    def _probe_beyond(self, count: int, passes_left: float) -> list[Probe]:
        """Probes for rests that test whether suspicion is right, and the bisection's; none for a diffuse spike."""
        likeliest = list(dict.fromkeys([*self.tokens.over, *self._likeliest]))[: self._few]
        # Large tokens that suspicion already points at would only add noise to the search for the others.
        over = (r for r in self._rests if r not in self._enough and r < set(likeliest))
        base = max((r for r in over if len(r) <= self._few / 2), key=len)
        checks: list[Probe] = []
        if math.isfinite(self._rests[base]) and self._misled < SAMPLE:
            sizes = [len(likeliest), len(likeliest) // 2] if math.isinf(self._passes_left) else [len(likeliest)]
            parts = [frozenset(likeliest[:size]) for size in sizes]
            parts = [part for part in parts if base < part]
            if all(self._is_as_expected(base, part) for part in parts if part in self._rests):
                checks = [self._without(part) for part in parts if part not in self._rests]
                if not checks and (self._bisection is None or not self._bisection.has_named):
                    return []
        first, later = checks[: max(count // 2, 1)], checks[max(count // 2, 1) :]
        if len(first) == count:
            return first
        if self._bisection is None:
            self._bisection = Bisection(self.tokens, self._without(base), self._rests[base], self._ordinary)
        found = self._bisection.next_probes(count - len(first), passes_left)
        named = [probe for probe in found if probe in self._bisection.named]
        # A named token may explain the spike together with those already over τ.
        guess = frozenset(self.tokens.over).union(*(probe.candidates for probe in named))
        rests = [self._without(guess)] if named and guess not in self._rests else []
        known = [probe.candidates for probe in (*named, *rests, *checks)]
        others = [probe for probe in found if probe.candidates not in known]
        return [*named, *rests, *first, *others, *later][:count]

    def _is_as_expected(self, base: frozenset[int], few: frozenset[int]) -> bool:
        """Whether the likeliest few tokens carry about as much of the energy as suspicion predicts."""
        expected = self.tokens.prior
        carried = 1 - (self._rests[few] / self._rests[base]) ** 2
        part = math.fsum(expected[t] for t in few - base) / math.fsum(expected[t] for t in self._all - base)
        return _LEAST_CARRIED * part <= carried <= _MOST_CARRIED * (1 - (1 - part) ** 2)

    def _plan(self) -> tuple[list[int], int]:
        """The tokens that may be culprits, likeliest first, and how many of them are expected to be enough.

        The number is larger than `_most` if even that many are not enough, or if no finite norm is known.
        """
        finite = [removed for removed, norm in self._rests.items() if math.isfinite(norm)]
        base = min(finite, key=len, default=self._all)
        tau, squares, over = self.tokens.tau, self.tokens.squares, set(self.tokens.over)
        gains = [energy - tau * tau * square for energy, square in zip(self._estimate(base), squares, strict=True)]
        possible = [t for t in range(len(gains)) if t in over or t not in self.tokens.alone]
        order = sorted(possible, key=lambda t: (t not in base, -gains[t], t))
        few = sum(t in base for t in order)
        excess = math.fsum(gain for t, gain in enumerate(gains) if t not in base)
        while few <= self._most and (excess > 0 or frozenset(order[:few]) in self._rests):
            if few == len(order):
                return order, self._most + 1
            excess -= gains[order[few]]
            few += 1
        return order, few if finite else self._most + 1

    def _estimate(self, base: frozenset[int]) -> list[float]:
        """Every token's estimated energy: suspicion's, scaled to match each measurement, from oldest to newest."""
        whole = self._rests.get(base, 0.0) ** 2
        energy = [whole * fraction for fraction in self.tokens.suspected]
        for token, norm in self.tokens.alone.items():
            energy[token] = norm * norm if math.isfinite(norm) else 0.0
        for removed, norm in self._rests.items():
            if math.isfinite(norm):
                self._scale(energy, self._all - removed, norm * norm)
        return energy

    def _scale(self, energy: list[float], candidates: Iterable[int], norm_square: float) -> None:
        """Scales the candidates' energies so that they add up to a squared norm; those measured alone are kept."""
        free = [t for t in candidates if t not in self.tokens.alone]
        expected = math.fsum(energy[t] for t in free)
        if expected > 0:
            known = math.fsum(energy[t] for t in candidates if t in self.tokens.alone)
            # Not zero, so that a later measurement can raise it again.
            factor = max((norm_square - known) / expected, LEAST)
            for t in free:
                energy[t] *= factor

    def _add_rest(self, removed: frozenset[int], norm: float) -> None:
        self._rests[removed] = norm
        if not self.tokens.is_over(self._all - removed, norm):
            self._enough.append(removed)

    def _explaining(self) -> frozenset[int] | None:
        over = frozenset(self.tokens.over)
        return min((removed for removed in self._enough if removed <= over), key=len, default=None)

    def _smallest_rest_over(self) -> tuple[TokenSet, float]:
        """The smallest rest that was measured over its threshold."""
        removed = max((r for r in self._rests if r not in self._enough), key=len)
        return self._without(removed), self._rests[removed]

    def _without(self, removed: Collection[int]) -> TokenSet:
        return self.tokens.token_set(self._all.difference(removed))
