# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Sums of many numbers without a few of them, with the same bits as if the others were added again."""

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

# A number's 53 bits are added up in two parts, so that sums of 2**36 of them fit into 64 bits.
_BITS, _LOW_BITS = 53, 27

# `math.fsum` adds this many numbers as fast as tensors do.
_FEW = 1000


class ExactSum:
    """The exact sum of some numbers, as a few floats that add up to it.

    `math.fsum` rounds once, at its end. So subtracting a few numbers from the exact sum gives the same bits as adding
    all the others, in far less time.

    Args:
        values (Tensor): The numbers, finite, float64 of shape (n,).
    """

    def __init__(self, values: Tensor) -> None:
        self._parts: list[float] = []
        left = _exact(values)
        while left:
            self._parts.append(float(left))
            left -= Fraction(self._parts[-1])

    def without(self, values: Iterable[float] = ()) -> float:
        """The sum of the other numbers if `values` are some of them."""
        return math.fsum([*self._parts, *(-value for value in values)])


def exact_sum(values: Tensor) -> float:
    """The bits that `math.fsum` gives; `values` as in `ExactSum`."""
    return math.fsum(values.tolist()) if len(values) <= _FEW else float(_exact(values))


def _exact(values: Tensor) -> Fraction:
    """The sum as a fraction. What tensors add are integers, of numbers with the same exponent; so any order will do."""
    if not values.isfinite().all():
        raise ValueError("a token's weight or suspicion is not finite")
    if not len(values):
        return Fraction(0)
    mantissas, exponents = torch.frexp(values)
    integers = (mantissas * 2.0**_BITS).long()
    least = int(exponents.min())
    exponents = exponents.long() - least
    sums = torch.zeros(2, int(exponents.max()) + 1, dtype=torch.int64)
    sums[0].index_add_(0, exponents, integers >> _LOW_BITS)
    sums[1].index_add_(0, exponents, integers & (1 << _LOW_BITS) - 1)
    by_exponent = enumerate(zip(*sums.tolist(), strict=True))
    total = sum(((high << _LOW_BITS) + low) << exponent for exponent, (high, low) in by_exponent)
    return total * Fraction(2) ** (least - _BITS)
