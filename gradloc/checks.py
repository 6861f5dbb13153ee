# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a setting may be."""

import sys
from typing import TypeGuard


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold, NaN and infinities left out; a bool is not a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_positive_integer(value: object) -> TypeGuard[int]:
    """Whether it is an int of at least 1; a bool is not an int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
