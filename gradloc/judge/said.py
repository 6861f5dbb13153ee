# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of what a warning or a verdict says."""

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
