# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The weight of each token in a loss."""

from collections.abc import Callable

import torch
from torch import Tensor


def token_weights(aggregate: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Computes the weight that a loss aggregation gives to each token with autograd: w = ∂ aggregate(x) / ∂x.

    Args:
        aggregate (Callable): Maps per-token losses to the scalar loss; linear in them.
        like (Tensor): A tensor with the shape and device of the per-token losses.

    Returns:
        Tensor: The weights, of the same shape; at least float32.
    """
    with torch.enable_grad():
        # Log-probs may be in half precision, but the loss multiplies them by advantages in float32.
        dtype = torch.promote_types(like.dtype, torch.float32)
        x = torch.zeros_like(like, dtype=dtype, requires_grad=True)
        return torch.autograd.grad(aggregate(x), x)[0]
