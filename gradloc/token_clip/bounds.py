# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""When a backward signal is over its bound, and how it is cut then."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..checks import is_finite_number, is_positive_integer
from ..fsdp import collectives

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

    def take_in(self, largest: float, factor: float, beta: float, warmup_steps: int) -> None:
        """Adds a step's largest signal. Of it, no more than the bound, factor × usual, counts in the average.

        Zeros and non-finite values are ignored.
        """
        if largest == 0 or not math.isfinite(largest):
            return
        clipped = min(largest, factor * self.value) if self.value else largest
        self.count += 1
        self.recent = [*self.recent[1 - _WINDOW :], largest] if len(self.recent) >= _WINDOW else [*self.recent, largest]
        if self.average == 0:
            if self.count >= warmup_steps:
                self.average = median(self.recent)
            return
        self.average += (1 - beta) / (1 - beta**self.count) * (clipped - self.average)


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


logger = logging.getLogger(__name__)


class Bounds:
    """What the last optimizer steps say of a mini-batch's signals; the same on every rank.

    Attributes:
        tensor (Tensor): The bounds, on the device, float32 of shape (boundaries,); infinite in the warm-up.
        limit (int): How many signals of a rank may be cut at a boundary in a mini-batch.
        limit_of_part (int): The same below the log-probs, where each rank of a group has a part of the positions.
    """

    def __init__(
        self, boundaries: Sequence[str], config: TokenClipConfig, device: torch.device, sequence_parallel_size: int
    ) -> None:
        self._config = config
        self._device = device
        self._sequence_parallel_size = sequence_parallel_size
        self._usual = {boundary: UsualSignal() for boundary in boundaries}
        # Of a mini-batch, on all ranks.
        self._tokens = 0.0
        self._set()

    def usual(self, boundary: str) -> float:
        """A boundary's usual largest signal; 0 in the warm-up."""
        return self._usual[boundary].value

    def take_in(self, largest: Mapping[str, float], tokens: float) -> None:
        """Adds a step.

        Args:
            tokens (float): How many tokens of all ranks have a weight in the loss.
        """
        config = self._config
        for boundary, value in largest.items():
            self._usual[boundary].take_in(value, config.factor, config.beta, config.warmup_steps)
        self._tokens = tokens or self._tokens
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank and for any number of ranks."""
        return {"boundaries": {name: asdict(usual) for name, usual in self._usual.items()}, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None (no saved state) the warm-up starts over.

        Raises:
            ValueError: The state belongs to other boundaries.
        """
        if state is None:
            logger.warning(
                "No TokenClip statistics are loaded (there is no gradloc_state.pt beside the checkpoint, or "
                "checkpoint.load_contents is without 'extra'); the warm-up starts over."
            )
            state = {"boundaries": {name: {} for name in self._usual}, "tokens": 0.0}
        saved, here = set(state["boundaries"]), set(self._usual)
        if saved != here:
            raise ValueError(
                "The checkpoint's TokenClip statistics belong to another model (boundaries only in the checkpoint: "
                f"{sorted(saved - here)}; only in this model: {sorted(here - saved)}): resume from a checkpoint of "
                "this model, or set actor_rollout_ref.actor.token_clip.enable=False."
            )
        self._usual = {name: UsualSignal(**state["boundaries"][name]) for name in self._usual}
        self._tokens = state["tokens"]
        self._set()

    def _set(self) -> None:
        groups = collectives.world_size() // self._sequence_parallel_size
        self.limit = max(1, int(self._config.max_share * self._tokens / groups))
        self.limit_of_part = max(1, self.limit // self._sequence_parallel_size)
        bounds = [self._config.factor * usual.value or math.inf for usual in self._usual.values()]
        # Pageable memory is copied at once, so the host need not wait until the device has it.
        self.tensor = torch.tensor(bounds, dtype=torch.float32).to(self._device, non_blocking=True)
