# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the remedies that a replay measured fits, and what that says of each source; without torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.rules import FAULTS, SOURCES
from ..threshold import is_over
from ..tools.figures import percent, severity

# The row of the table of remedies that is no remedy: the loss without tokens that the policy did not produce.
REPAIR = "response_mask"
# A remedy that leaves more of what the culprits add to the norm is not recommended.
_MOST_LEFT = 0.5
# One that moves the ordinary tokens' gradient by more is as good as a skipped step for them.
MOST_MOVED = 0.5


def best(rows: Sequence[Mapping[str, Any]], most: float = math.inf) -> Mapping[str, Any] | None:
    """The first row of a table that is under its threshold and can be turned on; None if there is none.

    Args:
        rows (Sequence[Mapping]): `remedies` of a replay's result, best first.
        most (float): The largest norm that it may leave.
    """
    usable = (row for row in rows if row["under"] and row["override"])
    return next((row for row in usable if float(row["norm"]) <= most), None)


def recommended(result: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The remedy that a replay recommends, or None, and a sentence on it, or on why there is none.

    Args:
        result (Mapping): A replay's result, with measured remedies and a micro-batch.
    """
    unit = result["units"][0]
    replayed, rest = float(unit["replayed"]), unit["rest"]
    if not is_over(replayed, float(unit["threshold"])):
        return None, "Without a spike there is nothing to remedy."
    if cause := _bug(result):
        repaired = next((row for row in result["remedies"] if row["name"] == REPAIR and cause == "unsampled"), None)
        what = "" if repaired is None else f" Without these tokens, the norm is {float(repaired['norm']):.3g}."
        return None, f"No remedy is recommended: the cause is {cause}, which a remedy only covers up.{what}"
    if not result.get("same_weights", True):
        return None, (
            "No remedy is recommended, because these are probably not the weights of training: give --model those of "
            "the last checkpoint before the spike."
        )
    if best(result["remedies"]) is None:
        return None, "No remedy that could be computed brings it under its threshold."
    ordinary = 0.0 if rest is None or not float(rest) < replayed else float(rest)
    most = ordinary + _MOST_LEFT * (replayed - ordinary) if math.isfinite(replayed) else math.inf
    first = best(result["remedies"], most)
    if first is None:
        what = "what the culprits add to the norm" if ordinary else "the norm"
        return None, f"No remedy helps: each that brings it under its threshold leaves over half of {what}."
    return first, f"{remedy_in_words(first)}: {first['override']}"


def _bug(result: Mapping[str, Any]) -> str | None:
    """The cause to be repaired: of the verdict, of the scale, or, of older results, the largest culprit's source."""
    cause, source = result.get("cause"), _source(result)
    if cause is not None and (cause not in SOURCES or cause in FAULTS):
        return cause
    if result.get("scale") is not None:
        return "loss_scale"
    if "cause" in result:
        return None
    return source if source in FAULTS else None


def _source(result: Mapping[str, Any]) -> str | None:
    """The source of the largest culprit; None if that is not known."""
    culprits = [token for token in result["tokens"] if token["culprit"] and token["source"] in SOURCES]
    return max(culprits, key=lambda token: severity(token["replayed"]))["source"] if culprits else None


def remedy_in_words(row: Mapping[str, Any]) -> str:
    """What a remedy leaves of a spike, and its price; without a full stop."""
    left, moved = (None if row[name] is None else float(row[name]) for name in ("left", "ordinary_moved"))
    leaves = f"a norm of {float(row['norm']):.3g}" if left is None else f"{percent(left)} of the norm"
    price = "" if moved is None else f" and moves the gradient of the ordinary tokens by {percent(moved)}"
    if moved is not None and moved > MOST_MOVED:
        price += ", for which it is a skipped step"
    return f"{row['name']} fits best: it leaves {leaves}{price}"


def advice_by_source(replays: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What to do about each source: the remedy that the latest replay of it recommends, else a general sentence.

    A replay counts for the source of its largest culprit, if remedies were measured.

    Args:
        replays (Sequence[Mapping]): The results of replays, in the order of their events.
    """
    found = {name: rule.advice for name, rule in SOURCES.items()}
    for result in replays:
        source = _source(result)
        if source is None or not result["units"] or "remedy_notes" not in result:
            continue
        first, sentence = recommended(result)
        if first is not None:
            step = "" if result["global_step"] is None else f" of step {result['global_step']}"
            found[source] = f"In the replay{step}, {sentence}"
    return found
