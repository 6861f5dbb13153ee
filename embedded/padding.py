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


def _not_called(*_arguments: Any, **_options: Any) -> Any:
    raise NotImplementedError("verl's engines call index_first_axis and unpad_input only")


def _functions() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    return index_first_axis, _not_called, _not_called, unpad_input


try:
    attention_utils._get_attention_functions()
except ImportError:
    attention_utils._get_attention_functions = _functions
