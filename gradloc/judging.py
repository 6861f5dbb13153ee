# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the package gradloc_judge what is wrong with a spike, or with the run.

It comes with GradLoc's wheel, and not with the patch: its rules can be renewed without patching anew. Where rank 0 does
not have it, training writes facts alone, and `gradloc report` judges them later.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from .guarded import guarded
from .lines import RunWarning, kind_of
from .sums import Place, RewardedRow
from .version import __version__

logger = logging.getLogger(__name__)


@functools.cache
def judge() -> ModuleType | None:
    """The package, if it is installed in the version of this one; otherwise a warning says so, once in a process."""
    try:
        import gradloc_judge
    except Exception as error:  # whatever is wrong with a wheel, training goes on
        why = f"{type(error).__name__}: {error}"
    else:
        if gradloc_judge.__version__ == __version__:
            return gradloc_judge
        why = f"its version is {gradloc_judge.__version__}, and the patch's {__version__}"
    logger.warning(
        "Spikes are written without verdicts, and nothing warns of faults of the run, as there is no wheel of GradLoc "
        "beside rank 0 (%s). Run pip install . in GradLoc's checkout there; gradloc report judges such spikes later.",
        why,
    )
    return None


def judged(
    line: Mapping[str, Any], warnings: Sequence[RunWarning] = (), rows: Mapping[Place, RewardedRow] | None = None
) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; without the judge, with empty ones.

    Args:
        line (Mapping): An event, a clip line or a critic's spike.
        warnings (Sequence): Those of its update.
        rows (Mapping, optional): All rows of an event's mini-batch.
    """
    if (found := judge()) is not None:
        with guarded("a line of the evidence could not be judged"):
            return found.judged_in_training(line, warnings, rows)
    of_kind = {"spike": {"verdict": None}, "critic": {"cause": None}}.get(kind_of(line), {})
    return {**line, **of_kind, "summary": ""}


def in_one_line(line: Mapping[str, Any]) -> str:
    """The verdict with its check, then the summary, for logs and trackers; where nothing is judged, the facts.

    Args:
        line (Mapping): An event, a clip line or a critic's spike.
    """
    verdict = line.get("verdict") or {}
    parts = (verdict.get("sentence"), verdict.get("check"), line.get("summary"))
    if text := " ".join(str(part) for part in parts if part):
        return text
    with guarded("a line of the evidence is not in the log"):
        return _facts(line)
    return ""


def _facts(line: Mapping[str, Any]) -> str:
    if (kind := kind_of(line)) == "clip":
        return f"{sum(line['token_clip']['over'].values())} backward signals over their bounds."
    if kind == "critic":
        return f"its largest norm is {float(line['token_norm']) / line['threshold']:.3g} times its threshold."
    culprits = line["culprits"]
    found = f"diagnosis {line['diagnosis']} after {line['passes']} passes, {len(culprits)} culprits"
    if not culprits:
        return f"{found}."
    first = culprits[0]
    token = "" if first.get("token") is None else f" {first['token']!r}"
    place = f"position {first['position']} of row {first['row']} of rank {first['rank']}"
    times = float(first["grad_norm"]) / line["threshold"]
    return f"{found}; the largest:{token} at {place}, {times:.3g} times the threshold, source {first['source']}."
