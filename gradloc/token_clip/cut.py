# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How a backward signal is compared with its bound and cut: in training, and where a replay repeats it."""

import torch
from torch import Tensor


def is_over(signal: Tensor, bound: Tensor | float, scaled: bool) -> Tensor:
    """Where a signal is over its bound, bool. NaN is, unless the loss is scaled: that is left to the scaler."""
    over = ~(signal <= bound)
    return over & signal.isfinite() if scaled else over


def cut(gradient: Tensor, signal: Tensor, bound: Tensor | float, over: Tensor, action: str) -> Tensor:
    """A gradient whose signals over their bound are cut; all arguments are broadcastable to its shape.

    Args:
        gradient (Tensor): The gradient.
        signal (Tensor): The signals, of the same positions.
        bound (Tensor | float): Their bound.
        over (Tensor): Which of them are to be cut, bool.
        action (str): "drop" or "smooth"; see `TokenClipConfig`.
    """
    if action == "drop":
        return torch.where(over, 0.0, gradient)
    left = (2 - signal / bound).nan_to_num(nan=0.0).clamp(0, 1)
    return torch.where(over, torch.where(left == 0, 0.0, gradient * left.to(gradient.dtype)), gradient)
