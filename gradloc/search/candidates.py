# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one group: weights, thresholds, and the part of the gradient's energy expected from each."""

import math
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..threshold import is_over
from .codes import GroupKey, TokenSet

# The fraction of the expected energy that is proportional to suspicion. The rest is proportional to w_t², so that at
# most about log2(10 n) splits isolate any token, however wrong suspicion is.
_TRUST = 0.9

# The smallest factor that an estimate is scaled by, so that a later measurement can raise it again.
LEAST = 1e-6

# The largest base of a code if the norms of ordinary tokens, which add noise to the readings, are unknown; and its
# limit otherwise.
_BASE_UNKNOWN, _BASE_MOST = 8, 64


class ExactSum:
    """The exact sum of some finite numbers, as a few floats that add up to it.

    `math.fsum` rounds once, at its end. So subtracting a few numbers from the exact sum gives the same bits as adding
    all the others, in far less time.
    """

    def __init__(self, values: Tensor) -> None:
        if not values.isfinite().all():
            raise ValueError("a token's weight or suspicion is not finite")
        left, self._parts = values.tolist(), list[float]()
        while part := math.fsum(left):
            self._parts.append(part)
            left.append(-part)

    def without(self, values: Iterable[float] = ()) -> float:
        """The sum of the other numbers if `values` are some of them."""
        return math.fsum([*self._parts, *(-value for value in values)])


