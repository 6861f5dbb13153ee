# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which token of a micro-batch each position of its hidden states belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """The sequences of a micro-batch, and how its hidden states hold them: padded, or with the padding removed.

    Args:
        mask (Tensor): Where the padded sequences have a token, bool of shape (rows, length).
        response_starts (Sequence[int]): The column in `mask` of each response's first token.
        part (int): With Ulysses sequence parallelism, this rank's index in its group: which part of the positions it
            has.
        parts (int): The size of that group.
    """

    mask: Tensor
    response_starts: Sequence[int]
    part: int = 0
    parts: int = 1

    def select(self, rows: Sequence[int], response_length: int) -> "Positions":
        """The positions of a forward of some rows, with responses truncated to that length."""
        starts = [self.response_starts[row] for row in rows]
        ends = torch.tensor(starts, device=self.mask.device).unsqueeze(1) + response_length
        columns = torch.arange(self.mask.shape[1], device=self.mask.device)
        return replace(self, mask=self.mask[list(rows)] & (columns < ends), response_starts=starts)

    def rows_of(self, shape: Sequence[int], whole: bool = False) -> Tensor | None:
        """The row that each position belongs to, broadcastable to that shape; no host sync.

        Args:
            shape (Sequence[int]): Of hidden states without the hidden size, or of log-probs: (rows, any length) if they
                are padded; (1, positions), or (positions,) for log-probs, if the padding is removed. More positions may
                follow, of no token.
            whole (bool): Whether these are the positions of the whole group, not this rank's part.

        Returns:
            Tensor | None: int64; None if the shape is not that of these sequences.
        """
        if self._padded(shape, whole):
            return torch.arange(shape[0], device=self.mask.device).unsqueeze(1)
        cells = self._cells(shape, whole)
        return None if cells is None else (cells // self.mask.shape[1]).view(*shape)

    def tokens_of(self, shape: Sequence[int], whole: bool = False) -> tuple[Tensor, Tensor]:
        """The token that each position predicts: its row, and its index in the response (negative in the prompt).

        Args:
            shape (Sequence[int]): One that `rows_of` knows; log-probs of padded responses are (rows, response length).
            whole (bool): As there; true for log-probs.

        Returns:
            tuple[Tensor, Tensor]: Flat, on the device; no host sync.
        """
        device = self.mask.device
        starts = torch.tensor(self.response_starts).to(device, non_blocking=True)
        if self._padded(shape, whole):
            sides = (torch.arange(size, device=device) for size in shape)
            rows, columns = torch.meshgrid(*sides, indexing="ij")
            rows, columns = rows.flatten(), columns.flatten()
            if whole:
                return rows, columns
        else:
            cells = self._cells(shape, whole)
            assert cells is not None
            rows, columns = cells // self.mask.shape[1], cells % self.mask.shape[1]
        return rows, columns + 1 - starts[rows]

    def _padded(self, shape: Sequence[int], whole: bool) -> bool:
        rows, length = self.mask.shape
        # A single row without its padding is shorter than with it.
        return len(shape) == 2 and shape[0] == rows and (rows > 1 or whole or shape[1] >= length)

    def _cells(self, shape: Sequence[int], whole: bool) -> Tensor | None:
        """The flat index in `mask` of each position without padding; positions of no token get any."""
        count = shape[-1]
        part = 0 if whole else self.part
        if tuple(shape[:-1]) not in ((1,), ()) or (len(shape) == 1 and not whole):
            return None
        # Each rank's part is as long as the others'.
        cells = self._packed[part * count : (part + 1) * count]
        return torch.nn.functional.pad(cells, (0, count - len(cells)))

    def forget(self) -> None:
        """Frees what can be computed again."""
        self.__dict__.pop("_packed", None)

    @cached_property
    def _packed(self) -> Tensor:
        """The flat indices in `mask`, those with a token first, in order."""
        return torch.argsort((~self.mask).flatten().to(torch.int8), stable=True)
