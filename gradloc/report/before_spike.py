# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The steps before a spike, and which early-warning figures left the range of the steps before them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

from ..robust_statistics import median_and_deviation
from .figures import ranges, severity

# In the order in which they are shown.
FIGURES = ("spike_margin", "ratio_max", "ratio_p999", "rollout_ratio_max", "unlikely_share")
_RATIOS = ("ratio_max", "ratio_p999", "rollout_ratio_max")

# How many steps before a spike are shown, and how many steps a figure's range is taken from.
STEPS_BEFORE = 20
STEPS_OF_RANGE = 100
_FEWEST = 20

# The range ends so many deviations over the median, and more where few values tell the deviation. The deviation counts
# as at least the floor: figures that hardly change would leave their range at a few percent.
_DEVIATIONS, _SMALL_SAMPLE, _DEVIATION_FLOOR = 6.0, 16.0, 0.1

Figures = Mapping[str, float | None]


class StepHistory:
    """The figures of a run's steps.

    A figure leaves its range in a step if it is over exp(median + 6·(1 + 16/n)·deviation) of the logarithms of the
    n ≥ 20 positive values in the 100 steps before. For a ratio, these are values of its own logarithm, since an
    ordinary ratio is close to 1.

    Args:
        steps (Mapping[int, Mapping]): The figures by step; None where there is no data.
    """

    def __init__(self, steps: Mapping[int, Figures]) -> None:
        self._numbers = sorted(steps)
        self._values: dict[str, list[float | None]] = {name: [] for name in FIGURES}
        self._spikes = set()
        for number in self._numbers:
            figures = steps[number]
            for name, values in self._values.items():
                values.append(figures.get(name))
            if figures.get("triggered"):
                self._spikes.add(number)
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
            before = self._values[name][max(index - STEPS_OF_RANGE, 0) : index]
            values = [_log(value) if name in _RATIOS else value for value in before if value is not None]
            limit = _range_end([value for value in values if 0 < value < math.inf])
            self._limits[key] = _exp(limit) if limit is not None and name in _RATIOS else limit
        return self._limits[key]


def _range_end(values: list[float]) -> float | None:
    """The upper end of the range of positive values; None for too few of them."""
    if len(values) < _FEWEST:
        return None
    middle, deviation = median_and_deviation([math.log(value) for value in values])
    deviations = _DEVIATIONS * (1 + _SMALL_SAMPLE / len(values))
    return _exp(middle + deviations * max(deviation, _DEVIATION_FLOOR))


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
