# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a search needs of a micro-batch's tokens, without padding, as it is sent to other ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .micro_batch import MicroBatch

# What a search and a drill read of another rank's tokens. The evidence of culprits comes from the rank that has them.
_NEEDED = ("response_mask", "weight", "log_prob", "coefficient", "entropy_coefficient", "broken", "suspicion", "cut")

# Where one of these is not zero, a position is kept; padding in which a loss leaves a coefficient or NaN, too.
_KEPT = ("response_mask", "weight", "coefficient", "entropy_coefficient", "broken")


@dataclass(frozen=True)
class Unpadded:
    """What a search needs of the tokens of a micro-batch that `MicroBatch.portable` returned, without its inputs.

    Args:
        rows (list[int]), rng_state (tuple): As in `MicroBatch`.
        shape (tuple[int, int]): Rows and response length.
        places (Tensor): The positions that are sent, flat, int32 of shape (n,).
        columns (dict[str, Tensor]): Their values, each of shape (n,).
    """

    rows: list[int]
    rng_state: tuple[Tensor, Tensor | None]
    shape: tuple[int, ...]
    places: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> "Unpadded":
        tokens = micro_batch.tokens
        kept = torch.stack([tokens[name] != 0 for name in _KEPT]).any(0).flatten()
        columns = {name: tokens[name].flatten()[kept] for name in _NEEDED if name in tokens}
        shape = tuple(tokens["response_mask"].shape)
        return cls(micro_batch.rows, micro_batch.rng_state, shape, kept.nonzero().flatten().int(), columns)

    def padded(self) -> MicroBatch:
        """The micro-batch, with zeros for what was not sent."""
        tokens = {}
        for name, column in self.columns.items():
            whole = torch.zeros(self.shape, dtype=column.dtype)
            whole.view(-1)[self.places.long()] = column
            tokens[name] = whole
        return MicroBatch({}, self.rows, self.rng_state, tokens)
