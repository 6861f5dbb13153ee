# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Watches a critic's training passes, and on a spike says which micro-batch, layers and values it comes from.

A critic's gradient is Σ w_t (v_t − R_t) ∇v_t. Its coefficients are errors that can be read off, so the largest error
names the token at no extra pass; no search is needed.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .evidence.event import micro_batch_over, place_of
from .evidence.ordinary import largest_tokens
from .evidence.writer import now
from .fsdp import collectives
from .gradloc import GradLoc, Located
from .lines import SCHEMA, Where
from .measure.micro_batch import MicroBatch, movable, suspects
from .measure.mini_batch import MiniBatch
from .threshold import is_over, largest_first
from .version import __version__

# How many micro-batches and values a spike lists, the largest first.
_MICRO_BATCHES = 8
_VALUES = 4


class CriticWatch(GradLoc):
    """A `GradLoc` that compares a critic's gradient with τ, and reads off what a spike comes from.

    `observe` is given `value` (v), `weight` (w), `response_mask`, `returns` and `old_value`. The gradient stays
    as it is, every step is taken, and nothing is computed again. With the meter "reduced", micro-batches are not told
    apart. Of `config`, only τ counts.

    Attributes:
        events (list[dict]): The spikes since `start_update` or `start_mini_batch`, the same on every rank: a
            `CriticSpike` each, but for what is judged of it, and for what only the trainer knows.
    """

    SEARCH = "the search for spikes of the critic's gradient"
    UNDONE = "the critic's gradient was not checked for a spike"
    # The root mean square error of the last mini-batch without a spike.
    _ordinary_error: float | None = None

    def metrics(self) -> dict[str, float]:
        """The largest token-equivalent norm of the update, its τ once there is one, and the number of spikes."""
        found = self._metrics.metrics()
        names = ("gradloc/threshold", "gradloc/token_norm_max", "gradloc/triggered")
        return {name: found[f"actor/{name}"] for name in names if f"actor/{name}" in found}

    def _locate(self, where: Where) -> Located:
        located, model = Located(take_step=True), self._model
        if self.is_off or model is None:
            return located
        micro_batches = self.take()
        if not micro_batches:
            return located

        def read() -> Tensor:
            found = [_errors(micro_batch.tokens) for micro_batch in micro_batches]
            # The sum of squared errors, and the number of values that have one.
            return torch.cat([torch.stack([each.square().sum(), of.sum().double()]) for each, of in found])

        sums = self.figures(read, 2 * len(micro_batches)).view(-1, 2)
        gradient = MiniBatch(model, micro_batches, self._loss_scale()).gather("unit", sums.sum(0), self.failed)
        if gradient.failed:
            self.is_off = True  # for the rest of the update
            return located
        norm, error = gradient.token_norm, _root_mean_square(gradient.update_figures.sum(0).tolist())
        threshold = self._threshold.next(norm, gradient.finite_norm)
        self._metrics.take_in_level(norm, self._threshold.last)
        if not is_over(norm, threshold):
            self._ordinary.take_in(gradient)
            self._ordinary_error = error
            return located
        figures = gradient.gather_figures()

        def own() -> tuple[Any, ...]:
            return sums.tolist(), _largest_errors(micro_batches, model.rank), self._ordinary.own_sums(), now()

        by_rank = collectives.exchange(own)
        errors, of_ranks, ordinary_sums, clocks = zip(*by_rank[:: model.sequence_parallel_size], strict=True)
        values = sorted(chain(*of_ranks), key=lambda each: largest_first(each["error"]))
        global_norm = gradient.global_norm()
        assert gradient.squared_norms is not None  # they were measured for the norm
        layer_norms = dict(zip(model.reduced_norms.layers, gradient.squared_norms.sqrt().tolist(), strict=True))
        with collectives.raised_on_all_ranks(model.device):
            self._metrics.add_spike(None)  # its line is of another form
            spike = {
                "schema": SCHEMA,
                "gradloc_version": __version__,
                "time": clocks[0],
                **where,
                "threshold": threshold,
                "token_norm": norm,
                "global_norm": global_norm,
                "layer_norms": layer_norms,
                "ordinary_token_norm": self._ordinary.token_norm,
                "ordinary_layer_norms": self._ordinary.layer_norms(ordinary_sums, model.meter.layers),
                "error": error,
                "ordinary_error": self._ordinary_error,
                # Empty where micro-batches are not measured alone.
                "micro_batches": [
                    {**micro_batch_over(figures, (rank, i), threshold), "error": _root_mean_square(errors[rank][i])}
                    for rank, i in suspects(figures, threshold)[:_MICRO_BATCHES]
                ],
                "values": values[:_VALUES],
                "world_size": model.data_parallel_size,
            }
            self.events.append(spike)
        return located


def _errors(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """v − R, float64, and which values have a coefficient; both of shape (rows, response length). No host sync."""
    counted = tokens["response_mask"].bool() & movable(tokens)
    if "value" not in tokens:  # they could not be read
        return torch.zeros_like(counted, dtype=torch.float64), counted
    return torch.where(counted, tokens["value"].double() - tokens["returns"].double(), 0.0), counted


def _root_mean_square(sums: Sequence[float]) -> float | None:
    square, count = sums
    return math.sqrt(square / count) if count else None


def _largest_errors(micro_batches: Sequence[MicroBatch], rank: int) -> list[dict[str, Any]]:
    """This rank's values with the largest errors."""
    errors = {}
    for index, micro_batch in enumerate(micro_batches):
        of_tokens, counted = _errors(micro_batch.tokens)
        errors[rank, index] = torch.where(counted, of_tokens.abs(), -math.inf)
    fields = {"value": "value", "old_value": "old_value", "return": "returns", "weight": "weight"}
    return [
        {
            **place_of(name, micro_batches[name[1]].rows[row], position),
            **{field: float(micro_batches[name[1]].tokens[of][row, position]) for field, of in fields.items()},
            "error": float(errors[name][row, position]),
        }
        for name, row, position in largest_tokens(errors, _VALUES)
    ]
