# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf in a mini-batch's gradient: where they are, and which token they come from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..measure.micro_batch import AllFigures, MicroBatchName, Token, TokenSubset
from ..measure.passes import GroupName
from .groups import Groups, nonfinite_coefficients, nonfinite_log_probs, uncut


@dataclass
class BrokenRow:
    """A row that may give non-finite log-probs or gradients, and the range that contains its first bad token.

    A NaN can also appear at positions before the token that causes it, because attention multiplies it by the zeros of
    the causal mask. So prefixes of the row are computed. A prefix is broken (gives NaN or Inf) if and only if it
    contains the token that causes the NaN.
    """

    micro_batch: MicroBatchName
    row: int
    positions: list[int]  # the positions of its response tokens
    # Indices into `positions`: the shortest broken prefix ends at one of low, ..., high. The index len(positions) means
    # that no prefix is broken.
    low: int
    high: int

    @property
    def settled(self) -> bool:
        return self.low == self.high

    def cuts(self, count: int) -> list[int]:
        """Up to `count` indices that split the range into parts of about equal length."""
        width = self.high - self.low
        return sorted({self.low + (i + 1) * width // (count + 1) for i in range(count)})


class BrokenGradients:
    """What of a mini-batch's gradient is NaN or Inf; the same on every rank."""

    def __init__(self, global_norm: float, figures: AllFigures, groups: Groups) -> None:
        self.tokens: list[Token] = []  # tokens with a non-finite coefficient, known without a measurement
        self.rows: list[BrokenRow] = []  # the rows to narrow down, of the groups that were looked into
        self.groups: list[GroupName] = []  # the groups whose gradient is non-finite even without any token
        self._of = groups
        self._figures = figures
        self._scale = groups.passes.scale
        self._global_norm = global_norm
        # The norms measured in training, each with its number of broken tokens: of micro-batches, or of all together.
        measured = [(each.norm, each.broken_tokens) for each in figures.values() if each.tokens]
        known = [(norm, tokens) for norm, tokens in measured if norm is not None]
        self._wholes = known or [(global_norm, sum(tokens for _, tokens in measured))]

    @property
    def are_everything(self) -> bool:
        """Whether no single token is the cause: all tokens are broken, or the gradient is broken without any token."""
        if self._is_empty_and_broken:
            return self._scale == 1
        return any(each.tokens for each in self._figures.values()) and all(
            each.broken_tokens == each.tokens for each in self._figures.values()
        )

    @property
    def may_be_overflow(self) -> bool:
        """Whether the loss scale may be the only problem: fp16 gradients overflowed without a broken token."""
        broken = any(not (math.isfinite(norm) or tokens) for norm, tokens in self._wholes)
        return self._scale != 1 and (broken or self._is_empty_and_broken)

    @property
    def _is_empty_and_broken(self) -> bool:
        return not (math.isfinite(self._global_norm) or any(each.tokens for each in self._figures.values()))

    @property
    def unsettled(self) -> list[BrokenRow]:
        return [row for row in self.rows if not row.settled]

    @property
    def culprits(self) -> list[Token]:
        """The tokens found."""
        found = [row for row in self.rows if row.settled and row.low < len(row.positions)]
        return self.tokens + [(row.micro_batch, row.row, row.positions[row.low]) for row in found]

    def tokens_of(self, group: GroupName) -> int:
        """How many broken tokens a group has."""
        return sum(self._figures[name].broken_tokens for name in self._of.members[group])

    def look_into(self, group: GroupName) -> None:
        """Adds the rows with non-finite log-probs, and the tokens with non-finite coefficients, of a group."""
        for name, tokens in self._of.tokens(group).items():
            mask, bad = tokens["response_mask"].bool(), nonfinite_log_probs(tokens)
            for row in bad.any(1).nonzero().flatten().tolist():
                positions = mask[row].nonzero().flatten().tolist()
                first = int(bad[row, positions].nonzero()[0])
                # If the log-probs before it are finite, no NaN has reached earlier positions.
                self.rows.append(BrokenRow(name, row, positions, first, first if first else len(positions) - 1))
            nonfinite = nonfinite_coefficients(tokens) & tokens["broken"]
            # Padding is named only if nothing else is wrong with the row: aggregations that multiply padding by zero
            # keep its NaN.
            named = nonfinite & (mask | ~(nonfinite & mask).any(1, keepdim=True)) & ~bad.any(1, keepdim=True)
            self.tokens += [(name, row, position) for row, position in named.nonzero().tolist()]

    def add_group(self, group: GroupName) -> None:
        """Adds a group and queues its rows for `narrow`: its gradient is broken although none of its tokens is."""
        if group in self.groups:
            return
        self.groups.append(group)
        for name, tokens in self._of.tokens(group).items():
            mask = uncut(tokens)
            for row in mask.any(1).nonzero().flatten().tolist():
                positions = mask[row].nonzero().flatten().tolist()
                self.rows.append(BrokenRow(name, row, positions, 0, len(positions)))

    def narrow(self) -> None:
        """Runs one pass that narrows down the first bad token in some unsettled rows. A collective call."""
        width = self._of.meter.width
        rows = self.unsettled[:width]
        cuts = [(row, index) for row in rows for index in row.cuts(width // len(rows))]
        squares = self._of.measure([partial(self._prefix, row, index) for row, index in cuts])
        for (row, index), broken in zip(cuts, ~squares.sum(1).isfinite(), strict=True):
            if broken:
                row.high = min(row.high, index)
            else:
                row.low = max(row.low, index + 1)

    def _prefix(self, row: BrokenRow, index: int) -> dict[int, TokenSubset]:
        keep = torch.zeros_like(self._of.micro_batches[row.micro_batch].tokens["response_mask"], dtype=torch.bool)
        keep[row.row, row.positions[index]] = True  # a pass ends at the last token that it keeps
        return self._of.part(row.micro_batch, keep)

    def are_without_tokens(self, waiting: Sequence[GroupName]) -> bool:
        """Whether the gradients are broken even without any token, if all gradients are broken but no token is.

        One pass with one group per probe is enough to find out, instead of a search of all groups. A collective call.
        """
        begun = [group for group in waiting if any(self._figures[name].tokens for name in self._of.members[group])]
        sample = begun[: self._of.meter.width]
        if not sample or self._scale != 1 or any(math.isfinite(norm) or broken for norm, broken in self._wholes):
            return False
        for group in sample:
            self._of.obtain(group)
        squares = self._of.measure([partial(self._of.subsets, group) for group in sample])
        broken = not squares.sum(1).isfinite().any()
        self.groups += sample if broken else []
        return broken
