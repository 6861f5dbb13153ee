# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows whose forward or backward is not a number, narrowed down to the token that breaks them."""

from dataclasses import dataclass

from torch import Tensor

from ..measure.passes import UnitName


@dataclass
class BrokenRow:
    """A row that may give log-probs or gradients that are not numbers, and where it may begin to.

    A NaN may show before its place, too: attention multiplies it with the zeros of its causal mask. So the row is
    computed up to this or that token: with the input that breaks it, some are not numbers; without it, all are.

    Args:
        positions (list[int]): Its response tokens.
        low (int), high (int): Indices into `positions`: the first prefix that is broken ends between them, inclusive.
            One behind the last token means that none is.
    """

    unit: UnitName
    row: int
    positions: list[int]
    low: int
    high: int

    @classmethod
    def of(cls, unit: UnitName, row: int, mask: Tensor, broken: Tensor) -> "BrokenRow":
        """From a row's masks of response tokens and of broken ones among them, each of shape (response length,)."""
        positions = mask.nonzero().flatten().tolist()
        first = int(broken[mask].nonzero()[0])
        # Finite log-probs before it mean that nothing spreads backwards here.
        return cls(unit, row, positions, first, first if first else len(positions) - 1)

    @property
    def settled(self) -> bool:
        return self.low == self.high

    @property
    def found(self) -> bool:
        return self.settled and self.low < len(self.positions)

    def cuts(self, count: int) -> list[int]:
        """Up to `count` indices that cut the interval into even parts."""
        width = self.high - self.low
        return sorted({self.low + (i + 1) * width // (count + 1) for i in range(count)})

    def record(self, index: int, broken: bool) -> None:
        """Takes in whether the prefix that ends with a token is broken."""
        if broken:
            self.high = min(self.high, index)
        else:
            self.low = max(self.low, index + 1)
