# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How a squared norm is divided among layers, and how a norm compares with its threshold."""

import math
from collections.abc import Mapping
from typing import Any


def layer_shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Each layer's share of the squared norm, from the layers' norms; none if their sum is 0 or not finite."""
    return shares_of_sum({layer: norm * norm for layer, norm in norms.items()})


def shares_of_sum(squares: Mapping[str, float]) -> dict[str, float]:
    """Each layer's share of the sum of these squares; none if that is 0 or not finite."""
    total = math.fsum(squares.values())
    return {layer: square / total for layer, square in squares.items()} if 0 < total < math.inf else {}


def threshold_factor(part: Mapping[str, Any]) -> float:
    """`norm` divided by `threshold`, which may be strings where they are not finite.

    Of a part without a token that can move, both are zero, and so is this.
    """
    norm, threshold = float(part["norm"]), float(part["threshold"])
    return norm / threshold if threshold else math.inf if norm else 0.0
