# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Converts values of the evidence to numbers for comparison, and to text."""

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.said import count as count
from ..judge.said import counted, percent
from ..threshold import threshold_factor

# Up to so many things, a share of them is said as a count.
COUNTED = 20
# Longer texts lose their middle.
TEXT_CHARACTERS, SHORT_CHARACTERS = 4000, 200
_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def severity(norm: float | str) -> float:
    """A norm of the evidence, where NaN and infinities are strings, to sort by: NaN is worse than any number."""
    value = float(norm)
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
    text = f"{float(value):,.0f}" if 1e4 <= abs(float(value)) < 1e7 else f"{float(value):.4g}"
    return text.replace("nan", "NaN").replace("inf", "∞")


def short_factor(part: Mapping[str, Any]) -> str:
    """`threshold_factor` as short text, with enough digits to tell it from 1."""
    factor = threshold_factor(part)
    return f"{factor:.2f}" if factor < 10 and abs(factor - 1) >= 0.005 else short(factor)


def times(norm: Any, threshold: Any) -> str:
    """How often a norm has its threshold, as "14×"; more digits for what is small, and for what is hardly over 1."""
    factor = threshold_factor({"norm": norm, "threshold": threshold})
    if not math.isfinite(factor):
        return "not finite"
    if 1 < factor < 1.05:
        return f"{factor:.4g}×"
    if factor >= 1e7:
        return f"{factor:.3g}×"
    return f"{factor:,.0f}×" if factor >= 9.95 else f"{factor:.{2 if factor < 0.0995 else 1}f}×"


def visible(text: str) -> str:
    """The text with control characters and the like as signs or escaped: it comes from a model, and is to be read."""
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return _SIGNS.get(character) or character.encode("unicode_escape", "surrogatepass").decode()


def quoted(token: str) -> str:
    """A token whose spaces at the ends can be seen."""
    text = visible(token)
    bare = text.strip(" ")
    start = text.index(bare) if bare else len(text)
    return "␣" * start + bare + "␣" * (len(text) - start - len(bare)) or "(empty)"


def clipped(text: Any, most: int = TEXT_CHARACTERS) -> str | None:
    """A text without its middle if it is longer than `most`; what is no text as JSON; None as it is."""
    if text is None:
        return None
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def shown(text: Any, most: int = SHORT_CHARACTERS) -> str:
    """A text of the evidence, cut and visible; "–" where there is none."""
    return "–" if text is None else visible(str(clipped(text, most)))


def part_of(n: int, total: int) -> str:
    """How many of some: up to twenty as "1 of 2", "both" or "all 3", from there as a share."""
    return percent(n / total) if total > COUNTED else counted(n, total)


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
