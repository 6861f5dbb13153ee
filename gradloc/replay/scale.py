# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether one number explains what differs from the recorded figures.

If recorded norms are a constant times the replayed ones, the gradient was scaled after its loss; and the log-probs of
the rollout may be those of another temperature.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import is_finite_number
from ..facts import NAMES
from ..judge.readings import of_tokens
from ..levels import FACTOR, GAP, LEAST_LOG_PROB, LEVEL, SAME
from ..measure.update_facts import own_facts
from ..tools.opening import Bundle
from .measuring import Measured
from .model import Model, row_logits

# How far recorded over replayed may be from their median, relative to it, for each layer of each micro-batch. In half
# precision, the norms of single layers differ by a few percent in any replay.
_SPREAD = {"float32": 0.02, "float64": 0.02, "float16": 0.05, "bfloat16": 0.1}
# A layer whose norm is a smaller part of its micro-batch's, in training and in the replay, says nothing: its rounding
# error is larger than itself.
_LEAST_PART = 1e-3
_LEAST_LAYERS = 3
# How close the median must be to a number for that to be named; half as far as layers may be apart.
_FITS = 0.5


def find_scale(bundle: Bundle, measured: Measured, same_weights: bool, *dtypes: str) -> dict[str, Any] | None:
    """Which factors the gradient and the loss have that they should not have.

    Args:
        measured (Measured): What the replay gave.
        same_weights (bool): Whether its log-probs are those of training; with others, norms do not compare.
        dtypes (str): What training and the replay computed in.

    Returns:
        dict: `gradient`, recorded over replayed; `reduced`, the same for the gradient averaged over the ranks, besides
            that factor; `loss`, coefficients over expected ones. Each is a `factor` with its `spread` and what it
            `could_be`, or None where there is no single factor, or it is about 1. None if all three are None.
            Where layers differ, the gradient has no factor, and the norm over the ranks does not compare.
    """
    counts = numbers_of_the_run(bundle)
    tolerance = coarsest(_SPREAD, dtypes)
    found: dict[str, dict[str, Any] | None] = {"gradient": None, "reduced": None, "loss": _of_loss(bundle, counts)}
    ratios = _layer_ratios(bundle, measured) if same_weights else []
    common = _common_factor(ratios, tolerance) if len(ratios) >= _LEAST_LAYERS else None
    if common is not None:
        found["gradient"] = _unless_one(*common, counts, tolerance)
        if measured.whole is not None and measured.whole.norm:
            reduced = float(bundle.event["global_norm"]) / (common[0] * measured.whole.norm)
            found["reduced"] = _unless_one(reduced, 0.0, counts, tolerance)
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
    return {name: float(number) for name, number in found.items() if is_finite_number(number)}


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


def _of_loss(bundle: Bundle, counts: Mapping[str, float]) -> dict[str, Any] | None:
    facts = own_facts([saved.tokens for saved in bundle.micro_batches.values()]).tolist()
    readings = of_tokens(dict(zip(NAMES, facts, strict=True)))
    factor, explained = readings.get("loss.factor"), readings.get("loss.explained", 0.0)
    if factor is None or factor <= 0 or is_one(factor) or explained < 1 - SAME:
        return None
    spread = math.sqrt(max(1 / min(explained, 1.0) - 1, 0.0))
    return {"factor": factor, "spread": spread, "could_be": fitting_numbers(factor, counts)}


def is_one(factor: float) -> bool:
    """Whether a factor is not clearly another than 1."""
    return max(factor, 1 / factor) <= 1 + LEVEL * FACTOR


def fitting_numbers(factor: float, counts: Mapping[str, float], tolerance: float = SAME) -> list[str]:
    """What a factor could be: one of some numbers, a product of two, one over these, or a power of two; in words.

    Args:
        factor (float): It, positive.
        counts (Mapping): Numbers by what they are, as "ranks"; those up to 1 are left out.
        tolerance (float): How far the factor may be from a number, relative to it.
    """
    found: list[str] = []
    given = {name: float(count) for name, count in counts.items() if 1 < count < math.inf}
    names = list(given)
    products = {name: given[name] for name in names} | {
        f"{one} × {other}": given[one] * given[other] for i, one in enumerate(names) for other in names[i + 1 :]
    }
    for name, number in products.items():
        for text, value in ((f"the number of {name}", number), (f"1 / the number of {name}", 1 / number)):
            if abs(factor / value - 1) <= tolerance:
                found.append(f"{text} ({number:g})")
    power = round(math.log2(factor))
    if power and abs(factor / 2.0**power - 1) <= tolerance:
        found.append(f"2^{power}")
    return found


def what_it_could_be(fitting: Sequence[str]) -> str:
    """A clause on `fitting_numbers`, or nothing."""
    if not fitting:
        return ""
    return f"; it could be {' or '.join([', '.join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)}"


CHECK = (
    "Take one step with another number of ranks, and one with another number of micro-batches: `actor/grad_norm` "
    "should stay about the same."
)


def _common_factor(ratios: list[float], tolerance: float) -> tuple[float, float] | None:
    """Their median and how far they are from it at most, relative to it; None if they are not all near it."""
    factor = statistics.median(ratios)
    if not (0 < factor < math.inf and all(math.isfinite(ratio) for ratio in ratios)):
        return None
    spread = max(abs(ratio / factor - 1) for ratio in ratios)
    return (factor, spread) if spread <= tolerance else None


def _unless_one(factor: float, spread: float, counts: Mapping[str, float], tolerance: float) -> dict[str, Any] | None:
    """A factor of a result; None if it is about 1, or none."""
    if not (0 < factor < math.inf) or is_one(factor):
        return None
    return {"factor": factor, "spread": spread, "could_be": fitting_numbers(factor, counts, _FITS * tolerance)}


# A temperature fits if it leaves at most this share of the mean difference.
LEFT = 1 / 3
# Temperatures from a quarter of training's to four times it are tried, to within half a per cent.
_WIDEST = 4.0
_PRECISION = 0.005
# So many response tokens are enough, from the first rows of the first micro-batch on: their logits are kept.
_TOKENS = 1024

# Those tokens of a row that are compared: logits before the temperature, of shape (tokens, vocabulary), ids and the
# rollout's log-probs, float64, of shape (tokens,), and training's temperature.
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
        for index, row in enumerate(saved.rows):
            rollout = saved.tokens["rollout_log_prob"][index, : row.response_length].double()
            counted = saved.tokens["response_mask"][index, : row.response_length].bool() & rollout.isfinite()
            if row.prompt_length == 0:
                counted[:1] = False  # nothing precedes it
            chosen = counted.nonzero().squeeze(1)[:left]
            if len(chosen):
                logits, ids = row_logits(model, row)
                positions = (row.prompt_length + chosen).to(model.device)
                found.append((logits[positions - 1], ids[positions], rollout[chosen], row.temperature))
                left -= len(chosen)
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
