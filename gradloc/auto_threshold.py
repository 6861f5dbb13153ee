# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An automatic threshold, computed from the run's recent gradient norms."""

import math
from collections import deque
from collections.abc import Sequence

# The number of mini-batches before there is a threshold, and the number of recent mini-batches it is computed from.
WARMUP = 20
WINDOW = 256

# τ is so many times the norm that so large a share of the mini-batches exceeds. Norms are spread far more widely below
# their median than above it (a mini-batch of nearly equal rewards has hardly a gradient), so their median and deviation
# say little of the largest.
_MARGIN = 5.0
_EXCEEDING_SHARE = 0.1


class AutoThreshold:
    """Computes τ from the largest token-equivalent norms of the last mini-batches.

    τ is five times the norm that a tenth of them exceed. So spikes hardly change it as long as fewer than a tenth of
    the mini-batches spike. It follows a lasting rise of the norms within a tenth of a window (26 mini-batches), and a
    lasting fall within nine tenths.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def value(self) -> float | None:
        """τ for the next mini-batch; None during the warm-up."""
        count = len(self._norms)
        if count < WARMUP:
            return None
        return _MARGIN * sorted(self._norms, reverse=True)[int(_EXCEEDING_SHARE * count)]

    def take_in(self, norm: float) -> None:
        """Adds a mini-batch's largest token-equivalent norm; zero and non-finite norms are ignored."""
        if norm > 0 and math.isfinite(norm):
            self._norms.append(norm)

    def norms(self) -> list[float]:
        """The norms in the window, oldest first."""
        return list(self._norms)

    def restart_from(self, norms: Sequence[float]) -> None:
        """Restores the window from what `norms` returned."""
        self._norms.clear()
        for norm in norms:
            self.take_in(norm)
