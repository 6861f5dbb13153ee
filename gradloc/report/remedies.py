# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a replay's table of remedies says, for a spike and for a source."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..threshold import is_over
from .figures import number, percent, severity
from .meanings import ADVICE

# Sources that point to a bug, which a remedy only covers up.
_BUGS = ("nonfinite", "retokenized", "misaligned", "unsampled")


def best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first row of a table that is under its threshold and can be turned on; None if there is none.

    Args:
        rows (Sequence[Mapping]): `remedies` of a replay's result, best first; those without `left` were only estimated.
    """
    return next((row for row in rows if row.get("under") and row.get("override")), None)


def remedy_in_words(row: Mapping[str, Any]) -> str:
    """What a remedy leaves of a spike, and its price; without a full stop."""
    left, moved = (None if row[name] is None else number(row[name]) for name in ("left", "ordinary_moved"))
    leaves = f"a norm of {number(row['norm']):.3g}" if left is None else f"{percent(left)} of the norm"
    price = "" if moved is None else f" and moves the gradient of the ordinary tokens by {percent(moved)}"
    return f"{row['name']} fits best: it leaves {leaves}{price}"


def advice_by_source(replays: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What to do about each source: the remedy that fits best in the latest replay of it, else a general sentence.

    Where a source points to a bug, the general sentence comes first: a remedy does not repair it. A replay counts for
    the source of its largest culprit, if its spike came back and remedies were measured.

    Args:
        replays (Sequence[Mapping]): The results of replays, in the order of their events.
    """
    found = dict(ADVICE)
    for result in replays:
        culprits = [token for token in result["tokens"] if token["culprit"] and token["source"] in ADVICE]
        first = best(result["remedies"])
        if first is None or not culprits or not result["units"]:
            continue
        unit = result["units"][0]
        if not is_over(number(unit["replayed"]), number(unit["threshold"])):
            continue
        source = max(culprits, key=lambda token: severity(token["replayed"]))["source"]
        step = "" if result["global_step"] is None else f" of step {result['global_step']}"
        advice = f"In the replay{step}, {remedy_in_words(first)}: {first['override']}"
        found[source] = f"{ADVICE[source]} {advice}" if source in _BUGS else advice
    return found
