# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What was measured of micro-batches and of a whole mini-batch, and when a micro-batch is over its threshold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..threshold import is_over
from .micro_batch import MicroBatchName


@dataclass(frozen=True)
class MicroBatchFigures:
    """What all ranks know about one rank's micro-batch when a search starts."""

    rows: int
    tokens: int  # the number of response tokens
    broken_tokens: int  # the number of response tokens with a non-finite log-prob or coefficient
    root_square_weight: float  # sqrt(Σ w_t²) over the tokens that can move, or over all if none can
    norm: float | None = None  # the norm of its gradient; None while it has not been measured
    layer_norms: Mapping[str, float] = field(default_factory=dict)  # the norm in each layer
    # The number of response tokens with a weight in the loss and finite log-probs and coefficients.
    usable_tokens: int = 0
    # Whether an advantage is not zero, or none is known. Otherwise only KL and entropy terms have a gradient, which is
    # not an ordinary one.
    has_advantages: bool = True

    @property
    def token_equivalent(self) -> float:
        """Its norm/sqrt(Σ w_t²), infinite while its norm is unknown; see `token_equivalents`."""
        if self.norm is None:
            return math.inf
        return token_equivalent(self.norm, self.root_square_weight)

    def is_over(self, threshold: float) -> bool:
        """Whether its norm is known and over its threshold for this τ."""
        return self.norm is not None and is_over(self.token_equivalent, threshold)


def token_equivalents(norms: Tensor, root_square_weights: Tensor) -> Tensor:
    """norm/sqrt(Σ w_t²) of micro-batches, which is compared with τ. No host sync.

    Args:
        norms (Tensor): The norms of their gradients, float64.
        root_square_weights (Tensor): sqrt(Σ w_t²) over the tokens that their thresholds count, same shape.

    Returns:
        Tensor: Same shape. A norm that is not finite counts as infinite, and one of a micro-batch without tokens as 0.
    """
    ratio = torch.where(root_square_weights == 0, 0.0, norms / root_square_weights)
    return torch.where(norms.isfinite(), ratio.nan_to_num(nan=math.inf, posinf=math.inf), math.inf)


def token_equivalent(norm: float, root_square_weight: float) -> float:
    """`token_equivalents` of one."""
    return float(token_equivalents(*torch.tensor([norm, root_square_weight], dtype=torch.float64)))


# Of the micro-batches of all ranks.
AllFigures = Mapping[MicroBatchName, MicroBatchFigures]


def suspects(figures: AllFigures, threshold: float) -> list[MicroBatchName]:
    """The micro-batches measured over their threshold, largest first."""
    over = [name for name, each in figures.items() if each.is_over(threshold)]
    return sorted(over, key=lambda name: (-figures[name].token_equivalent, name))
