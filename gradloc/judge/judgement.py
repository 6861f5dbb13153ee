# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is judged of a line: a spike's verdict and summary, from the facts in the line alone."""

from collections.abc import Mapping
from typing import Any

from ..guarded import guarded
from . import critic
from .sentences import clips_in_words, describe
from .verdict import verdict


def kind_of(line: Mapping[str, Any]) -> str:
    """What a line of an update is: "spike", "clip" (see TokenClip) or "critic"."""
    return "clip" if "token_clip" in line else "critic" if "values" in line else "spike"


def judged(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; a drill has no verdict, because its cause is the drill.

    It needs nothing but the line: who reads an old one can judge it by newer rules.
    """
    found: Any = dict(line)  # a type is known from its kind alone
    if (kind := kind_of(line)) == "spike":
        return {**found, "verdict": None if found.get("drill") else verdict(found), "summary": describe(found)}
    found |= {"summary": "", **({"cause": None} if kind == "critic" else {})}
    with guarded("a line of the evidence could not be judged"):
        if kind == "clip":
            found["summary"] = clips_in_words(found["token_clip"])
        else:
            found |= {"cause": critic.cause(found), "summary": critic.summary(found)}
    return found
