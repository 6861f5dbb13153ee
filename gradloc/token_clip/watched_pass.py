# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A training pass whose backward signals are watched."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .cut import is_over
from .positions import Positions

# The boundary after the last layer: a position's signal there is |∂L/∂log p| of its own token.
LOG_PROBS = "log_probs"


class Over(NamedTuple):
    """Where the signals at some boundaries, which have the same positions, are over their bounds.

    Args:
        boundaries (list[str]): In the order of the backward.
        first (Tensor): The index of the first of them at which a position is over its bound, -1 for none; int16.
        multiple (Tensor): The signal there as a multiple of the bound; same shape.
        cut (Tensor): Whether a position was cut at any of them, bool of the same shape.
    """

    boundaries: list[str]
    first: Tensor
    multiple: Tensor
    cut: Tensor


@dataclass
class WatchedPass:
    """A training pass, kept until the optimizer step.

    Args:
        positions (Positions): Where its tokens are.
        rows (list[int]): Its rows in its rank's mini-batch.
        recorded (bool): Whether its signals count.
        scaled (bool): Whether its loss is scaled. If so, a signal that is no finite number is left for the gradient
            scaler, which has to see an overflow to lower the scale.
        scaling (Tensor, optional): 1 / (a token's weight in the loss × loss scale) of each row, shape (rows,); None
            until it is known.
        tokens (Mapping): Values of its tokens, each of shape (rows, response length).
        signals (dict): By boundary, in the order of the backward, each position's signal divided by its token's weight
            in the loss; float32. Emptied after the pass.
        refused (dict): By boundary, whether too many were over the bound for any to be cut; shape ().
        over (list[Over]): What is kept of the signals after the pass.
    """

    positions: Positions
    rows: list[int]
    recorded: bool = True
    scaled: bool = False
    scaling: Tensor | None = None
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    signals: dict[str, Tensor] = field(default_factory=dict)
    refused: dict[str, Tensor] = field(default_factory=dict)
    over: list[Over] = field(default_factory=list)
    _scaling_of: dict[tuple[bool, torch.Size], Tensor | None] = field(default_factory=dict)

    def scaling_of(self, shape: torch.Size, at_log_probs: bool) -> Tensor | None:
        """`scaling` of each position; None for hidden states that are not the text's.

        The backward comes to the decoder layers before it comes to anything of another shape.
        """
        assert self.scaling is not None
        key = at_log_probs, shape
        if key not in self._scaling_of:
            known = any(found is not None for (of_log_probs, _), found in self._scaling_of.items() if not of_log_probs)
            rows = None if known and not at_log_probs else self.positions.rows_of(shape, whole=at_log_probs)
            self._scaling_of[key] = None if rows is None else self.scaling[rows]
        return self._scaling_of[key]

    def is_over(self, signal: Tensor, bound: Tensor) -> Tensor:
        """Where a signal is over its bound, bool."""
        return is_over(signal, bound, self.scaled)

    def forget(self) -> None:
        """Frees what only the pass itself needs."""
        self.signals = {}
        self._scaling_of = {}
        self.positions.forget()
