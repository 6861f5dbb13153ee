# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether one number explains what differs from the recorded figures.

If recorded norms are a constant times the replayed ones, the gradient was scaled after its loss; and the log-probs of
the rollout may be those of another temperature.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..config import is_finite_number
from ..levels import FACTOR, GAP, LEAST_LOG_PROB, LEVEL, SAME
from ..tools.opening import Bundle
from .measuring import Measured
from .model import Model, cut_row, logits_of

# How far recorded over replayed may be from their median, relative to it, for each layer of each micro-batch. In half
# precision, the norms of single layers differ by a few percent in any replay.
_SPREAD = {"float32": 0.02, "float64": 0.02, "float16": 0.05, "bfloat16": 0.1}
# A layer whose norm is a smaller part of its micro-batch's, in training and in the replay, says nothing: its rounding
# error is larger than itself.
_LEAST_PART = 1e-3
_LEAST_LAYERS = 3
# How close the median must be to a number for that to be named; half as far as layers may be apart.
_FITS = 0.5


def find_scale(
    bundle: Bundle, measured: Measured, same_weights: bool, of_loss: float | None, *dtypes: str
) -> dict[str, Any] | None:
    """Which factors the gradient and the loss have that they should not have.

    Args:
        measured (Measured): What the replay gave.
        same_weights (bool): Whether its log-probs are those of training; with others, norms do not compare.
        of_loss (float, optional): That of the loss, by the judge.
        dtypes (str): What training and the replay computed in.

    Returns:
        dict: `gradient`, recorded over replayed; `reduced`, the same for the gradient averaged over the ranks, besides
            that factor; `loss`, coefficients over expected ones. Each is a `factor` with what it `could_be`, or None
            where there is no single factor, or it is about 1. None if all three are None. Where layers differ, the
            gradient has no factor, and the norm over the ranks does not compare.
    """
    tolerance = coarsest(_SPREAD, dtypes)
    factors = {"gradient": None, "reduced": None, "loss": of_loss}
    if same_weights and (common := _common_factor(_layer_ratios(bundle, measured), tolerance)) is not None:
        factors["gradient"] = common
        if measured.whole is not None and measured.whole.norm:
            factors["reduced"] = float(bundle.event["global_norm"]) / (common * measured.whole.norm)
    counts = numbers_of_the_run(bundle)
    found: dict[str, Any] = dict.fromkeys(factors)
    for name, factor in factors.items():
        if factor is not None and 0 < factor < math.inf and max(factor, 1 / factor) > 1 + LEVEL * FACTOR:
            could_be = fitting_numbers(factor, counts, SAME if name == "loss" else _FITS * tolerance)
            found[name] = {"factor": factor, "could_be": could_be}
    return found if any(found.values()) else None


def coarsest(tolerances: Mapping[str, float], dtypes: Sequence[str]) -> float:
    """The tolerance of the dtype that has the largest one; that of an unknown dtype is 0.1."""
    return max(tolerances.get(dtype, 0.1) for dtype in dtypes)


def numbers_of_the_run(bundle: Bundle) -> dict[str, float]:
    """What a wrong factor could be, by what it is."""
    event, actor = bundle.event, bundle.manifest["actor"]
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
    return {name: float(number) for name, number in found.items() if is_finite_number(number) and number > 1}


def fitting_numbers(factor: float, counts: Mapping[str, float], tolerance: float) -> list[str]:
    """What a factor could be: one of some numbers, a product of two, one over these, or a power of two; in words.

    Args:
        factor (float): It, positive.
        counts (Mapping): Numbers over 1 by what they are, as "ranks".
        tolerance (float): How far the factor may be from a number, relative to it.
    """
    products = {f"{one} × {other}": a * b for (one, a), (other, b) in combinations(counts.items(), 2)}
    known = [(f"the number of {name}", number) for name, number in {**counts, **products}.items()]
    known = [each for name, number in known for each in ((name, number), (f"1 / {name}", 1 / number))]
    found = [f"{name} ({max(number, 1 / number):g})" for name, number in known if abs(factor / number - 1) <= tolerance]
    power = round(math.log2(factor))
    return [*found, f"2^{power}"] if power and abs(factor / 2.0**power - 1) <= tolerance else found


