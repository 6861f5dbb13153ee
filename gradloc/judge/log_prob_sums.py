# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the sums of an update's log-probs say, those of all ranks and mini-batches: `own_sums` and `own_alignment`."""

import math
from collections.abc import Sequence

from ..sums import ALIGNMENT_SUMS, SUMS
from .alignment import by_pair, correlation

# The share of the tokens that differ, at least, to speak of their signs.
ONE_SIDE_TOKENS = 0.25
# Of the responses that can be told, the share that agree with the reference; and of those that are far, the share that
# can be told; and how many they are.
STALE_SHARE, CLEAR_SHARE, STALE_RESPONSES = 0.25, 0.6, 4
# Responses are of two kinds if so many are far, and the others have at most this part of their gap.
SPLIT_SHARES, SPLIT = (0.1, 0.8), 0.2


class LogProbSums(dict[str, float]):
    """The sums of an update so far, by the names in `SUMS`."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(SUMS, 0.0))
        # Those of `own_alignment`; None before any.
        self.alignment: list[float] | None = None
        self._mini_batches = self._mini_batches_with_sums = 0

    def add(self, sums: Sequence[float] | None, alignment: Sequence[float] | None) -> None:
        """Adds those of a mini-batch, of which either may be missing."""
        self._mini_batches += 1
        self._mini_batches_with_sums += sums is not None
        if sums is not None:
            self.update({name: self[name] + value for name, value in zip(SUMS, sums, strict=True)})
        if alignment is not None:
            before = self.alignment or [0.0] * ALIGNMENT_SUMS
            self.alignment = [a + b for a, b in zip(before, alignment, strict=True)]

    def mean(self, name: str) -> float:
        """Over the tokens."""
        return self[name] / self["tokens"]

    @property
    def epochs(self) -> float:
        """How many PPO epochs the update has made; mini-batches have sums in the first."""
        return self._mini_batches / self._mini_batches_with_sums

    @property
    def is_spread(self) -> bool:
        """Whether many tokens differ, and not a few by much."""
        return 2 * self["bounded"] >= self["gap"]

    def share_of_one_sign(self) -> float | None:
        """The share of the differences that have the sign of most; None where few tokens differ."""
        larger, smaller = self["larger"], self["smaller"]
        if larger + smaller < ONE_SIDE_TOKENS * self["tokens"]:
            return None
        return max(larger, smaller) / (larger + smaller)

    def tilt(self) -> float:
        """The correlation of rollout − policy with the mean of the two: noise in either of them hardly makes one."""
        mean, level = self.mean("difference"), self.mean("level")
        variance = (self.mean("difference_square") - mean**2) * (self.mean("level_square") - level**2)
        return (self.mean("product") - mean * level) / math.sqrt(variance) if variance > 1e-12 else 0.0

    def lead(self) -> tuple[float, float]:
        """How far the rollout is ahead of the policy on its way from the reference, and the correlation that shows it.

        In parts of that way: −1 with the reference's weights, 1 where it has gone twice as far. 0 where nothing has
        moved.
        """
        moved, difference, along = self["moved_square"], self["difference_square"], self["along"]
        return along / (moved or 1.0), along / (math.sqrt(moved * difference) or 1.0)

    def related(self, pair: str = "rollout") -> float | None:
        """The correlation between the log-probs of a pair; None where it is not known."""
        return None if self.alignment is None else correlation(by_pair(self.alignment)[pair])

    def share_of_reference(self) -> float | None:
        """The share of the responses whose log-probs are the reference's and not the policy's.

        0 if few of those with a gap are, and None if too few can be told.
        """
        stale, told = self["stale"], self["stale"] + self["fresh"]
        known = told + self["unclear"]
        if stale >= max(STALE_RESPONSES, STALE_SHARE * told) and told >= CLEAR_SHARE * known:
            return stale / told
        return 0.0 if known >= STALE_RESPONSES and stale < STALE_SHARE * known else None

    @property
    def far_share(self) -> float:
        """The share of the responses that are far."""
        return self["far"] / self["responses"]

    def two_kinds(self) -> tuple[float, float] | None:
        """The gap of the far responses and that of the others, where that is much smaller; None if it is not."""
        least, most = SPLIT_SHARES
        if self["far"] < STALE_RESPONSES or not least <= self.far_share <= most:
            return None
        far = self["far_gap"] / self["far_tokens"]
        near = (self["gap"] - self["far_gap"]) / max(self["tokens"] - self["far_tokens"], 1)
        return (far, near) if near <= SPLIT * far else None
