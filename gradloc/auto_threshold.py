# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An automatic threshold, computed from the run's recent gradient norms."""

import math
from collections import deque
from collections.abc import Sequence

from .robust_statistics import median_and_deviation

# The number of mini-batches before there is a threshold, and the number of recent mini-batches it is computed from.
WARMUP = 20
WINDOW = 256

# With these constants, fewer than 1 in 1,000 mini-batches give a false alarm if the log-norms have exponential tails
# (Laplace, Gumbel), and practically none if the log-norms are normal, even with a drift.
_DEVIATIONS = 6.0
_SMALL_SAMPLE = 16.0
# The smallest deviation used: without it, a run with almost constant norms would alarm at an increase of a few percent.
_DEVIATION_FLOOR = 0.1


class AutoThreshold:
    """Computes τ from the largest token-equivalent norms of the last mini-batches.

    τ is exp(median + 6 deviations) of their logarithms, where the deviation is based on the median absolute deviation.
    So spikes hardly change it unless half of the mini-batches spike. It follows a lasting shift of the norms within
    half a window (128 mini-batches).
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
        # A deviation estimated from few norms is uncertain, so the margin is wider at first.
        deviations = _DEVIATIONS * (1 + _SMALL_SAMPLE / count)
        return math.exp(middle + deviations * max(deviation, _DEVIATION_FLOOR))

    def take_in(self, norm: float) -> None:
        """Adds a mini-batch's largest token-equivalent norm; zero and non-finite norms are ignored."""
        if norm > 0 and math.isfinite(norm):
            self._logarithms.append(math.log(norm))

    def norms(self) -> list[float]:
        """The norms in the window, oldest first."""
        return [math.exp(logarithm) for logarithm in self._logarithms]

    def restart_from(self, norms: Sequence[float]) -> None:
        """Restores the window from what `norms` returned."""
        self._logarithms.clear()
        for norm in norms:
            self.take_in(norm)
