# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one group: weights, thresholds, and the part of the gradient's energy expected from each."""

import math
from collections.abc import Iterable

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


class Candidates:
    """The candidates of one group, with the energy (squared norm) that the search expects from each.

    All sums use `math.fsum`, so that every rank makes the same decisions: a tensor sum depends on the number of
    threads.

    Args:
        name (GroupKey): The group.
        tau (float): τ.
        suspicion (Tensor): s_t of each candidate, shape (n,).
        weights (Tensor): w_t of each candidate, shape (n,), not zero.

    Attributes:
        suspicion (list[float]): s_t; a non-finite value is replaced by a large finite one.
        squares (list[float]): w_t².
        suspected (list[float]): The fraction of the group's energy that suspicion predicts for each candidate.
        prior (list[float]): The same, with a part of the energy spread in proportion to w_t² (see `_TRUST`).
        alone (dict[int, float]): The norms of the candidates measured alone, in the order of measurement.
        without_tokens (float): The norm of the gradient that every probe of the group contains, whichever tokens it
            keeps; 0 unless it was measured.
    """

    def __init__(self, name: GroupKey, tau: float, suspicion: Tensor, weights: Tensor) -> None:
        self.name = name
        self.tau = tau
        self.alone: dict[int, float] = {}
        self.without_tokens = 0.0
        self.squares: list[float] = weights.double().square().tolist()
        energies: list[float] = suspicion.double().square().tolist()
        ceiling = 10 * max((e for e in energies if math.isfinite(e)), default=0.0) or 1.0
        energies = [e if math.isfinite(e) else ceiling for e in energies]
        self.suspicion = [math.sqrt(e) for e in energies]
        total, square = math.fsum(energies), math.fsum(self.squares)
        trust = _TRUST / total if total > 0 else 0.0
        even = (1 - trust * total) / square
        self.prior = [trust * e + even * w for e, w in zip(energies, self.squares, strict=True)]
        least = LEAST * (total or 1.0) / square
        self.suspected = [
            (e + least * w) / (total + least * square) for e, w in zip(energies, self.squares, strict=True)
        ]

    def token_set(self, candidates: Iterable[int]) -> TokenSet:
        return TokenSet(self.name, tuple(sorted(candidates)))

    def square(self, candidates: Iterable[int]) -> float:
        """Σ w_t²."""
        return math.fsum(self.squares[t] for t in candidates)

    def threshold(self, candidates: Iterable[int]) -> float:
        """τ(S) = τ·sqrt(Σ w_t²)."""
        return self.tau * math.sqrt(self.square(candidates))

    def is_over(self, candidates: Iterable[int], norm: float) -> bool:
        """Whether a measured norm is over the threshold of these candidates; NaN and Inf are."""
        return is_over(norm, self.threshold(candidates))

    @property
    def over(self) -> list[int]:
        """The candidates measured alone over τ, also without the part of the norm that is not theirs."""
        return [t for t, norm in self.alone.items() if self.is_over([t], norm - self.without_tokens)]

    def expected(self, candidates: Iterable[int]) -> float:
        """The fraction of the group's energy expected from these candidates."""
        return math.fsum(self.prior[t] for t in candidates)

    def likeliest(self, candidate: int) -> tuple[float, int]:
        """A sort key: the candidates expected to be furthest over τ come first."""
        return -self.prior[candidate] / self.squares[candidate], candidate

    def contrast(self, token_set: TokenSet, norm: float, ordinary: float | None) -> int:
        """The largest base of a code in which ordinary tokens do not hide a culprit's digits."""
        if not ordinary:
            return _BASE_UNKNOWN
        return int(min(max(norm / (ordinary * math.sqrt(self.square(token_set.candidates))), 2), _BASE_MOST))