def _layer_ratios(bundle: Bundle, measured: Measured) -> list[float]:
    """Recorded over replayed norms of the layers of each micro-batch, as far as they say something."""
    ratios: list[float] = []
    for entry in bundle.manifest["micro_batches"]:
        replayed = measured.units[entry["rank"], entry["micro_batch"]]
        recorded = {layer: float(norm) for layer, norm in entry["layer_norms"].items()}
        whole = math.hypot(*recorded.values())
        for layer, norm in replayed.layers.items():
            known = recorded.get(layer)
            if known is None or not math.isfinite(replayed.norm):
                continue
            if norm > _LEAST_PART * replayed.norm or known > _LEAST_PART * whole:
                ratios.append(known / norm if norm else math.inf)
    return ratios


def _common_factor(ratios: Sequence[float], tolerance: float) -> float | None:
    """Their median; None if there are few, or if they are not all near it."""
    factor = statistics.median(ratios) if len(ratios) >= _LEAST_LAYERS else math.nan
    is_common = 0 < factor < math.inf and all(abs(ratio / factor - 1) <= tolerance for ratio in ratios)
    return factor if is_common else None


# A temperature fits if it leaves at most this share of the mean difference.
LEFT = 1 / 3
# Temperatures from a quarter of training's to four times it are tried, to within half a per cent.
_WIDEST = 4.0
_PRECISION = 0.005
# So many response tokens are enough, from the first rows of the first micro-batch on: their logits are kept.
_TOKENS = 1024

# Of a row's response: logits before the temperature, of shape (tokens, vocabulary), ids and the rollout's log-probs,
# float64, not finite where they are not compared, of shape (tokens,), and training's temperature.
_Row = tuple[Tensor, Tensor, Tensor, float]


def fit_temperature(bundle: Bundle, model: Model) -> dict[str, float] | None:
    """The temperature at which the model's log-probs are nearest to the rollout's.

    Args:
        model (Model): Of training's weights.

    Returns:
        dict: `fits`, the temperature that was found; `training`, training's; `gap` and `left`, the mean differences to
            the rollout's log-probs at training's and at that temperature. None if the bundle has no log-probs of the
            rollout, if rows have several temperatures, if the differences are small, or if no temperature removes most
            of them.
    """
    rows = _rows(bundle, model)
    temperatures = {temperature for *_, temperature in rows}
    if len(temperatures) != 1:
        return None
    (training,) = temperatures

    def difference(log_factor: float) -> float:
        return _mean_difference(rows, training * math.exp(log_factor))

    gap = difference(0.0)
    if not gap >= GAP:
        return None
    best = _least(difference, -math.log(_WIDEST), math.log(_WIDEST))
    left = difference(best)
    if not left <= LEFT * gap:
        return None
    return {"fits": training * math.exp(best), "training": training, "gap": gap, "left": left}


@torch.no_grad()
def _rows(bundle: Bundle, model: Model) -> list[_Row]:
    found: list[_Row] = []
    left = _TOKENS
    for saved in bundle.micro_batches.values():
        if "rollout_log_prob" not in saved.tokens:
            continue
        known = saved.tokens["rollout_log_prob"].double().masked_fill(saved.tokens["response_mask"] == 0, math.nan)
        for row, rollout in zip(saved.rows, known, strict=True):
            row = cut_row(row, left)
            start = max(row.prompt_length, 1)  # nothing precedes the first token of all
            rollout = rollout[start - row.prompt_length : row.response_length]
            if rollout.isfinite().any():
                ((logits, ids),) = logits_of(model, [row])
                found.append((logits[start - 1 : -1].clone(), ids[start:], rollout, row.temperature))
                left -= row.response_length
    return found


@torch.no_grad()
def _mean_difference(rows: list[_Row], temperature: float) -> float:
    """Of the log-probs at a temperature from the rollout's, each counted as at most 10 nats; NaN if none is known."""
    differences = []
    for logits, ids, rollout, _ in rows:
        log_probs = (logits / temperature).float().log_softmax(-1)
        log_prob = log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        difference = (log_prob.double().cpu() - rollout).abs().clamp(max=-LEAST_LOG_PROB)
        differences.append(difference[difference.isfinite()])
    return float(torch.cat(differences).mean())


def _least(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least."""
    while (third := (high - low) / 3) > _PRECISION / 3:
        if value(low + third) < value(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2
