# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""When a backward signal is over its bound, and how it is cut then."""

import math
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ..config import is_finite_number, is_positive_integer, require

ACTIONS = ("log", "drop", "smooth")


@dataclass
class TokenClipConfig:
    """When a token's backward signal is cut.

    Args:
        enable (bool): Whether to compare each token's backward signal with the usual largest one.
        action (str): What happens to the signal of a token over the bound. Options: 'log' (nothing; it is only written
            down), 'drop' (multiplied by 0), 'smooth' (multiplied by a factor that falls from 1 at the bound to 0 at
            twice the bound).
        factor (float): The bound, as a multiple of the usual largest signal.
        beta (float): Decay of the usual largest signal, a moving average, per optimizer step.
        warmup_steps (int): Number of optimizer steps before tokens are compared.
        max_share (float): Maximum share of a rank's tokens of a mini-batch that are cut at a boundary. A micro-batch
            with which there would be more of them is left as it is.

    Raises:
        ValueError: A value is out of range.
    """

    enable: bool = False
    action: str = "drop"
    factor: float = 4.0
    beta: float = 0.98
    warmup_steps: int = 20
    max_share: float = 0.1

    def __post_init__(self) -> None:
        self._check("enable", isinstance(self.enable, bool), "True or False")
        self._check("action", self.action in ACTIONS, f"one of {list(ACTIONS)}")
        self._check("factor", is_finite_number(self.factor) and self.factor > 1, "a number over 1")
        self._check("beta", is_finite_number(self.beta) and 0 < self.beta < 1, "a number between 0 and 1")
        self._check("warmup_steps", is_positive_integer(self.warmup_steps), "an integer over 0")
        self._check("max_share", is_finite_number(self.max_share) and 0 < self.max_share <= 1, "over 0 and at most 1")

    def _check(self, name: str, good: bool, wanted: str) -> None:
        require(good, f"token_clip.{name}", getattr(self, name), wanted)


# The usual signal is at least half of the 90th percentile of the last mini-batches' largest signals. So where many of
# them have hardly any signal, as with sparse rewards, the others are still usual.
_FLOOR, _PERCENTILE, _WINDOW = 0.5, 0.9, 64


@dataclass
class UsualSignal:
    """A moving average of the largest signal of an optimizer step, for one boundary.

    It starts from the median of the warm-up. After that, the t-th value has the weight (1 - beta) / (1 - beta^t), as in
    a bias-corrected moving average (Adam's), so that the start weighs as much as the values it was computed from.
    """

    recent: list[float] = field(default_factory=list)  # the last values, not clipped; at most 64
    count: int = 0  # the number of values so far
    average: float = 0.0  # the moving average of the values, clipped to the bound; 0 during the warm-up

    @property
    def value(self) -> float:
        """The usual largest signal; 0 during the warm-up."""
        if self.average == 0 or not self.recent:
            return 0.0
        return max(self.average, _FLOOR * sorted(self.recent)[int(_PERCENTILE * (len(self.recent) - 1))])

    def take_in(self, largest: float, config: TokenClipConfig) -> None:
        """Adds a step's largest signal, at most the bound to the average; zeros and non-finite values are ignored."""
        if largest == 0 or not math.isfinite(largest):
            return
        clipped = min(largest, config.factor * self.value)
        self.count += 1
        self.recent = [*self.recent, largest][-_WINDOW:]
        if self.average == 0:
            if self.count >= config.warmup_steps:
                self.average = median(self.recent)
            return
        self.average += (1 - config.beta) / (1 - config.beta**self.count) * (clipped - self.average)


def is_over(signal: Tensor, bound: Tensor | float, scaled: bool) -> Tensor:
    """Where a signal is over its bound, bool. NaN is, unless the loss is scaled: that is left to the scaler."""
    over = ~(signal <= bound)
    return over & signal.isfinite() if scaled else over


def cut(gradient: Tensor, signal: Tensor, bound: Tensor | float, over: Tensor, action: str) -> Tensor:
    """A gradient whose signals over their bound are cut; all arguments are broadcastable to its shape."""
    if action == "drop":
        return torch.where(over, 0.0, gradient)
    left = (2 - signal / bound).nan_to_num(nan=0.0).clamp(0, 1)
    return torch.where(over, torch.where(left == 0, 0.0, gradient * left.to(gradient.dtype)), gradient)
