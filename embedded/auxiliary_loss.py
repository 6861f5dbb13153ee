# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A large auxiliary loss, attached to a decoder layer's output by an autograd function, as MoE trainers do."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

SCALE = 1e3
MODULE = "layers.1.mlp"


class AuxiliaryLoss(torch.autograd.Function):
    """Gives an output as it is; in the backward pass adds the gradient of another loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.full_like(loss, SCALE)


def attach(module: nn.Module) -> RemovableHandle:
    """Attaches a z-loss of layer 1: the mean squared logsumexp of what its gate gives. Returns what takes it away.

    Only the weights of the gate get a gradient from it.

    Args:
        module (nn.Module): The model, sharded or not.
    """
    (mlp,) = [child for name, child in module.named_modules() if name.endswith(MODULE)]

    def attached(block: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        gate = block.get_submodule("gate_proj")(arguments[0].detach())
        return AuxiliaryLoss.apply(output, gate.float().logsumexp(-1).square().mean())

    return mlp.register_forward_hook(attached)
