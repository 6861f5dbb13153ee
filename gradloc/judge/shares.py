# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How a squared norm is divided among layers, how a norm compares with its threshold, and shares in words."""

import math
from collections.abc import Mapping
from typing import Any

from ..sources import layer_shares

# How many layers are named at most, and the part of the squared norm that they are to carry.
_LAYERS, _CARRIED = 3, 0.8


def carrying_layers(layer_norms: Mapping[str, float]) -> list[str]:
    """The layers that carry most of the squared norm, largest first; none if the norm is spread over more."""
    shares = layer_shares(layer_norms)
    found: list[str] = []
    for layer in sorted(shares, key=lambda layer: -shares[layer])[:_LAYERS]:
        found.append(layer)
        if math.fsum(shares[layer] for layer in found) >= _CARRIED:
            return found
    return []


def threshold_factor(part: Mapping[str, Any]) -> float:
    """`norm` divided by `threshold`, which may be strings where they are not finite.

    Of a part without a token that can move, both are zero, and so is this.
    """
    norm, threshold = float(part["norm"]), float(part["threshold"])
    return norm / threshold if threshold else math.inf if norm else 0.0


# Up to so many things, a share of them is said as a count.
COUNTED = 20


def counted(count: int, total: int, what: str = "culprits") -> str:
    """A part of a total, in words; `what` is the plural of what is counted."""
    if count == total:
        return f"the one {what.removesuffix('s')}" if total == 1 else f"{all_of(total)} {what}"
    return f"{count if total <= COUNTED else percent(count / total)} of {total} {what}"


def all_of(total: int) -> str:
    """All of several things, in words, before their name."""
    return "both" if total == 2 else f"all {total}"


def percent(share: float) -> str:
    """A share, rounded, but not to 0% or 100% where it is neither."""
    if 0 < share < 0.01:
        return "under 1%"
    return "over 99%" if 0.99 < share < 1 else f"{share:.0%}"
