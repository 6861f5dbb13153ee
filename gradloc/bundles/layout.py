# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a bundle consists of.

A bundle is a folder: `manifest.json`, its checksum, and a safetensors file for each micro-batch. Nothing in it is
pickled, so opening one runs no code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..guarded import ForeseenError

# The names that the values of tokens have in a file begin with this.
_TOKENS = "tokens."

# Values of tokens that are not float32.
_TOKEN_DTYPES = {"token_id": torch.int64, "broken": torch.bool}
_NEEDED_TOKENS = {"token_id", "response_mask", "log_prob", "weight", "coefficient", "entropy_coefficient"}
_RNG = {"rng.cpu", "rng.device"}


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

    def cut(self, response_length: int) -> "Row":
        """The same with a response of at most this length; with at least one token, which a model needs."""
        response_length = min(self.response_length, response_length)
        length = self.prompt_length + response_length
        if not length:
            return Row(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, self.temperature)
        return Row(self.input_ids[:length], self.position_ids[:length], response_length, self.temperature)


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
        **{_TOKENS + name: values for name, values in saved.tokens.items()},
    }
    if saved.rng_state[1] is not None:
        tensors["rng.device"] = saved.rng_state[1]
    tensors[_TOKENS + "token_id"] = saved.tokens["token_id"].long()
    # safetensors refuses tensors that share their memory, as on-policy old log-probs and log-probs do.
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def from_tensors(tensors: Mapping[str, Tensor], rows: int) -> SavedMicroBatch:
    """The reverse of `to_tensors`, for tensors that may be wrong in any way.

    Raises:
        ValueError: Names, shapes, dtypes or values do not fit together; the message says which.
    """
    flat = _checked(tensors, "input_ids", torch.int64, None)
    length = len(flat)
    positions = _checked(tensors, "position_ids", torch.int64, (length,))
    row_lengths = _checked(tensors, "row_lengths", torch.int64, (rows,)).tolist()
    response_lengths = _checked(tensors, "response_lengths", torch.int64, (rows,)).tolist()
    temperature = _checked(tensors, "temperature", torch.float64, (rows,)).tolist()
    if length and (int(flat.min()) < 0 or int(positions.min()) < 0):
        raise ValueError("input_ids and position_ids must not be negative")
    if not all(0 < value < float("inf") for value in temperature):
        raise ValueError("temperature must be positive and finite")
    if any(n < 0 for n in row_lengths) or sum(row_lengths) != length:
        raise ValueError("row_lengths do not add up to the length of input_ids")
    names = {name.removeprefix(_TOKENS) for name in tensors if name.startswith(_TOKENS)}
    if missing := _NEEDED_TOKENS - names:
        raise ValueError(f"{_TOKENS}{min(missing)} is missing")
    known = {"input_ids", "position_ids", "row_lengths", "response_lengths", "temperature"} | _RNG
    if unknown := set(tensors) - known - {_TOKENS + name for name in names}:
        raise ValueError(f"{min(unknown)!r} is not a tensor of a bundle")
    width = tensors[_TOKENS + "weight"].shape[-1] if tensors[_TOKENS + "weight"].dim() else 0
    if not all(0 <= n <= min(width, whole) for n, whole in zip(response_lengths, row_lengths, strict=True)):
        raise ValueError("response_lengths do not fit into the rows")
    tokens = {
        name: _checked(tensors, _TOKENS + name, _TOKEN_DTYPES.get(name, torch.float32), (rows, width)) for name in names
    }
    rng = [
        _checked(tensors, name, torch.uint8, None) if name in tensors else None for name in ("rng.cpu", "rng.device")
    ]
    if rng[0] is None:
        raise ValueError("rng.cpu is missing")
    parts = zip(flat.split(row_lengths), positions.split(row_lengths), response_lengths, temperature, strict=True)
    return SavedMicroBatch([Row(*part) for part in parts], tokens, (rng[0], rng[1]))


def _checked(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...] | None) -> Tensor:
    """A tensor of this dtype and shape; without a shape, of one dimension."""
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    tensor = tensors[name]
    fits = tensor.dim() == 1 if shape is None else tuple(tensor.shape) == shape
    if tensor.dtype != dtype or not fits:
        wanted = "one dimension" if shape is None else f"shape {shape}"
        raise ValueError(f"{name} must be {dtype} of {wanted}, and is {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor
