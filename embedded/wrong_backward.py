# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The fault `kernel`: an RMSNorm whose forward is right and whose backward is wrong, as a kernel's may be."""

from typing import Any

import torch
from torch import Tensor, nn

MODULE = "layers.1.post_attention_layernorm"


class SummedRMSNorm(torch.autograd.Function):
    """RMSNorm. Its backward takes a sum over the hidden size where the right one takes the mean."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = hidden.float()
        inverse = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
        normed = exact * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return weight * normed.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        scaled = gradient * weight.float()
        along = (scaled * normed).sum(-1, keepdim=True)  # the mean would be right
        of_hidden = inverse * (scaled - normed * along)
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        return of_hidden.to(gradients[0].dtype), of_weight.to(weight.dtype), None


def break_backward(module: nn.Module) -> None:
    """Gives the norm before layer 1's MLP the wrong backward.

    Args:
        module (nn.Module): The model, sharded or not.
    """
    (norm,) = [child for name, child in module.named_modules() if name.endswith(MODULE)]
    epsilon: Any = norm.variance_epsilon
    norm.forward = lambda hidden: SummedRMSNorm.apply(hidden, norm.weight, epsilon)  # on purpose
