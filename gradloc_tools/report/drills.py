# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What drills have shown: spikes planted to see that they are found. They are no spikes of the run."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from .explanation import ended_early
from .figures import clipped, count, short, threshold_factor

# In the warm-up of an automatic threshold, τ may be a number that no norm reaches.
_UNREACHABLE = 1e29

# A mini-batch: its step, PPO epoch and index.
MiniBatch = tuple[int | None, int, int]


def mini_batch_of(event: Mapping[str, Any]) -> MiniBatch:
    return event["global_step"], event["epoch"], event["mini_batch"]


def drill_report(event: Mapping[str, Any], spikes: Collection[MiniBatch]) -> dict[str, Any]:
    """A drill in words.

    Args:
        event (Mapping): Its event.
        spikes (Collection): The mini-batches with a spike.

    Returns:
        dict: `global_step`, `found`, `passes`, `seconds`, `planted`, `level`; `text`, a sentence; `advice`, what to
            look at, empty for a drill that succeeded.
    """
    drill = event["drill"]
    planted = drill["planted"]
    where = "" if event["global_step"] is None else f" in step {event['global_step']}"
    cost = f"{count(drill['passes'], 'extra pass', 'extra passes')}, {short(round(event['seconds'], 2))} s"
    if drill["found"]:
        text = f"Drill{where}: the planted token was found, {cost}."
    else:
        text = f"Drill{where} FAILED: {_planted(planted)} was not found, {cost}."
    return {
        "global_step": event["global_step"],
        "found": drill["found"],
        "passes": drill["passes"],
        "seconds": event["seconds"],
        "planted": None if planted is None else {name: planted[name] for name in ("rank", "row", "position")},
        "level": float(event["threshold"]) * threshold_factor(event["trigger"]),
        "text": text,
        "advice": [] if drill["found"] else _advice(event, mini_batch_of(event) in spikes),
    }


def _planted(place: Mapping[str, Any] | None) -> str:
    if place is None:
        return "a planted token"
    return f"the planted token (rank {place['rank']}, row {place['row']}, position {place['position']})"


def _advice(event: Mapping[str, Any], spike_there: bool) -> list[str]:
    advice = ["Do not rely on spike_detection in this configuration before a drill succeeds."]
    threshold = float(event["threshold"])
    if not math.isfinite(threshold) or threshold >= _UNREACHABLE:
        advice.append(
            "The threshold was not finite, or that of the warm-up of grad_norm_threshold=auto: set a number, or make "
            "the drill after the warm-up."
        )
    if event["error"] is not None:
        advice.append(f"It failed with an error: {str(clipped(event['error'])).rstrip('.')}.")
    elif ended_early(event) and event["drill"]["passes"] >= event["budget"]:
        advice.append(f"Its budget of {count(event['budget'], 'pass', 'passes')} was spent: raise bisect_budget_steps.")
    if spike_there:
        advice.append("The same mini-batch has a spike of its own, which may hide the planted one: drill another step.")
    if len(advice) == 1:
        advice.append("The event names no reason: compare the gradient norms of its units with their thresholds.")
    return advice
