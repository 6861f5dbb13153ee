# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a replay's table of switches says, in sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradloc.threshold import is_over

AS_REPLAYED = "as replayed"
# A norm changes if it is over this many times the replay's, or under one over that: more than any rounding does to a
# gradient that is not itself the result of one.
CHANGE = 1.5
# What may be looked at, by the beginning of a switch's name.
_LOOK = {
    "RMSNorm": "how RMSNorm is computed",
    "rotary": "how the rotary embedding is computed",
    "attention": "the implementation of attention",
    "fused": "the fused kernels",
    "precision": "the precision of the whole model",
}


def switches_in_words(
    unit: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], variant: str, comes_back: bool
) -> list[str]:
    """Which switch takes the spike away, or makes it; rows are in the order from specific to general.

    Args:
        unit (Mapping): The first micro-batch of a result.
        rows (Sequence[Mapping]): The result's `switches`.
        variant (str): What the replay computed with.
        comes_back (bool): Whether the replay has the recorded norm.
    """
    rows = [row for row in rows if row["name"] != AS_REPLAYED]
    if not rows:
        return []
    replayed, threshold = float(unit["replayed"]), float(unit["threshold"])
    if is_over(replayed, threshold):
        cures = [row for row in rows if not is_over(float(row["norm"]), threshold)]
        if cures:
            return [_points(cures, replayed, f"takes the spike away, with a norm of {{}} instead of {replayed:.4g}")]
    elif not comes_back:
        makers = [row for row in rows if is_over(float(row["norm"]), threshold)]
        if makers:
            return [_points(makers, replayed, f"makes a spike, with a norm of {{}} instead of {replayed:.4g}")]
    changed = [row for row in rows if _change(float(row["norm"]), replayed) > CHANGE]
    if changed:
        return [_points(changed, replayed, f"changes the norm to {{}} from {replayed:.4g}")]
    return [
        f"No switch changes the norm by more than a factor of {CHANGE:g}: neither attention nor a precision of "
        f"{variant} makes it."
    ]


def _points(rows: Sequence[Mapping[str, Any]], replayed: float, what: str) -> str:
    first, others = rows[0], [f"'{row['name']}'" for row in rows[1:]]
    look = next((text for start, text in _LOOK.items() if first["name"].startswith(start)), first["name"])
    sentence = f"Switched alone, '{first['name']}' {what.format('{:.4g}'.format(float(first['norm'])))}"
    if others:
        sentence += f" (so do {', '.join(others)})"
    return f"{sentence}: look at {look}."


def _change(norm: float, replayed: float) -> float:
    if not (math.isfinite(norm) and math.isfinite(replayed)):
        return 1.0 if math.isfinite(norm) == math.isfinite(replayed) else math.inf
    if min(norm, replayed) <= 0:
        return 1.0 if norm == replayed else math.inf
    return max(norm / replayed, replayed / norm)
