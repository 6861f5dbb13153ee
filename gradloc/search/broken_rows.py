# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Narrows a row whose forward or backward gives NaN or Inf down to the token that causes it."""

from dataclasses import dataclass

from torch import Tensor

from ..measure.micro_batch import MicroBatchName


@dataclass
class BrokenRow:
    """A row that may give non-finite log-probs or gradients, and the range that contains its first bad token.

    A NaN can also appear at positions before the token that causes it, because attention multiplies it by the zeros of
    the causal mask. So prefixes of the row are computed. A prefix is broken (gives NaN or Inf) if and only if it
    contains the token that causes the NaN.

    Args:
        micro_batch (MicroBatchName): The micro-batch.
        row (int): The row in the micro-batch.
        positions (list[int]): The positions of its response tokens.
        low (int), high (int): Indices into `positions`. The shortest broken prefix ends at one of low, ..., high.
            The index len(positions) means that no prefix is broken.
    """

    micro_batch: MicroBatchName
    row: int
    positions: list[int]
    low: int
    high: int

    @classmethod
    def of(cls, micro_batch: MicroBatchName, row: int, mask: Tensor, broken: Tensor) -> "BrokenRow":
        """Makes one from the masks of the row's response tokens and broken ones, each of shape (response length,)."""
        positions = mask.nonzero().flatten().tolist()
        first = int(broken[mask].nonzero()[0])
        # If the log-probs before it are finite, no NaN has reached earlier positions.
        return cls(micro_batch, row, positions, first, first if first else len(positions) - 1)

    @property
    def settled(self) -> bool:
        return self.low == self.high

    @property
    def found(self) -> bool:
        return self.settled and self.low < len(self.positions)

    def cuts(self, count: int) -> list[int]:
        """Up to `count` indices that split the range into parts of about equal length."""
        width = self.high - self.low
        return sorted({self.low + (i + 1) * width // (count + 1) for i in range(count)})

    def record(self, index: int, broken: bool) -> None:
        """Records whether the prefix that ends at `positions[index]` is broken."""
        if broken:
            self.high = min(self.high, index)
        else:
            self.low = max(self.low, index + 1)
