# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The weight of each token in a loss, and the tokens that a threshold counts."""

from collections.abc import Callable, Mapping

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


def movable(tokens: Mapping[str, Tensor]) -> Tensor:
    """The tokens that can move: those with a weight, and a coefficient that is not zero; NaN is not zero.

    A token that has an advantage of zero, or that PPO clips, has no gradient. If it counted, it would raise the
    threshold of every set that it is in.

    Args:
        tokens (Mapping[str, Tensor]): A micro-batch's `weight`, and as far as they are known its `coefficient` and
            `entropy_coefficient`, each of shape (rows, response length).
    """
    moves = torch.zeros_like(tokens["weight"], dtype=torch.bool)
    for name in ("coefficient", "entropy_coefficient"):
        if name in tokens:
            moves |= tokens[name] != 0
    return moves & (tokens["weight"] != 0)


def square_weight(tokens: Mapping[str, Tensor]) -> Tensor:
    """Σ w_t² over the tokens that can move: float64 of shape (), no host sync."""
    return torch.where(movable(tokens), tokens["weight"].double(), 0.0).square().sum()


def threshold_square_weight(tokens: Mapping[str, Tensor]) -> Tensor:
    """What the threshold of a micro-batch counts: `square_weight`, or Σ w_t² over all its tokens if none can move.

    The latter's gradient comes from no token (an auxiliary loss has one, say): it is a spike if it would be one of
    tokens. float64 of shape (), no host sync.
    """
    of_movable = square_weight(tokens)
    return torch.where(of_movable == 0, tokens["weight"].double().square().sum(), of_movable)


def usable_tokens(tokens: Mapping[str, Tensor], broken: Tensor) -> Tensor:
    """Where a response token has a weight in the loss and is not broken (see `MicroBatch.broken`), bool."""
    return tokens["response_mask"].bool() & (tokens["weight"] != 0) & ~broken
