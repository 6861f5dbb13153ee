# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Converts values of the evidence to numbers for comparison, and to text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradloc.evidence.shares import threshold_factor


def number(value: float | str) -> float:
    """A number of the evidence, where NaN and infinities are strings."""
    return float(value)


def severity(norm: float | str) -> float:
    """A norm to sort by: NaN is worse than any number."""
    value = number(norm)
    return math.inf if math.isnan(value) else value


def culprit_factor(culprit: Mapping[str, Any]) -> float:
    """`threshold_factor` of a culprit."""
    return threshold_factor({"norm": culprit["grad_norm"], "threshold": culprit["threshold"]})


def excess(part: Mapping[str, Any]) -> float:
    """The sort key of parts: how far they are over their threshold."""
    return severity(threshold_factor(part))


def rounded(value: Any) -> Any:
    """The same with finite floats rounded to five significant digits: a number, or those in dicts and lists."""
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value


def short(value: float | str | None) -> str:
    """Four digits, or the whole number where that is longer but can be read."""
    if value is None:
        return "–"
    text = f"{number(value):,.0f}" if 1e4 <= abs(number(value)) < 1e7 else f"{number(value):.4g}"
    return text.replace("nan", "NaN").replace("inf", "∞")


def short_factor(part: Mapping[str, Any]) -> str:
    """`threshold_factor` as short text, with enough digits to tell it from 1."""
    factor = threshold_factor(part)
    return f"{factor:.2f}" if factor < 10 and abs(factor - 1) >= 0.005 else short(factor)


def visible(text: str) -> str:
    """The text with control characters and the like escaped: it comes from a model and goes to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def percent(share: float) -> str:
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def count(n: int, noun: str, plural: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Ascending numbers as "0 to 3, 7"; "…" stands for all ranges after the first `most`."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1][1:] = [n]
        else:
            found.append([n])
    texts = [" to ".join(map(str, ends)) for ends in found[:most]]
    return ", ".join(texts + ["…"] * (len(found) > most))
