# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of the search, independent of the trainer that they come from."""

from dataclasses import dataclass

from .checks import is_finite_number, is_positive_integer

TRIGGERS = ("unit", "global")
ACTIONS = ("log", "skip", "drop", "stop")
UNTIL = ("explained", "exhaustive")


@dataclass(frozen=True)
class GradLocConfig:
    """When a gradient norm counts as a spike, and what to do about it.

    Args:
        threshold (float | str): τ, the gradient norm of one token (of its term of the loss, divided by its weight)
            above which the token is a culprit; "auto": 5 × the 90th percentile of the last 256 mini-batches.
        budget (int): Maximum number of extra forward/backward passes per spike.
        trigger (str): What starts a search. "unit": any micro-batch of any rank is over its threshold; "global": the
            reduced gradient is.
        until (str): When a search ends. "explained": a few tokens over τ explain the spike: without them, every
            micro-batch is measured under its threshold; "exhaustive": every token over τ is found.
        action (str): What happens to the optimizer step. "log": step as usual; "skip": skip it; "drop": step without
            the culprits' gradient; "stop": step as usual, and end the run after repeated spikes.
        stop_after (int): For "stop": end the run after N spikes within N steps.
        drill_step (int, optional): Step in whose first mini-batch a spike is planted in a copy, to test the search.

    Raises:
        ValueError: A value is out of range; the message names the configuration key to fix.
    """

    threshold: float | str = 640.0
    budget: int = 128
    trigger: str = "unit"
    until: str = "explained"
    action: str = "log"
    stop_after: int = 5
    drill_step: int | None = None

    def __post_init__(self) -> None:
        if self.threshold != "auto" and not (is_finite_number(self.threshold) and self.threshold > 0):
            raise ValueError(f"grad_norm_threshold must be a positive finite number or auto, got {self.threshold!r}.")
        if not is_positive_integer(self.budget):
            raise ValueError(f"bisect_budget_steps must be an integer of at least 1, got {self.budget!r}.")
        if self.trigger not in TRIGGERS:
            raise ValueError(f"spike_trigger must be one of {list(TRIGGERS)}, got {self.trigger!r}.")
        if self.until not in UNTIL:
            raise ValueError(f"bisect_until must be one of {list(UNTIL)}, got {self.until!r}.")
        if self.action not in ACTIONS:
            raise ValueError(f"spike_action must be one of {list(ACTIONS)}, got {self.action!r}.")
        if not is_positive_integer(self.stop_after):
            raise ValueError(f"spike_stop_after must be an integer of at least 1, got {self.stop_after!r}.")
        if self.drill_step is not None and not is_positive_integer(self.drill_step):
            raise ValueError(f"spike_drill_step must be null or a step, from 1 on, got {self.drill_step!r}.")
