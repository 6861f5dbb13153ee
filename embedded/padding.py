# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Flash attention's padding functions in plain torch, for verl 0.8 and 0.9.0: their workers take the padding out of
every batch, and have no functions of their own for a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from verl.utils import attention_utils


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    return values[indices]


def unpad_input(values: Tensor, mask: Tensor) -> tuple[Any, ...]:
    """The values of shape (rows, columns, ...) where the mask is not 0, and where they were."""
    lengths = mask.sum(1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return values.flatten(0, 1)[indices], indices, starts, int(lengths.max()), lengths


def pad_input(values: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `unpad_input`."""
    padded = values.new_zeros(rows * columns, *values.shape[1:])
    padded[indices] = values
    return padded.unflatten(0, (rows, columns))


def rearrange(*_arguments: Any, **_lengths: int) -> Any:
    raise NotImplementedError("verl's engines do not call it")


def _functions() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    return index_first_axis, pad_input, rearrange, unpad_input


try:
    attention_utils._get_attention_functions()
except ImportError:
    attention_utils._get_attention_functions = _functions
