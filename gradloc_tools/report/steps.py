# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's steps: over the run for a chart, and before a spike."""

from collections.abc import Mapping
from typing import Any

from .figures import rounded, severity
from .meanings import FIGURES

# How many steps before a spike are shown.
STEPS_BEFORE = 20
# At most so many points are in the chart.
POINTS = 2000


def level(steps: Mapping[int, Mapping[str, Any]], since: int | None = None) -> dict[str, Any] | None:
    """The token norm and its threshold over the steps.

    Of more than 2,000 steps, every run of equally many steps keeps its highest and its lowest, so that no maximum is
    lost and an ordinary level is not made to look high.

    Args:
        steps (Mapping[int, Mapping]): The figures by step.
        since (int, optional): Leave out earlier steps.

    Returns:
        dict: `steps`, `norms` and `thresholds` of the points, and `steps_in_all`; None without a step.
    """
    known = [
        (step, figures["token_norm_max"], figures["threshold"])
        for step in sorted(steps)
        if (since is None or step >= since) and (figures := steps[step])["token_norm_max"] is not None
    ]
    if not known:
        return None
    size = -(-2 * len(known) // POINTS)
    kept = known
    if size > 2:
        kept = []
        for start in range(0, len(known), size):
            part = known[start : start + size]
            ends = (min(part, key=lambda point: severity(point[1])), max(part, key=lambda point: severity(point[1])))
            kept += sorted(set(ends), key=lambda point: point[0])
    numbers, norms, thresholds = zip(*kept, strict=True)
    return {
        "steps": [*numbers],
        "norms": rounded([*norms]),
        "thresholds": rounded([*thresholds]),
        "steps_in_all": len(known),
    }


def steps_before(steps: Mapping[int, Mapping[str, float | None]], step: int) -> dict[str, Any] | None:
    """The steps before a spike and its own; None where no step before it is known.

    Args:
        steps (Mapping[int, Mapping]): The figures by step; None where there is no data.
        step (int): The step of the spike.

    Returns:
        dict: `steps`, at most 21 numbers of steps in order; `figures`, for each figure with data its `name` and its
            `values` in these steps.
    """
    numbers = [known for known in range(step - STEPS_BEFORE, step + 1) if known in steps]
    if not numbers or numbers[0] == step:
        return None
    rows = [rounded(steps[known]) for known in numbers]
    found = {name: [row[name] for row in rows] for name in FIGURES}
    return {
        "steps": numbers,
        "figures": [
            {"name": name, "values": values}
            for name, values in found.items()
            if any(value is not None for value in values)
        ],
    }
