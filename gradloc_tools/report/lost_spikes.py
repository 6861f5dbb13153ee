# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether spikes.jsonl has the spikes that steps.jsonl counts."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from .figures import count, ranges

# The note of a file that is full: from its step on, no spike is written.
_FULL = "size_limit"


def lost_spikes(
    steps: Mapping[int, Mapping[str, Any]],
    read: Mapping[int, int],
    left_out: Collection[tuple[str, int]],
    since: int | None = None,
) -> str | None:
    """A sentence on spikes that are counted and cannot be read, with what to do; None if there are none.

    Args:
        steps (Mapping[int, Mapping]): The figures by step.
        read (Mapping[int, int]): The number of spikes that were read, by step.
        left_out (Collection): The kinds and steps of the notes, which say what the writer itself has left out.
        since (int, optional): Leave out earlier steps.
    """
    full_from = min((step for kind, step in left_out if kind == _FULL), default=math.inf)
    known = {step for _, step in left_out}
    lost, counted = [], 0
    for step in sorted(steps):
        if step in known or step >= full_from or (since is not None and step < since):
            continue
        triggered = steps[step]["triggered"]
        if triggered is not None and math.isfinite(triggered) and triggered > read.get(step, 0):
            lost.append(step)
            counted += int(triggered)
    if not lost:
        return None
    where = f"step{'s' * (len(lost) > 1)} {ranges(lost)}"
    return (
        f"steps.jsonl counts {count(counted, 'spike')} in {where}, spikes.jsonl has "
        f"{sum(read.get(step, 0) for step in lost)}: it is missing or cut. Copy it from the run again; if it is whole, "
        "a search failed, and the log says why."
    )
