# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Looks for the temperature of the rollout's log-probs, where they are not those that training computes."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gradloc.judge.log_prob_sums import LARGEST
from gradloc.judge.log_probs import OTHER_GAP

from ..bundles.opening import Bundle
from .model import Model, row_logits

# A temperature fits if it leaves at most this share of the mean difference.
LEFT = 1 / 3
# Temperatures from a quarter of training's to four times it are tried, to within half a per cent.
_WIDEST = 4.0
_PRECISION = 0.005
# So many response tokens are enough, from the first rows of the first micro-batch on: their logits are kept.
_TOKENS = 1024
_GOLDEN = (math.sqrt(5) - 1) / 2


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
    if not gap >= OTHER_GAP:
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
    """Of the log-probs at a temperature from the rollout's, each counted as at most `LARGEST`; NaN if none is known."""
    differences = []
    for logits, ids, rollout, _ in rows:
        log_probs = (logits / temperature).float().log_softmax(-1)
        log_prob = log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        difference = (log_prob.double().cpu() - rollout).abs().clamp(max=LARGEST)
        differences.append(difference[difference.isfinite()])
    return float(torch.cat(differences).mean())


def _least(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least, by golden-section search."""
    # Of two points, one is a point of the round before, but for rounding.
    known = cache(value)
    while high - low > _PRECISION:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if known(round(left, 9)) < known(round(right, 9)):
            high = right
        else:
            low = left
    return (low + high) / 2
