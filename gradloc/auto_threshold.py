# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An automatic threshold from the norms that a run usually has."""

import math
from collections import deque
from collections.abc import Sequence

from .robust_statistics import median_and_deviation

# The number of mini-batches before there is a threshold, and the number of recent ones that it is computed from.
WARMUP = 20
WINDOW = 256

# With these the false alarms stay under one mini-batch in 1,000 where the logarithms of the norms have exponential
# tails (Laplace, Gumbel), and there are practically none where they are normal, drifting ones included.
_DEVIATIONS = 6.0
_SMALL_SAMPLE = 16.0
# The least deviation, because a run with almost constant norms would alarm at a few percent more.
_DEVIATION_FLOOR = 0.1


class AutoThreshold:
    """τ from the largest token-equivalent norms of the last mini-batches.

    It is exp(median + 6 deviations) of their logarithms, with the median absolute deviation, so that spikes hardly
    move it unless half of the mini-batches spike. A lasting shift of the norms is followed within half a window, 128
    mini-batches.
    """

    def __init__(self) -> None:
        self._logarithms: deque[float] = deque(maxlen=WINDOW)

    @property
    def value(self) -> float | None:
        """τ for the next mini-batch; None during the warm-up."""
        count = len(self._logarithms)
        if count < WARMUP:
            return None
        middle, deviation = median_and_deviation(self._logarithms)
        # The deviation of a few numbers is uncertain.
        deviations = _DEVIATIONS * (1 + _SMALL_SAMPLE / count)
        return math.exp(middle + deviations * max(deviation, _DEVIATION_FLOOR))

    def take_in(self, norm: float) -> None:
        """Counts a mini-batch's largest token-equivalent norm; zeros and non-finite ones do not count."""
        if norm > 0 and math.isfinite(norm):
            self._logarithms.append(math.log(norm))

    def norms(self) -> list[float]:
        """The norms that count, oldest first."""
        return [math.exp(logarithm) for logarithm in self._logarithms]

    def restart_from(self, norms: Sequence[float]) -> None:
        """Restores what `norms` gave."""
        self._logarithms.clear()
        for norm in norms:
            self.take_in(norm)
