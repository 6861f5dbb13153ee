# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks what a checkpoint has of the run: a file may be of another release, or damaged."""

import reprlib
from collections.abc import Mapping
from typing import Any

from .config import is_finite_number
from .guarded import ForeseenError


def checked(value: Any, like: Any, name: str) -> Any:
    """A saved value that is like another one: it has its keys, and only numbers that are finite and not negative.

    Args:
        like (Any): A number, a list (of numbers, however many), or a mapping of such values.
        name (str): What the error calls the value.

    Raises:
        ForeseenError: It is not.
    """
    if isinstance(like, Mapping):
        if isinstance(value, Mapping) and like.keys() <= value.keys():
            for key in like:
                checked(value[key], like[key], f"{name}.{key}")
            return value
    elif isinstance(like, list):
        if isinstance(value, list):
            for each in value:
                checked(each, 0.0, name)
            return value
    elif is_finite_number(value) and value >= 0:
        return value
    raise ForeseenError(f"{name} is {reprlib.repr(value)}, and not like {like!r}")
