# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Rules that classify what looks wrong with a culprit."""

import math
from collections.abc import Mapping
from typing import Any

# The limits in the rules of `classify`; docs/evidence.md describes them.
MISALIGNED_FRACTION = 0.5
TOKEN_RATIO = 2.0
SEQUENCE_RATIO = 1.2
LAYER_FRACTION = 0.5


def classify(culprit: Mapping[str, Any]) -> str:
    """Classifies what looks wrong with a culprit; the first rule that holds applies.

    - "nonfinite": its gradient norm is NaN or Inf.
    - "misaligned": most log-probs of the response differ by more than a nat from the rollout's: a bug, not a spike.
    - "token": its importance ratio (to the old policy or to the rollout's) is over 2 or under 1/2, or NaN.
    - "sequence": the geometric mean of the response's ratios is over 1.2 or under 1/1.2, or NaN.
    - "layer": the ratios are fine, but one layer carries over half of the squared norm.
    - "other": none of these.
    """
    if not math.isfinite(culprit["grad_norm"]):
        return "nonfinite"
    if (culprit["misaligned_share"] or 0.0) > MISALIGNED_FRACTION:
        return "misaligned"
    if any(_far_from_one(culprit[name], TOKEN_RATIO) for name in ("ratio", "rollout_ratio")):
        return "token"
    if _far_from_one(culprit["sequence_ratio"], SEQUENCE_RATIO):
        return "sequence"
    squares = [norm**2 for norm in culprit["layer_norms"].values()]
    if len(squares) > 1 and max(squares) > LAYER_FRACTION * sum(squares):
        return "layer"
    return "other"


def _far_from_one(ratio: float | None, factor: float) -> bool:
    return ratio is not None and not 1 / factor <= ratio <= factor
