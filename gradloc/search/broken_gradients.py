# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf in a mini-batch's gradient: where they are, and which token they come from."""

import math
from collections.abc import Sequence
from functools import partial

from ..measure.figures import AllFigures
from ..measure.passes import Passes
from ..measure.probes import GroupName, Meter
from .broken_rows import BrokenRow, BrokenRows
from .groups import Groups


class BrokenGradients:
    """What of a mini-batch's gradient is NaN or Inf; the same on every rank.

    Attributes:
        rows (BrokenRows): The rows and tokens of the groups that were looked into.
        groups (list[GroupName]): The groups whose gradient is non-finite even without any token.
    """

    def __init__(self, meter: Meter, scale: float, global_norm: float, figures: AllFigures, groups: Groups) -> None:
        self.rows = BrokenRows()
        self.groups: list[GroupName] = []
        self._of = groups
        self._figures = figures
        self._meter = meter
        self._scale = scale
        self._global_norm = global_norm

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
        wholes = self._meter.wholes(self._figures, self._global_norm)
        broken = any(not (math.isfinite(norm) or tokens) for norm, tokens in wholes)
        return self._scale != 1 and (broken or self._is_empty_and_broken)

    @property
    def _is_empty_and_broken(self) -> bool:
        return not (math.isfinite(self._global_norm) or any(each.tokens for each in self._figures.values()))

    def tokens_of(self, group: GroupName) -> int:
        """How many broken tokens a group has."""
        return sum(self._figures[name].broken_tokens for name in self._of.members[group])

    def look_into(self, group: GroupName) -> None:
        """Adds the rows with non-finite log-probs, and the tokens with non-finite coefficients, of a group."""
        for name, tokens in zip(self._of.members[group], self._of.tokens(group), strict=True):
            self.rows.look_into(name, tokens)

    def suspect_rows(self, group: GroupName) -> None:
        """Queues all rows of a group for `narrow`: its gradient is broken although none of its tokens is."""
        for name, tokens in zip(self._of.members[group], self._of.tokens(group), strict=True):
            self.rows.suspect(name, tokens)

    def narrow(self, rows: Sequence[BrokenRow], passes: Passes) -> None:
        """Runs one pass that narrows down the first bad token in some rows. A collective call."""
        cuts = [(row, index) for row in rows for index in row.cuts(self._meter.width // len(rows))]
        probes = [partial(self._of.subsets, [(row.micro_batch, row.row, row.positions[i])]) for row, i in cuts]
        squares = self._meter.measure(passes, probes)
        for (row, index), broken in zip(cuts, ~squares.sum(1).isfinite(), strict=True):
            row.record(index, bool(broken))

    def are_without_tokens(self, waiting: Sequence[GroupName], passes: Passes) -> bool:
        """Whether the gradients are broken even without any token, if all gradients are broken but no token is.

        One pass with one group per probe is enough to find out, instead of a search of all groups. A collective call.
        """
        wholes = self._meter.wholes(self._figures, self._global_norm)
        if not wholes or self._scale != 1 or any(math.isfinite(norm) or broken for norm, broken in wholes):
            return False
        begun = [group for group in waiting if any(self._figures[name].tokens for name in self._of.members[group])]
        sample = begun[: self._meter.width]
        if not sample:
            return False
        for group in sample:
            self._of.obtain(group)
        probes = [partial(self._of.empty_subsets, group) for group in sample]
        broken = not self._meter.measure(passes, probes).sum(1).isfinite().any()
        self.groups += sample if broken else []
        return bool(broken)
