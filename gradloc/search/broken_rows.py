# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Narrows a row whose forward or backward gives NaN or Inf down to the token that causes it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..measure.micro_batch import MicroBatchName
from .groups import Token, nonfinite_coefficients, nonfinite_log_probs, uncut


@dataclass
class BrokenRow:
    """A row that may give non-finite log-probs or gradients, and the range that contains its first bad token.

    A NaN can also appear at positions before the token that causes it, because attention multiplies it by the zeros of
    the causal mask. So prefixes of the row are computed. A prefix is broken (gives NaN or Inf) if and only if it
    contains the token that causes the NaN.

    Args:
        low (int), high (int): Indices into `positions`. The shortest broken prefix ends at one of low, ..., high.
            The index len(positions) means that no prefix is broken.
    """

    micro_batch: MicroBatchName
    row: int
    positions: list[int]  # the positions of its response tokens
    low: int
    high: int

    @classmethod
    def of(cls, micro_batch: MicroBatchName, row: int, mask: Tensor, bad: Tensor) -> "BrokenRow":
        """Makes one from masks of a row's response tokens and non-finite log-probs, shape (response length,) each."""
        positions = mask.nonzero().flatten().tolist()
        first = int(bad[mask].nonzero()[0])
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

    def record(self, index: int, is_broken: bool) -> None:
        """Records whether the prefix that ends at `positions[index]` is broken."""
        if is_broken:
            self.high = min(self.high, index)
        else:
            self.low = max(self.low, index + 1)


class BrokenRows:
    """The rows and tokens of the groups that give NaN or Inf.

    Attributes:
        tokens (list[Token]): Tokens with a non-finite coefficient, known without a measurement.
        rows (list[BrokenRow]): The rows to narrow down.
    """

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.rows: list[BrokenRow] = []

    @property
    def unsettled(self) -> list[BrokenRow]:
        return [row for row in self.rows if not row.settled]

    @property
    def culprits(self) -> list[Token]:
        """The tokens found."""
        return self.tokens + [(row.micro_batch, row.row, row.positions[row.low]) for row in self.rows if row.found]

    def look_into(self, name: MicroBatchName, tokens: Mapping[str, Tensor]) -> None:
        """Adds a micro-batch's rows with non-finite log-probs, and its tokens with non-finite coefficients."""
        mask, bad = tokens["response_mask"].bool(), nonfinite_log_probs(tokens)
        for row in bad.any(1).nonzero().flatten().tolist():
            self.rows.append(BrokenRow.of(name, row, mask[row], bad[row]))
        nonfinite = nonfinite_coefficients(tokens) & tokens["broken"]
        # Padding is named only if nothing else is wrong with the row: aggregations that multiply padding by zero keep
        # its NaN.
        named = nonfinite & (mask | ~(nonfinite & mask).any(1, keepdim=True)) & ~bad.any(1, keepdim=True)
        self.tokens += [(name, row, position) for row, position in named.nonzero().tolist()]

    def suspect(self, name: MicroBatchName, tokens: Mapping[str, Tensor]) -> None:
        """Adds all rows of a micro-batch: its gradient is broken although none of its tokens is."""
        mask = uncut(tokens)
        for row in mask.any(1).nonzero().flatten().tolist():
            positions = mask[row].nonzero().flatten().tolist()
            self.rows.append(BrokenRow(name, row, positions, 0, len(positions)))
