# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The groups that a search looks into: their micro-batches, their candidates, and what probes measure of them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..measure.figures import AllFigures
from ..measure.micro_batch import MicroBatch, MicroBatchName, TokenSubset
from ..measure.mini_batch import MiniBatch
from ..measure.probes import GroupName
from ..measure.token_weights import movable
from .codes import Probe

# (micro-batch, row in it, position in the response).
Token = tuple[MicroBatchName, int, int]


class GroupTokens(NamedTuple):
    """What `Search.add_group` needs of a group's candidates."""

    suspicion: Tensor  # s_t, shape (n,)
    weights: Tensor  # w_t, same shape
    healthy: bool  # whether all its log-probs are finite
    all_measurable: bool  # whether all its coefficients are finite


class Groups:
    """The groups over their threshold, the same on all ranks.

    Attributes:
        candidates (dict[GroupName, Tensor]): The tokens that can be culprits, (rank, row, position) each, int64 of
            shape (n, 3).
    """

    def __init__(self, mini_batch: MiniBatch, figures: AllFigures, threshold: float) -> None:
        self.members = mini_batch.model.meter.groups(figures, threshold)
        self.micro_batches: dict[MicroBatchName, MicroBatch] = {}
        self.candidates: dict[GroupName, Tensor] = {}
        self._mini_batch = mini_batch

    def obtain(self, group: GroupName) -> None:
        """Sends the tokens of a group, and the data needed to measure them, to every rank. A collective call."""
        names, mini_batch = self.members[group], self._mini_batch
        if any(name not in self.micro_batches for name in names):
            self.micro_batches |= mini_batch.model.meter.obtain(names, mini_batch.micro_batches, mini_batch.scale)

    def tokens(self, group: GroupName) -> list[Mapping[str, Tensor]]:
        """The tokens of each of its micro-batches, which were obtained."""
        return [self.micro_batches[name].tokens for name in self.members[group]]

    def suspicion(self, group: GroupName) -> float:
        """The energy (squared norm) that suspicion predicts for a group."""
        energies = [t["suspicion"][_involved(t)].double().square().tolist() for t in self.tokens(group)]
        return math.fsum(energy for of_one in energies for energy in of_one)

    def list_candidates(self, group: GroupName) -> GroupTokens:
        """Finds the candidates of a group that was obtained."""
        candidates, suspicion, weights = [], [], []
        for name, tokens in zip(self.members[group], self.tokens(group), strict=True):
            involved = _involved(tokens)
            places = involved.nonzero()
            candidates.append(torch.cat([torch.full((len(places), 1), name[0]), places], 1))
            suspicion.append(tokens["suspicion"][involved])
            weights.append(tokens["weight"][involved])
        self.candidates[group] = torch.cat(candidates)
        return GroupTokens(
            torch.cat(suspicion),
            torch.cat(weights),
            healthy=not any(nonfinite_log_probs(tokens).any() for tokens in self.tokens(group)),
            all_measurable=not any(nonfinite_coefficients(tokens).any() for tokens in self.tokens(group)),
        )

    def tokens_of(self, probe: Probe) -> list[Token]:
        """The tokens that a probe measures."""
        places = self.candidates[probe.group][list(probe.candidates)].tolist()
        return [((rank, probe.group[1]), row, position) for rank, row, position in places]

    def subsets(self, tokens: Sequence[Token], factors: Sequence[float] | None = None) -> dict[int, TokenSubset]:
        """Tokens of one group by the rank that owns them, each with a factor for its gradient (1 by default)."""
        places: dict[MicroBatchName, list[tuple[int, int, float]]] = {}
        for (name, row, position), factor in zip(tokens, factors or [1.0] * len(tokens), strict=True):
            places.setdefault(name, []).append((row, position, factor))
        subsets = {}
        for name, found in places.items():
            rows, positions, values = zip(*found, strict=True)
            keep = torch.zeros_like(self.micro_batches[name].tokens["response_mask"], dtype=torch.float32)
            keep[list(rows), list(positions)] = torch.tensor(values)
            subsets[name[0]] = TokenSubset(self.micro_batches[name], keep.bool() if factors is None else keep)
        return subsets

    def subsets_of(self, probe: Probe) -> dict[int, TokenSubset]:
        """What the ranks compute for a probe."""
        if not probe.candidates:
            return self.empty_subsets(probe.group)
        return self.subsets(self.tokens_of(probe), probe.factors)

    def empty_subsets(self, group: GroupName) -> dict[int, TokenSubset]:
        """The whole micro-batches of a group, without any token."""
        found = {name: self.micro_batches[name] for name in self.members[group]}
        return {
            name[0]: TokenSubset(micro_batch, torch.zeros_like(micro_batch.tokens["response_mask"], dtype=torch.bool))
            for name, micro_batch in found.items()
        }

    def whole(self, name: MicroBatchName) -> dict[int, TokenSubset]:
        """All response tokens of a micro-batch that training has not cut."""
        micro_batch = self.micro_batches[name]
        return {name[0]: TokenSubset(micro_batch, uncut(micro_batch.tokens))}


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
