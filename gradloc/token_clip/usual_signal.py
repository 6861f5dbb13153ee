# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The usual value of a boundary's largest signal."""

import math
from dataclasses import dataclass, field
from statistics import median

# The usual signal is at least half of the 90th percentile of the last mini-batches' largest signals. So where many of
# them have hardly any signal, as with sparse rewards, the others are still usual.
_FLOOR, _PERCENTILE, _WINDOW = 0.5, 0.9, 64


@dataclass
class UsualSignal:
    """A moving average of the largest signal of an optimizer step, for one boundary.

    It starts from the median of the warm-up. After that, the t-th value has the weight (1 - beta) / (1 - beta^t), as in
    a bias-corrected moving average (Adam's), so that the start weighs as much as the values it was computed from.

    Attributes:
        recent (list[float]): The last values, not clipped; at most 64.
        count (int): The number of values so far.
        average (float): The moving average of the values, clipped to the bound; 0 during the warm-up.
    """

    recent: list[float] = field(default_factory=list)
    count: int = 0
    average: float = 0.0

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
