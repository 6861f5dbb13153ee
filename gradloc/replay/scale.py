# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether recorded norms are one constant times the replayed ones: then the gradient was scaled after its loss."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ..bundles.opening import Bundle
from ..evidence.scaling import (
    CHECK,
    coefficient_factor,
    fitting_numbers,
    is_one,
    own_scale_figures,
    what_it_could_be,
)
from .measuring import Measured, Norms

# How far recorded over replayed may be from their median, relative to it, for each layer of each micro-batch. In half
# precision, the norms of single layers differ by a few percent in any replay.
_SPREAD = {"float32": 0.02, "float64": 0.02, "float16": 0.05, "bfloat16": 0.1}
# A layer whose norm is a smaller part of its micro-batch's says nothing: its rounding error is larger than itself.
_LEAST_PART = 1e-3
_LEAST_LAYERS = 3
# How close the median must be to a number for that to be named; half as far as layers may be apart.
_FITS = 0.5


def find_scale(bundle: Bundle, measured: Measured, same_weights: bool, *dtypes: str) -> dict[str, Any] | None:
    """Which factors the gradient and the loss have that they should not have.

    Args:
        bundle (Bundle): The bundle.
        measured (Measured): What the replay gave.
        same_weights (bool): Whether its log-probs are those of training; with others, norms do not compare.
        dtypes (str): What training and the replay computed in.

    Returns:
        dict: `gradient`, recorded over replayed; `reduced`, the same for the gradient averaged over the ranks, besides
            that factor; `loss`, coefficients over expected ones. Each is a `factor` with its `spread` and what it
            `could_be`, or None where there is no single factor, or it is about 1. None if all three are None.
    """
    counts = numbers_of_the_run(bundle)
    tolerance = max(_SPREAD.get(dtype, 0.1) for dtype in dtypes)
    found = {
        "gradient": _of_gradient(bundle, measured, counts, tolerance) if same_weights else None,
        "reduced": None,
        "loss": _of_loss(bundle, counts),
    }
    if same_weights:
        before = 1.0 if found["gradient"] is None else found["gradient"]["factor"]
        found["reduced"] = _of_reduced(bundle, measured, before, counts, tolerance)
    return found if any(found.values()) else None


def scale_in_words(scale: Mapping[str, Any] | None) -> list[str]:
    """The sentences on what `find_scale` returned."""
    whats = {
        "loss": "The loss's coefficients are {} times what its weights, advantages and ratios give",
        "gradient": "The gradient is {} times what its coefficients give, in every layer alike",
        "reduced": "The gradient averaged over the ranks is {} times what the ranks' gradients give",
    }
    given = {name: scale[name] for name in whats if scale is not None and scale[name] is not None}
    found = [
        whats[name].format(f"{factor['factor']:.4g}") + what_it_could_be(factor["could_be"]) + "."
        for name, factor in given.items()
    ]
    return [*found, CHECK] if found else []


def numbers_of_the_run(bundle: Bundle) -> dict[str, float]:
    """What a wrong factor could be, by what it is."""
    event, actor = bundle.event, bundle.manifest["actor"]
    actor = actor if isinstance(actor, dict) else {}
    ranks = event["world_size"]
    info = actor.get("global_batch_info")
    found: dict[str, Any] = {
        "ranks": ranks,
        "micro-batches of a rank": event["micro_batches"] / ranks,
        "micro-batches": event["micro_batches"],
        "responses in a mini-batch": actor.get("ppo_mini_batch_size"),
        "responses in a micro-batch": actor.get("ppo_micro_batch_size_per_gpu"),
        "ranks of a sequence-parallel group": actor.get("ulysses_sequence_parallel_size"),
        "response tokens": info.get("batch_num_tokens") if isinstance(info, dict) else None,
        "loss scale": event["loss_scale"],
    }
    if len(bundle.manifest["micro_batches"]) == 1:
        (saved,) = bundle.micro_batches.values()
        found["response tokens of the micro-batch"] = float(saved.tokens["response_mask"].sum())
    return {
        name: float(number)
        for name, number in found.items()
        if isinstance(number, (int, float)) and not isinstance(number, bool)
    }


def _of_gradient(
    bundle: Bundle, measured: Measured, counts: Mapping[str, float], tolerance: float
) -> dict[str, Any] | None:
    ratios: list[float] = []
    for entry in bundle.manifest["micro_batches"]:
        replayed = measured.units[entry["rank"], entry["micro_batch"]]
        for layer, norm in replayed.layers.items():
            recorded = entry["layer_norms"].get(layer)
            if recorded is not None and math.isfinite(replayed.norm) and norm > _LEAST_PART * replayed.norm:
                ratios.append(float(recorded) / norm)
    return _one_factor(ratios, counts, tolerance) if len(ratios) >= _LEAST_LAYERS else None


def _of_reduced(
    bundle: Bundle, measured: Measured, before: float, counts: Mapping[str, float], tolerance: float
) -> dict[str, Any] | None:
    """Of the gradient averaged over the ranks, which can be computed if the bundle has all micro-batches.

    Args:
        bundle (Bundle): The bundle.
        measured (Measured): What the replay gave.
        before (float): The factor of the micro-batches' gradients.
        counts (Mapping): See `fitting_numbers`.
        tolerance (float): See `_SPREAD`.
    """
    whole: Norms | None = measured.whole
    recorded = float(bundle.event["global_norm"])
    if whole is None or not (whole.norm > 0 and math.isfinite(recorded)):
        return None
    return _one_factor([recorded / (before * whole.norm)], counts, tolerance)


def _of_loss(bundle: Bundle, counts: Mapping[str, float]) -> dict[str, Any] | None:
    figures = own_scale_figures([saved.tokens for saved in bundle.micro_batches.values()])
    factor = coefficient_factor(figures.unsqueeze(0))
    if factor is None or is_one(factor):
        return None
    low, high = float(figures[3]) / factor, float(figures[5]) / factor
    return {"factor": factor, "spread": max(1 - low, high - 1), "could_be": fitting_numbers(factor, counts)}


def _one_factor(ratios: list[float], counts: Mapping[str, float], tolerance: float) -> dict[str, Any] | None:
    """Their median, if all are near it and it is clearly not 1."""
    factor = statistics.median(ratios)
    if not (0 < factor < math.inf):
        return None
    spread = max(abs(ratio / factor - 1) for ratio in ratios)
    if not spread <= tolerance or is_one(factor):
        return None
    return {"factor": factor, "spread": spread, "could_be": fitting_numbers(factor, counts, _FITS * tolerance)}
