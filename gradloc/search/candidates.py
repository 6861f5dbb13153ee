# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one group: weights, thresholds, and the part of the gradient's energy expected from each."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..threshold import is_over
from .codes import GroupKey, TokenSet
from .exact_sum import ExactSum

# The fraction of the expected energy that is proportional to suspicion. The rest is proportional to w_t², so that at
# most about log2(10 n) splits isolate any token, however wrong suspicion is.
_TRUST = 0.9

# The smallest factor that an estimate is scaled by, so that a later measurement can raise it again.
LEAST = 1e-6

# The largest base of a code if the norms of ordinary tokens, which add noise to the readings, are unknown; and its
# limit otherwise.
_BASE_UNKNOWN, _BASE_MOST = 8, 64


class Candidates:
    """The candidates of one group, with the energy (squared norm) that the search expects from each.

    All sums use `math.fsum`, so that every rank makes the same decisions: a tensor sum depends on the number of
    threads. Tensors are used one element at a time only.

    Args:
        name (GroupKey): The group.
        tau (float): τ.
        suspicion (Tensor): s_t of each candidate, shape (n,).
        weights (Tensor): w_t of each candidate, shape (n,), not zero.

    Attributes:
        squares (list[float]): w_t².
        square_of (Tensor): The same, float64 of shape (n,).
        square (float): Their sum.
        suspected (Tensor): The fraction of the group's energy that suspicion predicts for each candidate, same shape.
        without_tokens (float): The norm of the gradient that every probe of the group contains, whichever tokens it
            keeps; 0 unless it was measured.
    """

    def __init__(self, name: GroupKey, tau: float, suspicion: Tensor, weights: Tensor) -> None:
        self.name = name
        self.tau = tau
        self.square_of = weights.double().square()
        self.squares: list[float] = self.square_of.tolist()
        energies = suspicion.double().square()
        finite = energies.isfinite()
        ceiling = 10 * float(energies[finite].max()) if finite.any() else 0.0
        self._energies = torch.where(finite, energies, ceiling or 1.0)
        self._total, self.square = math.fsum(self._energies.tolist()), math.fsum(self.squares)
        least = LEAST * (self._total or 1.0) / self.square
        self.suspected = (self._energies + least * self.square_of) / (self._total + least * self.square)
        self.without_tokens = 0.0
        self._alone: dict[int, float] = {}
        self._over: tuple[float, list[int]] | None = None
        self._all = tuple(range(len(self.squares)))
        # By token set: the candidates that `without` has left out, Σ w_t², the sum of `prior`, and the candidates in
        # the order of `likeliest`.
        self._left_out: WeakKeyDictionary[TokenSet, list[int]] = WeakKeyDictionary()
        self._squares: WeakKeyDictionary[TokenSet, float] = WeakKeyDictionary()
        self._priors: WeakKeyDictionary[TokenSet, float] = WeakKeyDictionary()
        self._ranked: WeakKeyDictionary[TokenSet, Tensor] = WeakKeyDictionary()

    @cached_property
    def suspicion(self) -> list[float]:
        """s_t; a non-finite value is replaced by a large finite one."""
        return self._energies.sqrt().tolist()

    @cached_property
    def _prior_of(self) -> Tensor:
        """`prior`, float64 of shape (n,)."""
        trust = _TRUST / self._total if self._total > 0 else 0.0
        even = (1 - trust * self._total) / self.square
        return trust * self._energies + even * self.square_of

    @cached_property
    def prior(self) -> list[float]:
        """Like `suspected`, with a part of the energy spread in proportion to w_t² (see `_TRUST`)."""
        return self._prior_of.tolist()

    @cached_property
    def exact_square(self) -> ExactSum:
        """The sum of `squares`."""
        return ExactSum(self.squares)

    @cached_property
    def exact_prior(self) -> ExactSum:
        """The sum of `prior`."""
        return ExactSum(self.prior)

    @cached_property
    def exact_suspected(self) -> ExactSum:
        """The sum of `suspected`."""
        return ExactSum(self.suspected.tolist())

    @cached_property
    def likeliest(self) -> Tensor:
        """The candidates, those expected to be furthest over τ first; int64 of shape (n,)."""
        return (self._prior_of / self.square_of).sort(descending=True, stable=True).indices

    @cached_property
    def _place(self) -> Tensor:
        """Each candidate's index in `likeliest`."""
        return self.likeliest.argsort()

    @property
    def alone(self) -> Mapping[int, float]:
        """The norms of the candidates measured alone, in the order of measurement."""
        return self._alone

    def record_alone(self, norms: Mapping[int, float]) -> None:
        """Adds norms of candidates measured alone."""
        if norms:
            self._alone |= norms
            self._over = None

    def token_set(self, candidates: Iterable[int]) -> TokenSet:
        return TokenSet(self.name, tuple(sorted(candidates)))

    def without(self, removed: Collection[int]) -> TokenSet:
        """All candidates but these."""
        kept: list[int] = []
        start = 0
        for candidate in sorted(removed):
            kept += self._all[start:candidate]
            start = candidate + 1
        token_set = TokenSet(self.name, (*kept, *self._all[start:]))
        self._left_out[token_set] = [*removed]
        self._squares[token_set] = self.exact_square.without(self.squares[t] for t in removed)
        return token_set

    def halves(self, token_set: TokenSet) -> tuple[TokenSet, ...]:
        """Two halves, with about half of the prior each, likelier tokens first; a single token is returned as it is."""
        if len(token_set.candidates) == 1:
            return (token_set,)
        ranked = self._in_order(token_set)
        prior = self._prior_of[ranked].tolist()
        cut = _nearest_half(list(accumulate(prior))) + 1
        return self._part(ranked[:cut], prior[:cut]), self._part(ranked[cut:], prior[cut:])

    def _part(self, ranked: Tensor, prior: list[float]) -> TokenSet:
        """The set of these candidates, which are in the order of `likeliest`, with the prior of each."""
        token_set = TokenSet(self.name, tuple(ranked.sort().values.tolist()))
        self._ranked[token_set] = ranked
        self._priors[token_set] = math.fsum(prior)
        self._squares[token_set] = math.fsum(self.square_of[ranked].tolist())
        return token_set

    def _in_order(self, token_set: TokenSet) -> Tensor:
        """The candidates of a set, in the order of `likeliest`."""
        found = self._ranked.get(token_set)
        if found is None:
            if token_set in self._left_out:
                kept = torch.ones(len(self._all), dtype=torch.bool)
                kept[self._left_out[token_set]] = False
                found = self.likeliest[kept[self.likeliest]]
            else:
                found = self.likeliest[self._place[torch.tensor(token_set.candidates)].sort().values]
            self._ranked[token_set] = found
        return found

    def square_in(self, token_set: TokenSet) -> float:
        """Σ w_t²."""
        found = self._squares.get(token_set)
        if found is None:
            found = self._squares[token_set] = math.fsum(map(self.squares.__getitem__, token_set.candidates))
        return found

    def least_square_in(self, token_set: TokenSet) -> float:
        """The smallest w_t²."""
        return min(map(self.squares.__getitem__, token_set.candidates))

    def threshold(self, token_set: TokenSet) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        return self.tau * math.sqrt(self.square_in(token_set))

    def is_over(self, token_set: TokenSet, norm: float) -> bool:
        """Whether a measured norm is over the threshold of these candidates; NaN and Inf are."""
        return is_over(norm, self.threshold(token_set))

    def is_over_alone(self, candidate: int, norm: float) -> bool:
        """The same for a single candidate."""
        return is_over(norm, self.tau * math.sqrt(self.squares[candidate]))

    def is_over_without(self, removed: Iterable[int], norm: float) -> bool:
        """The same for all candidates but these."""
        square = self.exact_square.without(self.squares[t] for t in removed)
        return is_over(norm, self.tau * math.sqrt(square))

    @property
    def over(self) -> list[int]:
        """The candidates measured alone over τ, also without the part of the norm that is not theirs."""
        if self._over is None or self._over[0] != self.without_tokens:
            over = [t for t, norm in self._alone.items() if self.is_over_alone(t, norm - self.without_tokens)]
            self._over = self.without_tokens, over
        return self._over[1]

    def expected(self, token_set: TokenSet) -> float:
        """The fraction of the group's energy expected from these candidates."""
        found = self._priors.get(token_set)
        if found is None:
            found = self._priors[token_set] = math.fsum(map(self.prior.__getitem__, token_set.candidates))
        return found

    def is_concentrated(self, token_set: TokenSet, count: int, fraction: float) -> bool:
        """Whether `count` of these candidates have more than a fraction of what is expected from all of them."""
        prior = self._prior_of[self._in_order(token_set)]
        return math.fsum(prior.topk(min(count, len(prior))).values.tolist()) > fraction * self.expected(token_set)

    def contrast(self, token_set: TokenSet, norm: float, ordinary: float | None) -> int:
        """The largest base of a code in which ordinary tokens do not hide a culprit's digits."""
        if not ordinary:
            return _BASE_UNKNOWN
        return int(min(max(norm / (ordinary * math.sqrt(self.square_in(token_set))), 2), _BASE_MOST))


def _nearest_half(sums: list[float]) -> int:
    """The first index, the last one excluded, whose ascending sum is nearest to half of the last."""
    half, end = sums[-1] / 2, len(sums) - 1
    above = bisect_left(sums, half, 0, end)
    if above == 0:
        return 0
    distance = half - sums[above - 1]
    if above < end and sums[above] - half < distance:
        return above
    return bisect_left(sums, -distance, 0, above, key=lambda s: s - half)
