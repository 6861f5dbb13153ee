# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the value of a setting may be."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import Refused
from .hydra import split_list


@dataclass(frozen=True)
class Pattern:
    """A regular expression for the whole value, within Hydra's grammar, and how a sentence says it."""

    regex: str
    description: str

    def accepts(self, value: str) -> bool:
        return re.fullmatch(self.regex, value) is not None


_EXPONENT = r"([eE][+-]?[0-9]+)?"
_AMOUNT = r"((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)" + _EXPONENT

COUNT = Pattern(r"[1-9][0-9]{0,8}", "an integer of at least 1")
FEW = Pattern(r"[1-9][0-9]{0,2}", "an integer from 1 to 999")
AMOUNT = Pattern(_AMOUNT, "a number of at least 0")
POSITIVE = Pattern(r"([1-9][0-9]*(\.[0-9]*)?|0?\.[0-9]*[1-9][0-9]*)" + _EXPONENT, "a number over 0")
OVER_1 = Pattern(r"([2-9]|[1-9][0-9]+)(\.[0-9]*)?|1\.0*[1-9][0-9]*", "a number over 1")


class Text(enum.Enum):
    """Values that reach verl character by character."""

    ONE = "text"
    LIST = "comma-separated list"
    DIRECTORY = "a directory"


Allowed = Text | Sequence[Pattern | str]
"""A text, or a choice of patterns and words."""


def description(allowed: Allowed) -> str:
    """The values as a sentence names them: `log, skip or drop`."""
    if isinstance(allowed, Text):
        return allowed.value
    choices = [choice.description if isinstance(choice, Pattern) else choice for choice in allowed]
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))


def check(name: str, value: str, allowed: Allowed) -> None:
    """Raises Refused, with a sentence that says what to give, if the setting may not have the value."""
    if isinstance(allowed, Text):
        _check_text(name, value, allowed)
    elif not any(choice.accepts(value) if isinstance(choice, Pattern) else choice == value for choice in allowed):
        raise Refused(f"{name} is '{value}': give {description(allowed)}")


def _check_text(name: str, value: str, kind: Text) -> None:
    # Texts are quoted for Hydra. These are the ones that no quoting can carry through verl.
    if "${" in value:
        raise Refused(f"{name} is '{value}': verl would resolve the ${{ in it, so write out what it stands for")
    if "???" in split_list(value):
        raise Refused(f"{name} is '{value}': ??? means a missing value to Hydra, so give another")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"{name} is not valid UTF-8: rename what it names") from None
    if kind is Text.DIRECTORY and "://" in value:
        raise Refused(f"{name} is '{value}': give a directory, on several nodes one that all of them share")
