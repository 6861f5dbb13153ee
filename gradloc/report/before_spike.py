# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The steps before a spike, and which early-warning figures left the range of the steps before them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

from ..auto_threshold import AutoThreshold
from .figures import ranges, severity

# In the order in which they are shown.
FIGURES = ("spike_margin", "ratio_max", "ratio_p999", "rollout_ratio_max", "unlikely_share")
_RATIOS = ("ratio_max", "ratio_p999", "rollout_ratio_max")

# How many steps before a spike are shown, and how many steps a figure's range is taken from.
STEPS_BEFORE = 20
STEPS_OF_RANGE = 100

Figures = Mapping[str, float | None]


class StepHistory:
    """The figures of a run's steps.

    A figure leaves its range in a step if it is over what `grad_norm_threshold=auto` would set from the 100 steps
    before: exp(median + 6·(1 + 16/n)·deviation) of the logarithms of n ≥ 20 values. For a ratio, these are values of
    its own logarithm, since an ordinary ratio is close to 1.

    Args:
        steps (Mapping[int, Mapping]): The figures by step; None where there is no data.
    """

    def __init__(self, steps: Mapping[int, Figures]) -> None:
        self._numbers = sorted(steps)
        self._values = {name: [steps[number].get(name) for number in self._numbers] for name in FIGURES}
        self._spikes = {number for number in self._numbers if steps[number].get("triggered")}
        self._limits: dict[tuple[str, int], float | None] = {}

    def before(self, step: int) -> dict[str, Any] | None:
        """The steps before a spike and its own; None where no step before it is known.

        Args:
            step (int): The step of the spike.

        Returns:
            dict: `steps`, at most 21 numbers of steps in order; `spikes`, those of the earlier ones with spikes of
                their own; `figures`, for each figure with data: `name`, `values` and `limits` (the upper end of its
                range, or None) in these steps, and `lead`, how many steps before the spike it first left its range (0:
                in the spike's step; None: not at all). Steps with spikes of their own do not count for `lead`: an
                earlier spike is no warning.
        """
        start, stop = bisect_left(self._numbers, step - STEPS_BEFORE), bisect_right(self._numbers, step)
        numbers = self._numbers[start:stop]
        if not numbers or numbers[0] == step:
            return None
        spikes = [number for number in numbers if number in self._spikes and number < step]
        figures = []
        for name in FIGURES:
            values = self._values[name][start:stop]
            if all(value is None for value in values):
                continue
            limits = [self._limit(name, index) for index in range(start, stop)]
            left = [
                number
                for number, value, limit in zip(numbers, values, limits, strict=True)
                if value is not None and limit is not None and severity(value) > limit and number not in spikes
            ]
            figures.append({"name": name, "values": values, "limits": limits, "lead": step - left[0] if left else None})
        return {"steps": numbers, "spikes": spikes, "figures": figures}

    def _limit(self, name: str, index: int) -> float | None:
        """The upper end of a figure's range in a step; None where too few steps before it have data."""
        key = (name, index)
        if key not in self._limits:
            threshold = AutoThreshold()
            for value in self._values[name][max(index - STEPS_OF_RANGE, 0) : index]:
                if value is not None:
                    threshold.take_in(_log(value) if name in _RATIOS else value)
            limit = threshold.value
            self._limits[key] = _exp(limit) if limit is not None and name in _RATIOS else limit
        return self._limits[key]


def what_moved(before: Mapping[str, Any] | None) -> str | None:
    """A sentence on what moved first; None where there are no steps to judge.

    Args:
        before (Mapping, optional): What `StepHistory.before` returned.
    """
    if before is None or not any(limit is not None for figure in before["figures"] for limit in figure["limits"]):
        return None
    moved = sorted(
        (figure for figure in before["figures"] if figure["lead"] is not None), key=lambda figure: -figure["lead"]
    )
    spikes = before["spikes"]
    apart = f" Not counted: {'steps' if len(spikes) > 1 else 'step'} {ranges(spikes)}, with spikes." if spikes else ""
    if not moved:
        return f"No early-warning figure left its range in these steps.{apart}"
    texts = [f"{figure['name']} {_when(figure['lead'])}" for figure in moved]
    early = bool(moved[0]["lead"])
    start = "Moved before the spike" if early else "Nothing moved before the spike"
    return f"{start}: {', '.join(texts)}.{apart}"


def _when(lead: int) -> str:
    return "only in its own step" if lead == 0 else f"{lead} step{'s' * (lead > 1)} before it"


def _log(ratio: float) -> float:
    """log r; 0 where it has no logarithm over zero, which a range leaves out."""
    return math.log(ratio) if ratio > 1 else 0.0


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
