# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Norms that are exact enough in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

# On the CPU a norm runs in one float32 accumulator, which costs 1e-3 of it at 28 million elements; in chunks of this
# size 2e-7. GPUs sum in blocks anyway.
_CPU_CHUNK = 2**16


def chunks(gradient: Tensor) -> Sequence[Tensor]:
    """The gradient in pieces whose float32 norms are exact enough; a GPU's is one piece."""
    return gradient.flatten().split(_CPU_CHUNK) if gradient.device.type == "cpu" else [gradient]


@torch.no_grad()
def piece_norms(gradient: Tensor) -> Tensor:
    """The norms of pieces that are short enough for float32, which make up the gradient: float32, one-dimensional."""
    whole = gradient.numel() // _CPU_CHUNK if gradient.device.type == "cpu" else 0
    if whole == 0:
        return torch.linalg.vector_norm(gradient, dtype=torch.float32).reshape(1)
    flat = gradient.flatten()
    rows, tail = flat[: whole * _CPU_CHUNK].view(whole, _CPU_CHUNK), flat[whole * _CPU_CHUNK :]
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return torch.cat([norms, torch.linalg.vector_norm(tail, dtype=torch.float32).reshape(1)]) if len(tail) else norms
