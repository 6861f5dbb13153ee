# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The groups that a search looks into: their candidates, what probes measure of them, and what of it is NaN or Inf."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..measure.micro_batch import AllFigures, MicroBatch, MicroBatchName, Token, TokenSubset, movable, suspects
from ..measure.mini_batch import MiniBatch
from ..measure.passes import GroupName, MakeProbe, Passes
from .search import MOST_GROUPS


class Groups:
    """The groups over their threshold, the same on all ranks, and the passes that measure them."""

    def __init__(self, mini_batch: MiniBatch, figures: AllFigures, threshold: float) -> None:
        self.meter = mini_batch.model.meter
        self.passes = Passes(mini_batch.model, mini_batch.micro_batches, mini_batch.scale)
        # Their micro-batches. The first is the largest, if the norms are known; else each is first measured as a whole.
        self.members: dict[GroupName, list[MicroBatchName]] = {}
        for rank, index in figures if self.meter.reduces else suspects(figures, threshold):
            group = (None if self.meter.reduces else rank, index)
            self.members.setdefault(group, []).append((rank, index))
        self.micro_batches: dict[MicroBatchName, MicroBatch] = {}
        # The tokens that can be culprits, (rank, row, position) each, int32 of shape (n, 3).
        self.candidates: dict[GroupName, Tensor] = {}
        self._mini_batch = mini_batch

    def obtain(self, group: GroupName) -> None:
        """Sends the tokens of a group, and the data needed to measure them, to every rank. A collective call."""
        names, mini_batch = self.members[group], self._mini_batch
        if any(name not in self.micro_batches for name in names):
            self.micro_batches |= self.meter.obtain(names, mini_batch.micro_batches, mini_batch.scale)

    def measure(self, probes: Sequence[MakeProbe]) -> Tensor:
        """The squared norms of each probe by layer (see `LocalMeter.measure`), in one pass. A collective call."""
        return self.meter.measure(self.passes, probes)

    def tokens(self, group: GroupName) -> dict[MicroBatchName, Mapping[str, Tensor]]:
        """The tokens of its micro-batches, which were obtained."""
        return {name: self.micro_batches[name].tokens for name in self.members[group]}

    def list_candidates(self, group: GroupName) -> tuple[Tensor, Tensor]:
        """Finds the candidates of a group that was obtained: their s_t and w_t, shape (n,) each."""
        candidates, suspicion, weights = [], [], []
        for name, tokens in self.tokens(group).items():
            involved = _involved(tokens)
            places = involved.nonzero()
            candidates.append(torch.cat([torch.full((len(places), 1), name[0]), places], 1))
            suspicion.append(tokens["suspicion"][involved])
            weights.append(tokens["weight"][involved])
        self.candidates[group] = torch.cat(candidates).int()
        return torch.cat(suspicion), torch.cat(weights)

    def tokens_of(self, group: GroupName, *candidates: int) -> list[Token]:
        """Some candidates of a group, by their index."""
        places = self.candidates[group][list(candidates)].tolist()
        return [((rank, group[1]), row, position) for rank, row, position in places]

    def subsets(
        self, group: GroupName, candidates: Tensor | None = None, factors: Tensor | None = None
    ) -> dict[int, TokenSubset]:
        """The tokens that each rank measures for some candidates, with a factor for each one's gradient (default: 1).

        Without candidates, these are the micro-batches of the group with no token.
        """
        # Without any, they may not have been listed yet.
        none = torch.zeros((0, 3), dtype=torch.int64)
        places = none if candidates is None else self.candidates[group][candidates].long()
        values = torch.ones(len(places), dtype=torch.bool) if factors is None else factors
        found: dict[int, TokenSubset] = {}
        for name in self.members[group]:
            mine = places[:, 0] == name[0]
            if mine.any() or not len(places):
                keep = torch.zeros(self.micro_batches[name].tokens["response_mask"].shape, dtype=values.dtype)
                keep[places[mine, 1], places[mine, 2]] = values[mine]
                found |= self.part(name, keep)
        return found

    def part(self, name: MicroBatchName, keep: Tensor) -> dict[int, TokenSubset]:
        """Tokens of one micro-batch, bool of shape (rows, response length)."""
        return {name[0]: TokenSubset(self.micro_batches[name], keep)}


def uncut(tokens: Mapping[str, Tensor]) -> Tensor:
    """The response tokens that TokenClip has not cut, bool of shape (rows, response length)."""
    return tokens["response_mask"].bool() & ~_was_cut(tokens)


def nonfinite_log_probs(tokens: Mapping[str, Tensor]) -> Tensor:
    """The response tokens with a non-finite log-prob, bool of shape (rows, response length)."""
    return ~tokens["log_prob"].isfinite() & tokens["response_mask"].bool()


def nonfinite_coefficients(tokens: Mapping[str, Tensor]) -> Tensor:
    """The tokens with a non-finite coefficient, bool of shape (rows, response length)."""
    return ~(tokens["coefficient"].isfinite() & tokens["entropy_coefficient"].isfinite())


def _involved(tokens: Mapping[str, Tensor]) -> Tensor:
    """The tokens that can move and can be measured, bool of shape (rows, response length)."""
    measurable = ~nonfinite_coefficients(tokens) & ~nonfinite_log_probs(tokens).any(1, keepdim=True)
    return movable(tokens) & measurable & ~_was_cut(tokens)


def _was_cut(tokens: Mapping[str, Tensor]) -> Tensor:
    """The tokens that TokenClip has cut, bool: probes are not cut, so their norms would not be training's."""
    return tokens["cut"].bool() if "cut" in tokens else torch.zeros_like(tokens["weight"], dtype=torch.bool)


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
    """The parts of a mini-batch's gradient that are NaN or Inf; the same on every rank."""

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
        sample = begun[: min(self._of.meter.width, MOST_GROUPS)]
        if not sample or self._scale != 1 or any(math.isfinite(norm) or broken for norm, broken in self._wholes):
            return False
        for group in sample:
            self._of.obtain(group)
        squares = self._of.measure([partial(self._of.subsets, group) for group in sample])
        broken = not squares.sum(1).isfinite().any()
        self.groups += sample if broken else []
        return broken
