# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the package gradloc_judge what is wrong with a spike, or with the run.

It comes with GradLoc's wheel, and not with the patch: rules change without patching anew, as long as the facts are the
same (`FACTS`). Where rank 0 does not have it, training writes facts alone, and `gradloc report` judges spikes later.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from .guarded import guarded
from .lines import RunWarning, kind_of
from .sums import Place, TrainedRow
from .version import FACTS

logger = logging.getLogger(__name__)


@functools.cache
def judge() -> ModuleType | None:
    """The package, if it is installed and takes these facts; otherwise a warning says so, once in a process."""
    try:
        import gradloc_judge

        facts = gradloc_judge.FACTS
    except Exception as error:  # whatever is wrong with a wheel, training goes on
        why = f"{type(error).__name__}: {error}"
    else:
        if facts == FACTS:
            return gradloc_judge
        why = f"it takes facts of version {facts}, and the patch has version {FACTS}"
    logger.warning(
        "Spikes are written without verdicts, and nothing warns of faults of the run, as this process has no wheel of "
        "GradLoc that fits (%s). Run pip install . in its checkout. gradloc report judges spikes later, but not the "
        "run.",
        why,
    )
    return None


def asked(question: Callable[[Any], Any], otherwise: Any = None) -> Any:
    """The judge's answer; something else where there is no judge, or after an error in it."""
    if (found := judge()) is not None:
        with guarded("the judge of spikes and of the run gives no answer"):
            return question(found)
    return otherwise


def judged(
    line: Mapping[str, Any], warnings: Sequence[RunWarning] = (), rows: Mapping[Place, TrainedRow] | None = None
) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; without the judge, with empty ones.

    Args:
        line (Mapping): An event, a clip line or a critic's spike.
        warnings (Sequence): Those of its update.
        rows (Mapping, optional): All rows of an event's mini-batch.
    """
    of_kind = {"spike": {"verdict": None}, "critic": {"cause": None}}.get(kind_of(line), {})
    unjudged = {**line, **of_kind, "summary": ""}
    return asked(lambda judge: judge.judged_in_training(line, warnings, rows), unjudged)


def in_one_line(line: Mapping[str, Any]) -> str:
    """The verdict with its check, then the summary, for logs and trackers; where nothing is judged, the facts.

    Args:
        line (Mapping): An event, a clip line or a critic's spike.
    """
    verdict = line.get("verdict") or {}
    parts = (verdict.get("sentence"), verdict.get("check"), line.get("summary"))
    text = " ".join(str(part) for part in parts if part)
    if text or kind_of(line) != "spike":
        return text or "it is not judged."
    tokens = line["culprits"] or line.get("suspected", ())
    places = [f"{each['rank']}, {each['row']}, {each['position']} ({each.get('source')})" for each in tokens[:3]]
    return (
        f"diagnosis {line.get('diagnosis')}; {len(tokens)} tokens (rank, row, position, source): {'; '.join(places)}."
    )
