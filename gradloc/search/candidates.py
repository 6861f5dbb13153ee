# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one group: weights, thresholds, and the part of the gradient's energy expected from each."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..measure.passes import GroupName
from ..threshold import is_over

# The fraction of the expected energy that is proportional to suspicion. The rest is proportional to w_t², so that at
# most about log2(10 n) splits isolate any token, however wrong suspicion is.
_TRUST = 0.9

# Tokens without suspicion get this much energy, as a fraction of all.
_LEAST = 1e-6


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Some tokens of a group, whose gradient a probe can measure.

    An empty token set measures the group's gradient without any token: a value other than zero means that it is broken.
    """

    of: "Candidates"
    places: Tensor  # the candidates, ascending, int64
    factors: Tensor | None = None  # those of the candidates' gradients, in a probe that reads a digit of a code

    @property
    def group(self) -> GroupName:
        return self.of.name

    @property
    def candidates(self) -> tuple[int, ...]:
        return tuple(self.places.tolist())

    @property
    def is_single(self) -> bool:
        """Whether it is one token alone; a code has several."""
        return len(self.places) == 1

    @cached_property
    def square(self) -> float:
        """Σ w_t²."""
        return math.fsum(self.of.square_of[self.places].tolist())

    @cached_property
    def expected(self) -> float:
        """The fraction of the group's energy expected from these candidates."""
        return math.fsum(self.of.prior_of[self.places].tolist())

    @property
    def threshold(self) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        return self.of.tau * math.sqrt(self.square)

    def is_over(self, norm: float) -> bool:
        """Whether a measured norm is over the threshold; NaN and Inf are."""
        return is_over(norm, self.threshold)


class Found(NamedTuple):
    """The result so far of the search of one group."""

    culprits: Sequence[int] = ()  # tokens measured alone over τ
    rest: tuple[TokenSet, float] | None = None  # the group without them, and its norm; None if it was not measured
    diffuse: Sequence[tuple[TokenSet, float]] = ()  # the smallest sets with a spike but no culprit, with their norms
    given_up: Sequence[TokenSet] = ()  # the unmeasured sets of a search that was given up
    # The sets over their thresholds, and unmeasured parts of such sets, whose search has not ended; best first.
    open_sets: Sequence[TokenSet] = ()


class Candidates:
    """The candidates of one group, with the energy (squared norm) that the search expects from each.

    All sums use `math.fsum`, so that every rank makes the same decisions: a tensor sum of floats depends
    on the number of threads. Else, tensors are used one element at a time only.

    Args:
        suspicion (Tensor): s_t of each candidate, shape (n,).
        weights (Tensor): w_t of each candidate, shape (n,), not zero.
    """

    def __init__(self, name: GroupName, tau: float, suspicion: Tensor, weights: Tensor) -> None:
        self.name = name
        self.tau = tau
        self.square_of = weights.double().square()  # w_t², float64 of shape (n,)
        energies = suspicion.double().square()
        finite = energies.isfinite()
        ceiling = 10 * float(energies[finite].max()) if finite.any() else 0.0
        self._energies = torch.where(finite, energies, ceiling or 1.0)
        if not self.square_of.isfinite().all():
            raise ValueError("a token's weight is not finite")
        self._total, self.square = math.fsum(self._energies.tolist()), math.fsum(self.square_of.tolist())
        # The norm of the gradient that every probe contains, whichever tokens it keeps; 0 unless it was measured.
        self.without_tokens = 0.0
        self.alone: dict[int, float] = {}  # the norms of the candidates measured alone, in the order of measurement

    @property
    def suspicion(self) -> Tensor:
        """s_t, float64 of shape (n,); a non-finite value is replaced by a large finite one."""
        return self._energies.sqrt()

    @property
    def suspected(self) -> Tensor:
        """The fraction of the group's energy that suspicion predicts for each candidate, shape (n,)."""
        least = _LEAST * (self._total or 1.0) / self.square
        return (self._energies + least * self.square_of) / (self._total + least * self.square)

    @cached_property
    def prior_of(self) -> Tensor:
        """Like `suspected`, with a part of the energy spread in proportion to w_t² (see `_TRUST`)."""
        trust = _TRUST / self._total if self._total > 0 else 0.0
        even = (1 - trust * self._total) / self.square
        return trust * self._energies + even * self.square_of

    def likeliest(self, places: Tensor) -> Tensor:
        """Some candidates, given in ascending order; those expected to be furthest over τ first. int64."""
        density = self.prior_of[places] / self.square_of[places]
        return places[density.sort(descending=True, stable=True).indices]

    def token_set(self, candidates: Iterable[int]) -> TokenSet:
        return TokenSet(self, torch.tensor(sorted(candidates), dtype=torch.int64))

    def without(self, removed: Collection[int]) -> TokenSet:
        """All candidates but these."""
        kept = torch.ones(len(self.square_of), dtype=torch.bool)
        kept[[*removed]] = False
        return TokenSet(self, kept.nonzero().flatten())

    def halves(self, token_set: TokenSet) -> tuple[TokenSet, ...]:
        """Two halves, with about half of the prior each, likelier tokens first; a single token is returned as it is."""
        if token_set.is_single:
            return (token_set,)
        ranked = self.likeliest(token_set.places)
        *sums, whole = accumulate(self.prior_of[ranked].tolist())
        distance = (torch.tensor(sums, dtype=torch.float64) - whole / 2).abs()
        cut = 1 + int((distance == distance.min()).nonzero()[0])
        return TokenSet(self, ranked[:cut].sort().values), TokenSet(self, ranked[cut:].sort().values)

    def is_over_alone(self, candidate: int, norm: float) -> bool:
        """Whether a norm is over the threshold of a single candidate."""
        return is_over(norm, self.tau * math.sqrt(self.square_of[candidate]))

    @property
    def over(self) -> list[int]:
        """The candidates measured alone over τ, also without the part of the norm that is not theirs."""
        return [t for t, norm in self.alone.items() if self.is_over_alone(t, norm - self.without_tokens)]
