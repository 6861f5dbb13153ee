# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The usual value of a boundary's largest signal."""

import math
from dataclasses import dataclass, field
from statistics import median


@dataclass
class UsualSignal:
    """The moving average of the largest signal of an optimizer step, for one boundary.

    It starts from the median of the warm-up. After that, the t-th value has the weight (1 - beta) / (1 - beta^t), as in
    a bias-corrected moving average (Adam's), so that the start weighs as much as the values it was computed from.

    Attributes:
        warmup (list[float]): The values of the warm-up; empty after it.
        count (int): The number of values so far.
        value (float): The usual largest signal; 0 during the warm-up.
    """

    warmup: list[float] = field(default_factory=list)
    count: int = 0
    value: float = 0.0

    def take_in(self, largest: float, factor: float, beta: float, warmup_steps: int) -> None:
        """Adds a step's largest signal, of which no more counts than the bound, factor × usual. Zero is ignored."""
        if largest == 0 or not math.isfinite(largest):
            return
        self.count += 1
        if self.value == 0:
            self.warmup.append(largest)
            if self.count >= warmup_steps:
                self.value, self.warmup = median(self.warmup), []
            return
        weight = (1 - beta) / (1 - beta**self.count)
        self.value += weight * (min(largest, factor * self.value) - self.value)
