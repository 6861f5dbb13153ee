# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of what a warning or a verdict says, and the counts and shares in it."""

import math
from collections.abc import Mapping
from typing import Any

from ..lines import Said


def said(claim: str, rest: str, check: str, evidence: str = "") -> Said:
    """What a warning or a verdict says: its sentence is the claim, the evidence in brackets, and the rest."""
    brackets = f" ({evidence})" if evidence else ""
    return {"claim": claim, "evidence": evidence, "sentence": claim + brackets + rest, "check": check}


def claim_of(found: Mapping[str, Any]) -> str:
    """The claim of a warning or a verdict; of one of an older release, which has none, its sentence."""
    return str(found.get("claim", found["sentence"].removesuffix(".")))


def lowered(sentence: str) -> str:
    """A sentence to come after a colon: with a small letter, unless its first word has other capitals."""
    rest = sentence.partition(" ")[0][1:]
    return sentence[:1].lower() + sentence[1:] if rest == rest.lower() else sentence


def count(n: int, noun: str, plural: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def counted(n: int, total: int, what: str = "") -> str:
    """A part of a total, in words; `what` is the plural of what is counted."""
    if n == total == 1:
        return f"the only {what.removesuffix('s') or 'one'}"
    words = f"{n} of {total}" if n < total else "both" if n == 2 else f"all {n}"
    return f"{words} {what}".rstrip()


def percent(share: float | str | None) -> str:
    """A share, rounded, but not to 0% or 100% where it is neither; "–" if it is not known."""
    value = math.nan if share is None else float(share)
    if not math.isfinite(value):
        return "–"
    if value >= 10:
        return f"{value:,.0f} times"
    if 0 < value < 0.01:
        return "under 1%"
    return "over 99%" if 0.99 < value < 1 else f"{value:.0%}"
