# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of what a warning or a verdict says, and the counts and shares in it."""

from collections.abc import Mapping
from typing import Any

from ..lines import Said


def said(claim: str, rest: str, check: str, evidence: str = "") -> Said:
    """What a warning or a verdict says: its sentence is the claim, the evidence in brackets, and the rest."""
    brackets = f" ({evidence})" if evidence else ""
    return {"claim": claim, "evidence": evidence, "sentence": claim + brackets + rest, "check": check}


def said_again(found: Mapping[str, Any]) -> Said:
    """What a warning or a verdict says; where one of another release has no claim, its whole sentence is one."""
    claim, evidence = found.get("claim", found["sentence"].removesuffix(".")), found.get("evidence", "")
    return {"claim": claim, "evidence": evidence, "sentence": found["sentence"], "check": found["check"]}


def counted(count: int, total: int, what: str = "culprits") -> str:
    """A part of a total, in words; `what` is the plural of what is counted."""
    if count == total:
        return f"the one {what.removesuffix('s')}" if total == 1 else f"{all_of(total)} {what}"
    return f"{count} of {total} {what}"


def all_of(total: int) -> str:
    """All of several things, in words, before their name."""
    return "both" if total == 2 else f"all {total}"


def percent(share: float) -> str:
    """A share, rounded, but not to 0% or 100% where it is neither."""
    if 0 < share < 0.01:
        return "under 1%"
    return "over 99%" if 0.99 < share < 1 else f"{share:.0%}"
