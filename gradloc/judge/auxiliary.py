# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What an event says of a gradient that comes from no token's log-prob, as that of an auxiliary loss."""

import math
from collections.abc import Mapping
from typing import Any

from .shares import layer_shares, percent

Event = Mapping[str, Any]

CAUSE = "auxiliary"
# It is the cause if it makes more than this part of the squared norm, and is mentioned from this part of the norm on.
# Without an auxiliary loss it is exactly 0.
MOST, MENTIONED = 0.5, 0.1

# How many layers are named at most, and the part of the squared norm that they are to carry.
_LAYERS, _CARRIED = 3, 0.8

ADVICE = (
    "Look at the coefficient and the scale of the auxiliary loss (load balancing, z-loss, MTP or draft heads), and at "
    "what its gradient is multiplied by."
)
CHECK = (
    "Take one step from the same checkpoint with the coefficient of the auxiliary loss at 0: `actor/grad_norm` should "
    "fall. An example, in a checkout of GradLoc: `bash run_experiment.sh --embedded --fault auxiliary`."
)


def auxiliary_in_words(event: Event) -> str | None:
    """Says which part of a norm comes from no token, and in which layers it is; None if that is little."""
    found = _measured(event, MENTIONED)
    if found is None:
        return None
    rank = "" if found["rank"] is None else f"rank {found['rank']}, "
    text = f"{percent(found['share'])} of the norm of {rank}micro-batch {found['micro_batch']} "
    text += "comes from no token's log-prob"
    layers = carrying_layers(found["layer_norms"])
    if layers:
        listed = layers[0] if len(layers) == 1 else f"{', '.join(layers[:-1])} and {layers[-1]}"
        text += f", in the layer{'s' * (len(layers) > 1)} {listed}"
    return text


def auxiliary_verdict(event: Event) -> dict[str, Any] | None:
    """The verdict on a spike that comes from no token; None if it does not."""
    if _measured(event, math.sqrt(MOST)) is None:
        return None
    sentence = auxiliary_in_words(event)
    assert sentence is not None
    sentence = f"{sentence[0].upper()}{sentence[1:]}: {ADVICE[0].lower()}{ADVICE[1:]}"
    return {"cause": CAUSE, "culprits": None, "ordinary": None, "sentence": sentence, "check": CHECK}


def carrying_layers(layer_norms: Mapping[str, float]) -> list[str]:
    """The layers that carry most of the squared norm, largest first; none if the norm is spread over more."""
    shares = layer_shares(layer_norms)
    found: list[str] = []
    for layer in sorted(shares, key=lambda layer: -shares[layer])[:_LAYERS]:
        found.append(layer)
        if math.fsum(shares[layer] for layer in found) >= _CARRIED:
            return found
    return []


def _measured(event: Event, least: float) -> Mapping[str, Any] | None:
    """The event's field, if the share is at least that."""
    found: Mapping[str, Any] | None = event.get("without_tokens")
    return found if found is not None and least <= found["share"] < math.inf else None
