# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The result of a search: all that actions, evidence and bundles read of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..measure.micro_batch import AllFigures, MicroBatch, MicroBatchName, Token
from ..measure.passes import GroupName


class WithoutTokens(NamedTuple):
    """The gradient of a group with all coefficients zero: that of an auxiliary loss, if there is one."""

    group: GroupName
    whole: float  # the norm of its gradient with all tokens
    layer_norms: dict[str, float]  # by layer, the norm without any

    @property
    def norm(self) -> float:
        return math.hypot(*self.layer_norms.values())


class Alone(NamedTuple):
    """A token that was measured alone."""

    weight: float  # |w_t|
    norm: float  # the norm of its gradient in the loss, w_t included
    by_layer: Tensor  # ‖g_t‖ in each layer, float64; there are many tokens, and many layers

    @property
    def grad_norm(self) -> float:
        """‖g_t‖."""
        return self.norm / self.weight


@dataclass(frozen=True)
class Part:
    """A set of tokens of one group."""

    rank: int | None  # the rank of all its tokens; None if they are of several
    micro_batch: int  # the index of their micro-batches
    tokens: int  # how many they are
    threshold: float  # τ(S)
    norm: float | None = None  # the norm of their gradient; None if it was not measured
    rows: tuple[int, ...] = ()  # of a diffuse set, its rows in its rank's mini-batch
    largest: tuple[Token, ...] = ()  # of a diffuse set, the tokens of its group that were measured alone, largest first


@dataclass(frozen=True)
class Findings:
    """The result of a search, the same on every rank. The defaults are those without a search."""

    threshold: float  # τ
    until: str = "explained"  # `bisect_until`
    layers: Sequence[str] = ()  # the layers that norms are given for
    # The micro-batches of all ranks, with the norms measured in training and in the search.
    figures: AllFigures = field(default_factory=dict)
    micro_batches: Mapping[MicroBatchName, MicroBatch] = field(default_factory=dict)  # those sent to every rank
    groups: Sequence[GroupName] = ()  # the groups over their threshold
    culprits: Sequence[Token] = ()
    measured: Mapping[Token, Alone] = field(default_factory=dict)  # those measured alone, in the order of measurement
    rests: Mapping[GroupName, Part] = field(default_factory=dict)  # groups without their culprits, where measured
    diffuse: Sequence[Part] = ()  # the smallest sets with a spike but without a culprit
    # The sets that the search left open, best first; a group not yet searched is one of all its tokens.
    open: Sequence[Part] = ()
    without_tokens: WithoutTokens | None = None  # what a group's gradient is without any token; None if not measured
    more_over: int | None = None  # how many more tokens are estimated to be over τ; None if that is unknown
    diagnosis: str = "unsearched"  # what the search has shown; docs/reference/evidence.md gives the rules
    # Whether each micro-batch over its threshold was measured under it without the culprits; None if a rest could not
    # be measured (a row has non-finite log-probs) or was not (in an exhaustive search).
    explained: bool | None = False
    complete: bool = False  # whether the search ended by itself, and left nothing that it was to find
    passes: int = 0  # how many it took
    budget: int = 0  # how many passes it might have taken
    budget_seconds: float | None = None  # how long it might have taken
    out_of_time: bool = False  # whether that ended it
    error: str | None = None  # the error that ended it

    def row(self, token: Token) -> int:
        """A token's row in its rank's mini-batch."""
        return self.micro_batches[token[0]].rows[token[1]]

    def alone(self, token: Token) -> Alone:
        """A token measured alone; one that was not measured has NaN norms."""
        found = self.measured.get(token)
        return found or Alone(math.nan, math.nan, torch.full((len(self.layers),), math.nan, dtype=torch.float64))

    def layer_norms(self, token: Token) -> dict[str, float]:
        """‖g_t‖ by layer of a token measured alone."""
        return dict(zip(self.layers, self.alone(token).by_layer.tolist(), strict=True))

    def share(self, token: Token) -> float | None:
        """A token's share of its micro-batch's norm; None if that norm is zero or unknown."""
        norm = self.figures[token[0]].norm
        return self.alone(token).norm / norm if norm else None
