# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Layers whose gradient is another in a replay than in training, though weights and log-probs are the same."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# A layer's norm is another one if it is over this many times the replayed one, or under one over that.
APART = 1.5
# A layer whose norm is a smaller part of the largest says nothing: its rounding error may be larger than itself.
_LEAST_PART = 1e-3
# So many layers are named at most.
_NAMED = 3

SWITCHES = (
    "`--switches` measures attention, precision, RMSNorm and the rotary embedding one by one; this replay has neither "
    "training's own kernels nor its parallelism."
)


def layers_apart_in_words(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says in which layers the norms are others, if they are the same in the rest; nothing if all or none are others.

    A backward pass goes from the last layer to the first, so a wrong gradient is in all layers before its cause.

    Args:
        layers (Sequence[Mapping]): The result's `layers`, in the model's order. The weights must be those of training.
    """
    pairs = {
        layer["layer"]: (float(layer["norm"]), float(layer["replayed"]))
        for layer in layers
        if layer["norm"] is not None and layer["replayed"] is not None
    }
    if not all(math.isfinite(norm) for pair in pairs.values() for norm in pair):
        return []
    largest = max((max(pair) for pair in pairs.values()), default=0.0)
    told = {layer: pair for layer, pair in pairs.items() if max(pair) > _LEAST_PART * largest}
    factors = {layer: before / now if now else math.inf for layer, (before, now) in told.items()}
    apart = [layer for layer, factor in factors.items() if not 1 / APART <= factor <= APART]
    if not 0 < len(apart) < len(told):
        return []
    most = max(apart, key=lambda layer: abs(math.log(factors[layer])) if 0 < factors[layer] < math.inf else math.inf)
    names = ("the last ones are " if len(apart) > _NAMED else "") + ", ".join(apart[-_NAMED:])
    return [
        f"With the weights of training, the norm is another than in training in {len(apart)} of {len(told)} layers: "
        f"{names} ({most}: {factors[most]:.3g} times as large in training). So the backward pass was another one: look "
        f"at kernels, parallelism, model code and precision, at {apart[-1]} first; a replay does not have auxiliary "
        f"losses and TokenClip, either. {SWITCHES}"
    ]
