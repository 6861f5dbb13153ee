# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Statistics that outliers hardly move."""

from collections.abc import Collection
from statistics import median

# For normal numbers: standard deviation over median absolute deviation.
_PER_MEDIAN_DEVIATION = 1.4826


def median_and_deviation(values: Collection[float]) -> tuple[float, float]:
    """The median, and the median absolute deviation scaled to the standard deviation of normal numbers."""
    middle = median(values)
    return middle, _PER_MEDIAN_DEVIATION * median(abs(value - middle) for value in values)
