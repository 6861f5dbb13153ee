# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of TokenClip, which do not depend on the trainer."""

from dataclasses import dataclass

from ..checks import is_finite_number, is_positive_integer

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
        if not good:
            raise ValueError(f"token_clip.{name} must be {wanted}, got {getattr(self, name)!r}.")
