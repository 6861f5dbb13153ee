# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Sums of many numbers without a few of them, with the same bits as if the others were added again."""

import math
from collections.abc import Iterable, Sequence


class ExactSum:
    """The exact sum of some numbers, as a few floats that add up to it.

    `math.fsum` rounds once, at its end. So subtracting a few numbers from the exact sum gives the same bits as adding
    all the others, in far less time.

    Args:
        values (Sequence[float]): The numbers, finite.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._parts: list[float] = []
        while left := math.fsum([*values, *(-part for part in self._parts)]):
            self._parts.append(left)

    def without(self, values: Iterable[float] = ()) -> float:
        """The sum of the other numbers if `values` are some of them."""
        return math.fsum([*self._parts, *(-value for value in values)])
