# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a replay's figures say, in sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradloc.threshold import is_over

from ..report.remedies import recommended
from .layers_apart import layers_apart_in_words
from .scale import coarsest, scale_in_words
from .switch_table import switches_in_words

# How far a norm may be from the recorded one to count as the same. In half precision some thirty roundings in a row of
# 2^-9 (bfloat16) or 2^-12 (float16) stand between them, and a spike may magnify them.
_SAME = {"float32": 1e-3, "float64": 1e-3, "float16": 0.02, "bfloat16": 0.1}

# How far the log-probs may be from the recorded ones on average, in nats, with the same weights.
_SAME_WEIGHTS = {"float32": 1e-3, "float64": 1e-3, "float16": 0.01, "bfloat16": 0.05}


def sentences(result: Mapping[str, Any]) -> list[str]:
    """The sentences on a result of `build_result`, the most important first."""
    unit = result["units"][0]
    found = [_comes_back(unit, result["dtype"], result["recorded_dtype"])]
    found += _culprits(result)
    found.append(weights_in_words(result))
    found += scale_in_words(result.get("scale"))
    if same_weights(result):
        found += layers_apart_in_words(result["layers"])
    found += _others(unit, result)
    if "switches" in result:
        comes_back = unit["norm"] is None or same_norm(
            unit["replayed"], float(unit["norm"]), result["dtype"], result["recorded_dtype"]
        )
        found += switches_in_words(unit, result["switches"], result["variant"], comes_back)
    found += _layers(result["layers"])
    if "remedy_notes" in result:
        found.append(recommended(result)[1])
    return found


def same_norm(replayed: float, recorded: float, *dtypes: str) -> bool:
    """Whether two norms are the same but for rounding; two that are not finite are."""
    if not (math.isfinite(replayed) and math.isfinite(recorded)):
        return math.isfinite(replayed) == math.isfinite(recorded)
    return abs(replayed - recorded) <= coarsest(_SAME, dtypes) * max(abs(recorded), 1e-12)


def same_weights(result: Mapping[str, Any]) -> bool:
    """Whether the log-probs are those of training, up to rounding."""
    mean = result["log_probs"]["mean"]
    return mean is not None and mean <= coarsest(_SAME_WEIGHTS, (result["dtype"], result["recorded_dtype"]))


def _comes_back(unit: Mapping[str, Any], *dtypes: str) -> str:
    where = f"rank {unit['rank']}, micro-batch {unit['micro_batch']}"
    replayed, threshold = unit["replayed"], float(unit["threshold"])
    if unit["norm"] is None:
        state = "over" if is_over(replayed, threshold) else "under"
        figures = f"{replayed:.4g} of {threshold:.4g}"
        return f"The gradient of {where} is {state} its threshold: {figures}; no norm of it was recorded."
    recorded = float(unit["norm"])
    figures = f"{where} has a gradient norm of {replayed:.4g}, and had {recorded:.4g} in training"
    if same_norm(replayed, recorded, *dtypes):
        if not is_over(recorded, threshold):
            return f"The gradient is the same: {figures}, under its threshold of {threshold:.4g}."
        return f"The spike comes back: {figures}."
    if is_over(replayed, threshold):
        return f"The spike comes back with another size: {figures}, over its threshold of {threshold:.4g}."
    return f"The spike does not come back: {figures}; its threshold is {threshold:.4g}."


def _culprits(result: Mapping[str, Any]) -> list[str]:
    culprits = [token for token in result["tokens"] if token["culprit"]]
    if not culprits:
        return []
    threshold = float(result["threshold"])
    over = sum(is_over(token["replayed"], threshold) for token in culprits)
    if result["culprits"] > len(culprits):
        what = f"{over} of the {len(culprits)} largest culprits, of {result['culprits']} in all, are"
    elif len(culprits) > 1:
        what = f"{over} of {len(culprits)} culprits are"
    else:
        what = f"The culprit is{'' if over else ' not'}"
    return [f"{what} over τ = {threshold:.4g} again."]


def weights_in_words(result: Mapping[str, Any]) -> str:
    """Whether the weights are those of training."""
    distance = result["log_probs"]
    if distance["mean"] is None:
        return "No log-prob is finite, so the weights cannot be compared."
    figures = f"{distance['mean']:.2g} nats from the recorded ones on average, {distance['max']:.2g} at most"
    if same_weights(result):
        return f"The log-probs are {figures}: these are the weights of training."
    step = "" if result["global_step"] is None else f" The bundle is of step {result['global_step']};"
    checkpoint = result["checkpoint"]
    known = f" the last checkpoint before it was {checkpoint}." if checkpoint else " no checkpoint before it was known."
    return f"The log-probs are {figures}: these are probably other weights than those of training.{step}{known}"


def _others(unit: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    threshold = float(unit["threshold"])
    if not is_over(unit["replayed"], threshold):
        return []
    found = []
    for variant, norm in zip(result["variants"], unit["others"], strict=True):
        if is_over(norm, threshold):
            found.append(f"It does not vanish with {variant}: the norm is {norm:.4g} there.")
        else:
            found.append(
                f"It vanishes with {variant}: the norm is {norm:.4g} there, so {result['variant']} makes the spike."
            )
    return found


def _layers(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    def shares(key: str) -> dict[str, float]:
        """Each layer's share of the squared norm; empty if there is none."""
        norms = {layer["layer"]: float(layer[key] or 0.0) for layer in layers}
        norm = math.hypot(*norms.values())
        return {layer: (n / norm) ** 2 for layer, n in norms.items()} if 0 < norm < math.inf else {}

    replayed, before = shares("replayed"), shares("norm")
    if not replayed:
        return []
    largest = max(replayed, key=lambda layer: replayed[layer])
    text = f"{largest} carries {replayed[largest]:.0%} of the squared norm"
    if before:
        text += f", and {before[largest]:.0%} in training"
    return [text + "."]
