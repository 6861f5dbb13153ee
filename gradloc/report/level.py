# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The level of the token norm over a run, thinned to what a chart can show."""

from collections.abc import Mapping
from typing import Any

from .figures import rounded, severity

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
        (number, figures["token_norm_max"], figures["threshold"])
        for number, figures in ((number, steps[number]) for number in sorted(steps))
        if figures["token_norm_max"] is not None and (since is None or number >= since)
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
    return {
        "steps": [number for number, _, _ in kept],
        "norms": [*rounded({str(number): norm for number, norm, _ in kept}).values()],
        "thresholds": [*rounded({str(number): threshold for number, _, threshold in kept}).values()],
        "steps_in_all": len(known),
    }
