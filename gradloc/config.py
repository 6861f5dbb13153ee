# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of the search, independent of the trainer that they come from."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

CHOICES = {
    "spike_trigger": ("unit", "global"),
    "bisect_until": ("explained", "exhaustive"),
    "spike_action": ("log", "skip", "drop", "stop"),
}


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold, NaN and infinities left out; a bool is not a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_positive_integer(value: object) -> TypeGuard[int]:
    """Whether it is an int of at least 1; a bool is not an int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_on(config: Mapping[str, Any]) -> bool:
    """Whether an actor's or a critic's configuration turns GradLoc, LayerClip or TokenClip on."""
    clips = (config.get(name) or {} for name in ("layer_clip", "token_clip"))  # a critic has none
    return bool(config.get("spike_detection", False)) or any(clip.get("enable", False) for clip in clips)


def require(good: bool, key: str, value: object, wanted: str) -> None:
    """Raises a ValueError that names the key and what its value must be, unless that is good."""
    if not good:
        raise ValueError(f"{key} must be {wanted}, got {value!r}.")


@dataclass(kw_only=True)
class GradLocConfig:
    """When a gradient norm counts as a spike, and what to do about it.

    Args:
        grad_norm_threshold (float | str): τ, the gradient norm of one token (its share of the gradient divided by its
            weight in the loss) that counts as a spike; "auto": 5 × the 90th percentile of the last 256 mini-batches.
        bisect_budget_steps (int): Maximum number of extra forward/backward passes per spike.
        bisect_budget_seconds (float | str, optional): Maximum number of seconds per spike after which no further pass
            begins; "auto": over the run, 3% of its time and five minutes; None: no limit.
        spike_trigger (str): What starts a search. "unit": any micro-batch of any rank is over its threshold; "global":
            the reduced gradient is.
        bisect_until (str): When a search ends. "explained": a few tokens over τ explain the spike: without them, every
            micro-batch is measured under its threshold; "exhaustive": every token over τ is found.
        spike_action (str): What happens to the optimizer step. "log": step as usual; "skip": skip it; "drop": step
            without the culprits' gradient; "stop": step as usual, and end the run after repeated spikes.
        spike_stop_after (int): For "stop": save a checkpoint and end the run after N spikes within N steps.
        spike_drill_step (int, optional): Step in whose first mini-batch a spike is planted in a copy, to test the
            search.

    Raises:
        ValueError: A value is out of range; the message names the configuration key to fix.
    """

    grad_norm_threshold: float | str = "auto"
    bisect_budget_steps: int = 128
    bisect_budget_seconds: float | str | None = "auto"
    spike_trigger: str = "unit"
    bisect_until: str = "explained"
    spike_action: str = "log"
    spike_stop_after: int = 5
    spike_drill_step: int | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError for a value out of range; the message names the key."""
        for key, others, named in (
            ("grad_norm_threshold", ("auto",), "number or auto"),
            ("bisect_budget_seconds", ("auto", None), "number, auto or null"),
        ):
            value = getattr(self, key)
            good = value in others or (is_finite_number(value) and value > 0)
            require(good, key, value, f"a positive finite {named}")
        for key in ("bisect_budget_steps", "spike_stop_after"):
            value = getattr(self, key)
            require(is_positive_integer(value), key, value, "an integer of at least 1")
        for key, choices in CHOICES.items():
            require(getattr(self, key) in choices, key, getattr(self, key), f"one of {list(choices)}")
        step = self.spike_drill_step
        require(step is None or is_positive_integer(step), "spike_drill_step", step, "null or a step, from 1 on")
