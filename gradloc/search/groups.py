# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The groups that a search looks into: their micro-batches, their candidates, and what probes measure of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..measure.micro_batch import AllFigures, MicroBatch, MicroBatchName, Token, TokenSubset, movable, suspects
from ..measure.mini_batch import MiniBatch
from ..measure.passes import GroupName, MakeProbe, Passes


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
        # The tokens that can be culprits, (rank, row, position) each, int64 of shape (n, 3).
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
        self.candidates[group] = torch.cat(candidates)
        return torch.cat(suspicion), torch.cat(weights)

    def tokens_of(self, group: GroupName, *candidates: int) -> list[Token]:
        """Some candidates of a group, by their index."""
        places = self.candidates[group][list(candidates)].tolist()
        return [((rank, group[1]), row, position) for rank, row, position in places]

    def subsets(
        self, group: GroupName, candidates: Sequence[int] = (), factors: Sequence[float] | None = None
    ) -> dict[int, TokenSubset]:
        """What the ranks compute for some candidates, each with a factor for its gradient (1 by default).

        Without any, it is the whole micro-batches of the group, without any token.
        """
        places = self.candidates[group][list(candidates)] if candidates else torch.zeros((0, 3), dtype=torch.int64)
        values = torch.ones(len(candidates), dtype=torch.bool) if factors is None else torch.tensor(factors)
        found: dict[int, TokenSubset] = {}
        for name in self.members[group]:
            mine = places[:, 0] == name[0]
            if mine.any() or not candidates:
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
    """Where TokenClip has cut a hidden state, bool. A probe is not cut: it would measure what training did not have."""
    return tokens["cut"].bool() if "cut" in tokens else torch.zeros_like(tokens["weight"], dtype=torch.bool)
