# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Estimates every token's energy (squared norm) from its suspicion and from what was measured so far."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .candidates import LEAST, Candidates, ExactSum


class Estimate:
    """How much of a group's excess over its threshold goes if a token is left out.

    A token's energy is estimated in proportion to its suspicion, and scaled to match each measurement of a rest, from
    oldest to newest; that of a token measured alone is known. Most tokens are in every rest, and so share one factor:
    what is done for each token, one by one, is done for the other tokens only.

    Args:
        rests (Mapping[frozenset[int], float]): The norm of the group without a set of tokens, by that set.
        base (frozenset[int]): The tokens that are left out already.

    Attributes:
        excess (float): What the group without `base` has over the square of its threshold.
    """

    def __init__(self, tokens: Candidates, rests: Mapping[frozenset[int], float], base: frozenset[int]) -> None:
        self.base = base
        whole, over, n = rests.get(base, 0.0) ** 2, set(tokens.over), len(tokens.square_of)
        alone = {t: norm * norm if math.isfinite(norm) else 0.0 for t, norm in tokens.alone.items()}
        finite = {removed: norm * norm for removed, norm in rests.items() if math.isfinite(norm)}
        single = sorted(frozenset().union(*finite).difference(alone))
        known = ExactSum(torch.tensor([*alone.values()], dtype=torch.float64))
        suspected = tokens.suspected[[*alone, *single]].tolist()
        common, energy = whole * tokens.exact_suspected.without(suspected), whole * tokens.suspected
        factor, factors = 1.0, dict.fromkeys(single, 1.0)
        begun = dict(zip(single, energy[single].tolist(), strict=True))
        for removed, square in finite.items():
            free = [t for t in single if t not in removed]
            expected = math.fsum([common * factor, *(begun[t] * factors[t] for t in free)])
            if expected > 0:
                left = square - known.without(alone[t] for t in removed if t in alone)
                # Not zero, so that a later measurement can raise it again.
                scale = max(left / expected, LEAST)
                factor *= scale
                for t in free:
                    factors[t] *= scale
        energies = {**alone, **{t: begun[t] * factors[t] if begun[t] else 0.0 for t in single}}
        # After many of the smallest factors the next one can be infinite, and an energy that was rounded to zero NaN.
        energy = (energy * factor).nan_to_num(0.0, posinf=math.inf)
        energy[[*energies]] = torch.tensor([*energies.values()], dtype=energy.dtype)
        tau_square = tokens.tau * tokens.tau
        self._gains = energy - tau_square * tokens.square_of
        excluded = [t for t in alone if t not in over]
        self.count = n - len(excluded)  # how many tokens may be culprits: those not measured alone, or measured over τ
        self.count_in_base = len(base) - sum(t in base for t in excluded)  # how many of these are in `base`
        left_energy = known.without(alone[t] for t in base if t in alone)
        left_square = tokens.exact_square.without(tokens.square_of[[*base]].tolist())
        others = (energies[t] for t in single if t not in base)
        self.excess = math.fsum([common * factor, *others, left_energy, -tau_square * left_square])
        self._possible = torch.ones(n, dtype=torch.bool)
        self._possible[excluded] = False

    def likeliest(self, count: int) -> list[int]:
        """The likeliest culprits: those in `base`, and at least `count` others if there are so many."""
        possible, inside = self._possible, []
        if len(self.base) < len(possible):
            inside = self.sort(t for t in self.base if possible[t])
            possible = possible.clone()
            possible[[*self.base]] = False
        return inside + _largest(self._gains, possible, count)

    def sort(self, tokens: Iterable[int]) -> list[int]:
        """Tokens in the order of likelihood, those of `base` first."""
        places = sorted(tokens)
        gains = dict(zip(places, self.gains(places), strict=True))
        return sorted(places, key=lambda t: (t not in self.base, -gains[t], t))

    def gains(self, tokens: list[int]) -> list[float]:
        """How much of the excess goes without each of these tokens."""
        return self._gains[tokens].tolist()


def _largest(values: Tensor, among: Tensor, count: int) -> list[int]:
    """The indices of the largest values, in descending order, then in that of the indices."""
    places = among.nonzero().flatten()
    values = values[places]
    if count < len(values):
        kept = values >= values.topk(count).values[-1]
        places, values = places[kept], values[kept]
    return places[values.sort(descending=True, stable=True).indices[:count]].tolist()
