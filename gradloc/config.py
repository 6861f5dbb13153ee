# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The settings of the search, independent of the trainer that they come from."""

import math
from dataclasses import dataclass
from typing import TypeGuard

TRIGGERS = ("unit", "global")
ACTIONS = ("log", "skip", "drop")
UNTIL = ("explained", "exhaustive")


@dataclass(frozen=True)
class GradLocConfig:
    """When a gradient norm counts as a spike, and what to do about it.

    Args:
        threshold (float | str): τ, the gradient norm of one token (its share of the loss divided by its weight in it)
            above which the token is a culprit; "auto": from the run's own norms, as `AutoThreshold` has it.
        budget (int): At most so many extra forward/backward passes for one event.
        trigger (str): "unit": any micro-batch of any rank over its threshold starts a search; "global": only the
            norm of the reduced gradient does.
        until (str): "explained": a search ends when a few tokens over τ are known without which every unit is measured
            under its threshold; "exhaustive": when every token over τ is found.
        action (str): What becomes of the optimizer step. "log": it is taken as if nothing had happened; "skip": it is
            left out; "drop": it is taken without the culprits' gradient.

    Raises:
        ValueError: A value is out of range; the message names the configuration key to mend.
    """

    threshold: float | str = 640.0
    budget: int = 128
    trigger: str = "unit"
    until: str = "explained"
    action: str = "log"

    def __post_init__(self) -> None:
        if self.threshold != "auto" and not (_is_number(self.threshold) and 0 < self.threshold < math.inf):
            raise ValueError(f"grad_norm_threshold must be a positive finite number or auto, got {self.threshold!r}.")
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 1:
            raise ValueError(f"bisect_budget_steps must be an integer of at least 1, got {self.budget!r}.")
        if self.trigger not in TRIGGERS:
            raise ValueError(f"spike_trigger must be one of {list(TRIGGERS)}, got {self.trigger!r}.")
        if self.until not in UNTIL:
            raise ValueError(f"bisect_until must be one of {list(UNTIL)}, got {self.until!r}.")
        if self.action not in ACTIONS:
            raise ValueError(f"spike_action must be one of {list(ACTIONS)}, got {self.action!r}.")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
