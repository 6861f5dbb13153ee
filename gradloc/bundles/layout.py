# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a bundle consists of.

A bundle is a folder: `manifest.json`, its checksum, and a safetensors file for each micro-batch. Nothing in it is
pickled, so opening one runs no code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..guarded import ForeseenError

# The names that the values of tokens have in a file begin with this.
TOKENS = "tokens."


class NotReplayableError(ForeseenError):
    """A micro-batch that a replay cannot compute; the message says why."""


@dataclass(frozen=True)
class Row:
    """One sample of a micro-batch without padding."""

    input_ids: Tensor  # the prompt and the response, int64 of shape (length,)
    position_ids: Tensor  # same shape
    response_length: int  # how many of them are the response, tool output included
    temperature: float  # what its logits are divided by

    @property
    def prompt_length(self) -> int:
        return len(self.input_ids) - self.response_length


@dataclass(frozen=True)
class SavedMicroBatch:
    """A micro-batch as a bundle has it."""

    rows: list[Row]
    tokens: dict[str, Tensor]  # as in `MicroBatch`: each of shape (rows, response length)
    # torch's random state before the training pass: the CPU's, and the device's or None.
    rng_state: tuple[Tensor, Tensor | None]


def tensor_file(rank: int, micro_batch: int) -> str:
    """The name of a micro-batch's file."""
    return f"rank{rank}-micro_batch{micro_batch}.safetensors"


def to_tensors(saved: SavedMicroBatch) -> dict[str, Tensor]:
    """The tensors of a micro-batch's file.

    Raises:
        NotReplayableError: A token outside of its row has a gradient.
    """
    lengths = torch.tensor([row.response_length for row in saved.rows])
    outside = torch.arange(saved.tokens["weight"].shape[1]) >= lengths.unsqueeze(1)
    for name in ("coefficient", "entropy_coefficient"):
        coefficient = saved.tokens[name]
        if (outside & coefficient.isfinite() & (coefficient != 0)).any():
            raise NotReplayableError("padding has a gradient, which a replay without padding would leave out")
    tensors = {
        "input_ids": torch.cat([row.input_ids for row in saved.rows]),
        "position_ids": torch.cat([row.position_ids for row in saved.rows]),
        "row_lengths": torch.tensor([len(row.input_ids) for row in saved.rows]),
        "response_lengths": lengths,
        "temperature": torch.tensor([row.temperature for row in saved.rows], dtype=torch.float64),
        "rng.cpu": saved.rng_state[0],
        **{TOKENS + name: values for name, values in saved.tokens.items()},
    }
    if saved.rng_state[1] is not None:
        tensors["rng.device"] = saved.rng_state[1]
    tensors[TOKENS + "token_id"] = saved.tokens["token_id"].long()
    # safetensors refuses tensors that share their memory, as on-policy old log-probs and log-probs do.
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
