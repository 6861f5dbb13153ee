# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The threshold τ: as configured, or computed from the run's recent gradient norms."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from .saved import checked

logger = logging.getLogger(__name__)


def is_over(norm: float, threshold: float) -> bool:
    """Whether a norm is over its threshold; NaN is. The one place where this is decided."""
    return not norm <= threshold


def threshold_factor(part: Mapping[str, Any]) -> float:
    """`norm` divided by `threshold`, which may be strings where they are not finite.

    Of a part without a token that can move, both are zero, and so is this.
    """
    norm, threshold = float(part["norm"]), float(part["threshold"])
    return norm / threshold if threshold else math.inf if norm else 0.0


def largest_first(norm: float) -> float:
    """A key that sorts norms, largest first; one that is not finite counts as infinite."""
    return -norm if math.isfinite(norm) else -math.inf


# The number of mini-batches before there is a threshold, and the number of recent mini-batches it is computed from.
WARMUP = 20
WINDOW = 256

# τ = 5 × the 90th percentile of the norms. Norms are spread far more widely below their median than above it (a
# mini-batch of nearly equal rewards has hardly a gradient), so their median and deviation say little of the largest.
MARGIN = 5.0
_EXCEEDING_SHARE = 0.1

# During the warm-up only NaN and Inf are spikes: τ is 10 × the largest finite norm so far, or _UNREACHED without one.
_WARMUP_MARGIN = 10.0
_UNREACHED = 1e30


class Threshold:
    """τ for each mini-batch.

    With the setting "auto" it is 5 × the 90th percentile of the largest token-equivalent norms of the last 256
    mini-batches. So spikes hardly change it as long as fewer than a tenth of the mini-batches spike. It follows a
    lasting rise of the norms within a tenth of the window (26 mini-batches), and a lasting fall within nine tenths.
    """

    def __init__(self, setting: float | str) -> None:
        # τ of the last mini-batch; None before it, and during the warm-up of an automatic one.
        self.last: float | None = None
        self._fixed = None if setting == "auto" else float(setting)
        # Those in the window, oldest first. With a fixed threshold, too, so that a resumed run can switch.
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def automatic(self) -> float | None:
        """τ for the next mini-batch by the norms so far; None during the warm-up."""
        count = len(self._norms)
        if count < WARMUP:
            return None
        return MARGIN * sorted(self._norms, reverse=True)[int(_EXCEEDING_SHARE * count)]

    def of(self, finite_norm: float, other_norm: float = 0.0) -> float:
        """τ for a mini-batch, whose largest finite token-equivalent norm is given, or 0.

        In the warm-up, τ is taken from `other_norm` if all norms so far are 0.
        """
        if self._fixed is not None:
            return self._fixed
        if (automatic := self.automatic) is not None:
            return automatic
        largest = max([finite_norm, *self._norms]) or other_norm
        return _WARMUP_MARGIN * largest or _UNREACHED

    def next(self, token_norm: float, finite_norm: float) -> float:
        """τ for a mini-batch, whose largest token-equivalent norm an automatic threshold then takes in.

        `finite_norm` is the largest finite one, or 0.
        """
        threshold = self.of(finite_norm)
        self.last = threshold if self._fixed is not None or len(self._norms) >= WARMUP else None
        self._take_in(token_norm)
        return threshold

    def _take_in(self, norm: float) -> None:
        if norm > 0 and math.isfinite(norm):
            self._norms.append(norm)

    def state_dict(self) -> dict[str, Any]:
        """The norms in the window: the same on every rank and for any number of ranks."""
        return {"token_norms": [*self._norms]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None (no saved state) the warm-up of an automatic threshold starts over.

        Raises:
            ValueError: It is no such state; nothing is changed.
        """
        norms = () if state is None else checked(state, {"token_norms": []}, "it")["token_norms"]
        if state is None and self._fixed is None:
            logger.warning(
                "No norms are loaded for grad_norm_threshold=auto (there is no gradloc_state.pt beside the checkpoint, "
                "or checkpoint.load_contents is without 'extra'); its warm-up starts over."
            )
        self._norms.clear()
        for norm in norms:
            self._take_in(norm)