class Candidates:
    """The candidates of one group, with the energy (squared norm) that the search expects from each.

    All sums use `math.fsum`, so that every rank makes the same decisions: a tensor sum of floats depends
    on the number of threads. Else, tensors are used one element at a time only.

    Args:
        suspicion (Tensor): s_t of each candidate, shape (n,).
        weights (Tensor): w_t of each candidate, shape (n,), not zero.

    Attributes:
        exact_square (ExactSum), square (float): Σ w_t².
        suspected (Tensor): The fraction of the group's energy that suspicion predicts for each candidate, same shape.
        without_tokens (float): The norm of the gradient that every probe of the group contains, whichever tokens it
            keeps; 0 unless it was measured.
    """

    def __init__(self, name: GroupKey, tau: float, suspicion: Tensor, weights: Tensor) -> None:
        self.name = name
        self.tau = tau
        self.square_of = weights.double().square()  # w_t², float64 of shape (n,)
        energies = suspicion.double().square()
        finite = energies.isfinite()
        ceiling = 10 * float(energies[finite].max()) if finite.any() else 0.0
        self._energies = torch.where(finite, energies, ceiling or 1.0)
        self.exact_square = ExactSum(self.square_of)
        self._total, self.square = math.fsum(self._energies.tolist()), self.exact_square.without()
        least = LEAST * (self._total or 1.0) / self.square
        self.suspected = (self._energies + least * self.square_of) / (self._total + least * self.square)
        self.without_tokens = 0.0
        self.alone: dict[int, float] = {}
        self._all = tuple(range(len(self.square_of)))
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
    def prior_of(self) -> Tensor:
        """Like `suspected`, with a part of the energy spread in proportion to w_t² (see `_TRUST`)."""
        trust = _TRUST / self._total if self._total > 0 else 0.0
        even = (1 - trust * self._total) / self.square
        return trust * self._energies + even * self.square_of

    @cached_property
    def exact_prior(self) -> ExactSum:
        """The sum of `prior_of`."""
        return ExactSum(self.prior_of)

    @cached_property
    def exact_suspected(self) -> ExactSum:
        """The sum of `suspected`."""
        return ExactSum(self.suspected)

    @cached_property
    def likeliest(self) -> Tensor:
        """The candidates, those expected to be furthest over τ first; int64 of shape (n,)."""
        # The bits of floats that are not negative have their order, and integers are sorted several times as fast.
        return (-(self.prior_of / self.square_of).view(torch.int64)).sort(stable=True).indices

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
        self._squares[token_set] = self._square_without(self._left_out[token_set])
        return token_set

    def left_out(self, token_set: TokenSet) -> list[int]:
        """The candidates that a set is without."""
        found = self._left_out.get(token_set)
        return (~self._mask(self._indices(token_set))).nonzero().flatten().tolist() if found is None else found

    def halves(self, token_set: TokenSet) -> tuple[TokenSet, ...]:
        """Two halves, with about half of the prior each, likelier tokens first; a single token is returned as it is."""
        if len(token_set.candidates) == 1:
            return (token_set,)
        ranked = self._in_order(token_set)
        sums = list(accumulate(self.prior_of[ranked].tolist()))
        cut = 1 + min(range(len(sums) - 1), key=lambda i: abs(sums[i] - sums[-1] / 2))
        return self._part(ranked[:cut]), self._part(ranked[cut:])

    def apart(self, token_set: TokenSet, candidate: int) -> tuple[TokenSet, ...]:
        """A candidate of a set alone, and the set of the others if there are any."""
        alone = self.token_set([candidate])
        if len(token_set.candidates) == 1:
            return (alone,)
        if token_set in self._left_out:
            return alone, self.without([*self._left_out[token_set], candidate])
        ranked = self._in_order(token_set)
        return alone, self._part(ranked[ranked != candidate])

    def _part(self, ranked: Tensor) -> TokenSet:
        """The set of these candidates, which are in the order of `likeliest`."""
        token_set = TokenSet(self.name, tuple(self._mask(ranked).nonzero().flatten().tolist()))
        self._ranked[token_set] = ranked
        return token_set

    def _in_order(self, token_set: TokenSet) -> Tensor:
        """The candidates of a set, in the order of `likeliest`."""
        found = self._ranked.get(token_set)
        if found is None:
            among = self._mask(self._indices(token_set))
            found = self._ranked[token_set] = self.likeliest[among[self.likeliest]]
        return found

    def _indices(self, token_set: TokenSet) -> Tensor:
        """The candidates of a set, in any order."""
        if token_set in self._ranked:
            return self._ranked[token_set]
        if token_set in self._left_out:
            return (~self._mask(self._left_out[token_set])).nonzero().flatten()
        return torch.tensor(token_set.candidates, dtype=torch.int64)

    def _mask(self, candidates: list[int] | Tensor) -> Tensor:
        """Which candidates these are, bool of shape (n,)."""
        mask = torch.zeros(len(self._all), dtype=torch.bool)
        mask[candidates] = True
        return mask

    def _square_without(self, removed: Collection[int]) -> float:
        return self.exact_square.without(self.square_of[[*removed]].tolist())

    def square_in(self, token_set: TokenSet) -> float:
        """Σ w_t²."""
        found = self._squares.get(token_set)
        if found is None:
            found = self._squares[token_set] = math.fsum(self.square_of[self._indices(token_set)].tolist())
        return found

    def least_square_in(self, token_set: TokenSet) -> float:
        """The smallest w_t²."""
        return float(self.square_of[self._indices(token_set)].min())

    def threshold(self, token_set: TokenSet) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        return self.tau * math.sqrt(self.square_in(token_set))

    def is_over(self, token_set: TokenSet, norm: float) -> bool:
        """Whether a measured norm is over the threshold of these candidates; NaN and Inf are."""
        return is_over(norm, self.threshold(token_set))

    def is_over_alone(self, candidate: int, norm: float) -> bool:
        """The same for a single candidate."""
        return is_over(norm, self.tau * math.sqrt(self.square_of[candidate]))

    def is_over_without(self, removed: Collection[int], norm: float) -> bool:
        """The same for all candidates but these."""
        return is_over(norm, self.tau * math.sqrt(self._square_without(removed)))

    @property
    def over(self) -> list[int]:
        """The candidates measured alone over τ, also without the part of the norm that is not theirs."""
        return [t for t, norm in self.alone.items() if self.is_over_alone(t, norm - self.without_tokens)]

    def expected(self, token_set: TokenSet) -> float:
        """The fraction of the group's energy expected from these candidates."""
        found = self._priors.get(token_set)
        if found is None:
            if token_set in self._left_out:
                found = self.exact_prior.without(self.prior_of[self._left_out[token_set]].tolist())
            else:
                found = math.fsum(self.prior_of[self._indices(token_set)].tolist())
            self._priors[token_set] = found
        return found

    def is_concentrated(self, token_set: TokenSet, count: int, fraction: float) -> bool:
        """Whether `count` of these candidates have more than a fraction of what is expected from all of them."""
        prior = self.prior_of[self._indices(token_set)]
        return math.fsum(prior.topk(min(count, len(prior))).values.tolist()) > fraction * self.expected(token_set)

    def contrast(self, token_set: TokenSet, norm: float, ordinary: float | None) -> int:
        """The largest base of a code in which ordinary tokens do not hide a culprit's digits."""
        if not ordinary:
            return _BASE_UNKNOWN
        return int(min(max(norm / (ordinary * math.sqrt(self.square_in(token_set))), 2), _BASE_MOST))
