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


def judged(
    line: Mapping[str, Any], rows: Mapping[Place, TrainedRow] | None = None, answer: Answer | None = None
) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; a drill has no verdict, because its cause is the drill.

    It needs nothing but the line, so that an old one can be judged by newer rules.

    Args:
        rows (Mapping, optional): Those of an event's mini-batch.
        answer (dict, optional): What the judge has said of an event's update; default: what the event has of that.
    """
    found: Any = dict(line)  # a type is known from its kind alone
    if (kind := kind_of(line)) == "spike":
        found |= {} if answer is None else {name: answer[name] for name in ("identities", "warnings")}
        found["verdict"] = None if found.get("drill") else verdict(found, rows)
        return {**found, "summary": describe(found)}
    found |= {"summary": "", **({"cause": None} if kind == "critic" else {})}
    with guarded("a line of the evidence could not be judged"):
        if kind == "clip":
            found["summary"] = clips_in_words(found["token_clip"])
        else:
            found |= {"cause": critic.cause(found), "summary": critic.summary(found)}
    return found
