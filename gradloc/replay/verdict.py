# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a replay's figures say, in sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.forms import LOOKS
from ..sources import layer_shares
from ..threshold import is_over
from .advice import recommended
from .scale import coarsest
from .switches import AS_REPLAYED

# How far a norm may be from the recorded one to count as the same. In half precision some thirty roundings in a row of
# 2^-9 (bfloat16) or 2^-12 (float16) stand between them, and a spike may magnify them.
_SAME = {"float32": 1e-3, "float64": 1e-3, "float16": 0.02, "bfloat16": 0.1}

# How far the log-probs may be from the recorded ones on average, in nats, with the same weights.
_SAME_WEIGHTS = {"float32": 1e-3, "float64": 1e-3, "float16": 0.01, "bfloat16": 0.05}

# A layer's norm is another one than in training, and a switch changes a norm, if one is over this many times the other:
# more than any rounding does to a gradient that is not itself the result of one.
CHANGE = 1.5
# A layer whose norm is a smaller part of the largest says nothing: its rounding error may be larger than itself.
_LEAST_PART = 1e-3
# So many layers are named at most.
_NAMED = 3
_SWITCHES = (
    "`--switches` measures attention, precision, RMSNorm and the rotary embedding one by one; this replay has neither "
    "training's own kernels nor its parallelism."
)
# The code to look at, by the beginning of a switch's name.
_LOOK = {
    "RMSNorm": "how RMSNorm is computed",
    "rotary": "how the rotary embedding is computed",
    "attention": "the implementation of attention",
    "fused": "the fused kernels",
    "precision": "the precision of the whole model",
}
_SCALED = {
    "loss": "The loss's coefficients are {} times what its weights, advantages and ratios give",
    "gradient": "The gradient is {} times what its coefficients give, in every layer alike",
    "reduced": "The gradient averaged over the ranks is {} times what the ranks' gradients give",
}
# What the judge says of such a factor.
_CHECK = LOOKS["loss_scale"]


def sentences(result: Mapping[str, Any]) -> list[str]:
    """The sentences on a result of `build_result`, the most important first."""
    unit = result["units"][0]
    found = [_comes_back(unit, result["dtype"], result["recorded_dtype"])]
    found += _culprits(result)
    found.append(weights_in_words(result))
    found += scale_in_words(result["scale"])
    if same_weights(result):
        found += layers_apart_in_words(result["layers"])
    found += _others(unit, result)
    found += switches_in_words(unit, result)
    found += _layers(result["layers"])
    if "remedy_notes" in result:
        found.append(recommended(result)[1])
    return [*found, *_temperature(result["temperature"])]


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
    return [
        f"It does not vanish with {variant}: the norm is {norm:.4g} there."
        if is_over(norm, threshold)
        else f"It vanishes with {variant}: the norm is {norm:.4g} there, so {result['variant']} makes the spike."
        for variant, norm in zip(result["variants"], unit["others"], strict=True)
    ]


def _layers(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    replayed, before = (
        layer_shares({layer["layer"]: float(layer[key] or 0.0) for layer in layers}) for key in ("replayed", "norm")
    )
    if not replayed:
        return []
    largest = max(replayed, key=lambda layer: replayed[layer])
    text = f"{largest} carries {replayed[largest]:.0%} of the squared norm"
    if before:
        text += f", and {before[largest]:.0%} in training"
    return [text + "."]


def scale_in_words(scale: Mapping[str, Any] | None) -> list[str]:
    """The sentences on what `find_scale` returned."""
    found = []
    for name, what in _SCALED.items():
        if (factor := (scale or {}).get(name)) is not None:
            could_be = f"; it could be {' or '.join(factor['could_be'])}" if factor["could_be"] else ""
            found.append(f"{what.format(format(factor['factor'], '.4g'))}{could_be}.")
    return [*found, _CHECK] if found else []


def _temperature(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    return [
        f"The rollout's log-probs are those of another temperature: {found['fits']:.2f} fits, and training computes "
        f"them at {found['training']:g} (mean difference {found['gap']:.2g}, and {found['left']:.2g} at "
        f"{found['fits']:.2f})."
    ]


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
    apart = [layer for layer, pair in told.items() if _change(*pair) > CHANGE]
    if not 0 < len(apart) < len(told):
        return []
    most = max(apart, key=lambda layer: _change(*told[layer]))
    before, now = told[most]
    factor = before / now if now else math.inf
    names = ("the last ones are " if len(apart) > _NAMED else "") + ", ".join(apart[-_NAMED:])
    return [
        f"With the weights of training, the norm is another than in training in {len(apart)} of {len(told)} layers: "
        f"{names} ({most}: {factor:.3g} times as large in training). So the backward pass was another one: look "
        f"at kernels, parallelism, model code and precision, at {apart[-1]} first; a replay does not have auxiliary "
        f"losses and TokenClip, either. {_SWITCHES}"
    ]


def switches_in_words(unit: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Which switch takes the spike away, or makes it; they are in the order from specific to general."""
    norms = {row["name"]: float(row["norm"]) for row in result.get("switches", ()) if row["name"] != AS_REPLAYED}
    if not norms:
        return []
    replayed, threshold, recorded = float(unit["replayed"]), float(unit["threshold"]), unit["norm"]
    comes_back = recorded is None or same_norm(replayed, float(recorded), result["dtype"], result["recorded_dtype"])
    spikes, what = is_over(replayed, threshold), "changes the norm to {:.4g} from {:.4g}"
    pointed = [name for name, norm in norms.items() if is_over(norm, threshold) != spikes]
    if pointed and (spikes or not comes_back):
        what = ("takes the spike away" if spikes else "makes a spike") + ", with a norm of {:.4g} instead of {:.4g}"
    else:
        pointed = [name for name, norm in norms.items() if _change(norm, replayed) > CHANGE]
    if not pointed:
        return [
            f"No switch changes the norm by more than a factor of {CHANGE:g}: neither attention nor a precision of "
            f"{result['variant']} makes it."
        ]
    first, *others = pointed
    look = next((text for start, text in _LOOK.items() if first.startswith(start)), first)
    also = f" (so do {', '.join(map(repr, others))})" if others else ""
    return [f"Switched alone, '{first}' {what.format(norms[first], replayed)}{also}: look at {look}."]


def _change(norm: float, replayed: float) -> float:
    """How many times the smaller one the larger one of two norms is."""
    if not (math.isfinite(norm) and math.isfinite(replayed)):
        return 1.0 if math.isfinite(norm) == math.isfinite(replayed) else math.inf
    if min(norm, replayed) <= 0:
        return 1.0 if norm == replayed else math.inf
    return max(norm / replayed, replayed / norm)
