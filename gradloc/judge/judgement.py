# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is judged of a line: a spike's verdict and summary, from the facts in the line alone."""

from collections.abc import Mapping
from typing import Any

from ..facts import Place, TrainedRow
from ..guarded import guarded
from ..lines import Answer, kind_of
from . import critic
from .sentences import clips_in_words, describe
from .verdict import verdict


def judged(line: Mapping[str, Any], rows: Mapping[Place, TrainedRow] | None = None) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; a drill has no verdict, because its cause is the drill.

    It needs nothing but the line, so that an old one can be judged by newer rules.

    Args:
        rows (Mapping, optional): Those of an event's mini-batch.
    """
    found: Any = dict(line)  # a type is known from its kind alone
    if (kind := kind_of(line)) == "spike":
        found["verdict"] = None if found.get("drill") else verdict(found, rows)
        return {**found, "summary": describe(found)}
    found |= {"summary": "", **({"cause": None} if kind == "critic" else {})}
    with guarded("a line of the evidence could not be judged"):
        if kind == "clip":
            found["summary"] = clips_in_words(found["token_clip"])
        else:
            found |= {"cause": critic.cause(found), "summary": critic.summary(found)}
    return found


def judged_in_training(
    line: Mapping[str, Any], answer: Answer | None, rows: Mapping[Place, TrainedRow] | None
) -> dict[str, Any]:
    """A line with what is judged of it at the end of its update, of which the judge has said this."""
    if kind_of(line) != "spike":
        return judged(line)
    of_run = {} if answer is None else {name: answer[name] for name in ("identities", "warnings")}
    return judged({**line, **of_run}, rows)
