# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is judged of a line: a spike's verdict and summary, from the facts in the line alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..guarded import guarded
from ..lines import RunWarning, kind_of
from ..sums import Place, TrainedRow
from . import critic
from .loss import OF_LOSS
from .misfire import verdict_by_rows
from .rows import OF_GROUPS
from .sentences import clips_in_words, describe
from .verdict import verdict


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


def judged_in_training(
    line: Mapping[str, Any], warnings: Sequence[RunWarning], rows: Mapping[Place, TrainedRow] | None
) -> dict[str, Any]:
    """A line with what is judged of it at the end of its update, whose warnings these are, and by its rows."""
    if kind_of(line) != "spike":
        return judged(line)
    # What was known with the spike, and what its update has shown; but a wrong loss is that of single mini-batches.
    names, known = {each["name"] for each in warnings}, {each["name"] for each in line.get("warnings", [])}
    found = [each for each in line.get("warnings", []) if each["name"] not in names]
    found += [each for each in warnings if each["name"] in known or each["name"] not in OF_LOSS]
    event: Any = judged({**line, "warnings": sorted(found, key=lambda each: each["name"] in OF_GROUPS)})
    if rows is not None:
        with guarded("a gradient spike is not compared with the rewards of its mini-batch"):
            event["verdict"] = verdict_by_rows(event, rows)
    return event
