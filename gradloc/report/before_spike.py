# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of the steps before a spike."""

from collections.abc import Mapping
from typing import Any

from .figures import rounded
from .meanings import FIGURES

# How many steps before a spike are shown.
STEPS_BEFORE = 20


def steps_before(steps: Mapping[int, Mapping[str, float | None]], step: int) -> dict[str, Any] | None:
    """The steps before a spike and its own; None where no step before it is known.

    Args:
        steps (Mapping[int, Mapping]): The figures by step; None where there is no data.
        step (int): The step of the spike.

    Returns:
        dict: `steps`, at most 21 numbers of steps in order; `figures`, for each figure with data its `name` and its
            `values` in these steps.
    """
    numbers = [number for number in range(step - STEPS_BEFORE, step + 1) if number in steps]
    if not numbers or numbers[0] == step:
        return None
    rows = [rounded(steps[number]) for number in numbers]
    found = {name: [row[name] for row in rows] for name in FIGURES}
    return {
        "steps": numbers,
        "figures": [
            {"name": name, "values": values}
            for name, values in found.items()
            if any(value is not None for value in values)
        ],
    }
