# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Watches a critic's training passes, and on a spike says which micro-batch, layers and values it comes from.

A critic's gradient is Σ w_t (v_t − R_t) ∇v_t. Its coefficients are errors that can be read off, so the largest error
names the token at no extra pass; no search is needed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from .config import GradLocConfig
from .evidence.schema import SCHEMA
from .fsdp import collectives
from .gradloc import GradLoc, Located
from .guarded import warn_once
from .judge.critic import cause, summary
from .measure.figures import AllFigures, suspects
from .measure.micro_batch import MicroBatch
from .measure.mini_batch import MiniBatch
from .measure.token_weights import movable
from .threshold import is_over
from .version import __version__

# How many micro-batches and values a spike lists, the largest first.
_MICRO_BATCHES = 8
_VALUES = 4


class CriticWatch(GradLoc):
    """A `GradLoc` that compares a critic's gradient with τ, and reads off what a spike comes from.

    `observe_later` is given `value` (v), `weight` (w), `response_mask`, `returns` and `old_value`. The gradient stays
    as it is, every step is taken, and nothing is computed again.

    Args:
        module (nn.Module): The value model; ranks hold different data (FSDP1, FSDP2, or a single process).
        threshold (float | str): τ, or "auto"; see `Threshold`.
        device (str | torch.device): The device that the model computes on.
        loss_scale (Callable): Returns the loss scale of the backward passes (for fp16); 1 by default.
        sequence_parallel_size (int): How many neighbouring ranks work on the same data.
        meter (str): As `GradLoc` takes it. With "reduced", micro-batches are not told apart.

    Attributes:
        events (list[dict]): The spikes since `start_update` or `start_mini_batch`, the same on every rank: lines of the
            form `CRITIC` in gradloc_tools/schema.py, without the facts that only the trainer knows.
    """

    SEARCH = "the search for spikes of the critic's gradient"
    UNDONE = "the critic's gradient was not checked"

    def __init__(
        self,
        module: nn.Module,
        threshold: float | str = "auto",
        device: str | torch.device = "cpu",
        loss_scale: Callable[[], float] = lambda: 1.0,
        sequence_parallel_size: int = 1,
        meter: str = "local",
    ) -> None:
        config = GradLocConfig(grad_norm_threshold=threshold)
        size = sequence_parallel_size
        super().__init__(module, config, _no_search, device, loss_scale, sequence_parallel_size=size, meter=meter)
        # The root mean square error of the last mini-batch without a spike.
        self._ordinary_error: float | None = None
        self._token_norm_max = 0.0
        self._spike_count = 0

    def start_update(self, global_step: int | None = None) -> None:
        """Discards the spikes and metrics of the last update."""
        super().start_update(global_step)
        self._token_norm_max, self._spike_count = 0.0, 0

    def metrics(self) -> dict[str, float]:
        """The update's metrics: the largest token-equivalent norm, τ once there is one, and the number of spikes."""
        threshold = {} if self._threshold.last is None else {"gradloc/threshold": self._threshold.last}
        return threshold | {"gradloc/token_norm_max": self._token_norm_max, "gradloc/triggered": self._spike_count}

    def _locate(self, where: dict[str, Any]) -> Located:
        self._check(where)
        return Located(take_step=True)

    def _check(self, where: dict[str, Any]) -> None:
        model = self._model
        if model is None:
            return
        micro_batches = self.take()
        if not (micro_batches and all(micro_batch.tokens for micro_batch in micro_batches)):
            warn_once(
                self._said, "the critic's loss is not verl's value loss: spikes of its gradient are not looked for"
            )
            return
        failed = self.failed
        own = torch.stack([_error_sums(micro_batch.tokens) for micro_batch in micro_batches])
        gradient = MiniBatch(model, micro_batches, self._loss_scale()).gather("unit", own.sum(0), failed)
        if gradient.failed:
            return
        norm, error = gradient.token_norm, _root_mean_square(gradient.update_figures.sum(0).tolist())
        threshold = self._threshold.next(norm, gradient.finite_norm)
        self._token_norm_max = max(self._token_norm_max, norm)
        if not is_over(norm, threshold):
            self._ordinary.take_in(gradient)
            self._ordinary_error = error
            return
        figures = gradient.gather_figures()
        errors = collectives.exchange(lambda: own.tolist())[:: model.sequence_parallel_size]
        values = collectives.exchange(lambda: _largest_errors(micro_batches, model.rank))
        ordinary_norms = self._ordinary.layer_norms(model)
        global_norm = gradient.global_norm()
        assert gradient.squared_norms is not None  # they were measured for the norm
        layer_norms = dict(zip(model.reduced_norms.layers, gradient.squared_norms.sqrt().tolist(), strict=True))
        clock = collectives.broadcast(lambda: datetime.now(timezone.utc).isoformat(), 0)
        with collectives.raised_on_all_ranks(model.device):
            self._spike_count += 1
            spike = {
                "schema": SCHEMA,
                "gradloc_version": __version__,
                "time": clock,
                **where,
                "threshold": threshold,
                "token_norm": norm,
                "global_norm": global_norm,
                "layer_norms": layer_norms,
                "ordinary_token_norm": self._ordinary.token_norm,
                "ordinary_layer_norms": ordinary_norms,
                "error": error,
                "ordinary_error": self._ordinary_error,
                "micro_batches": _over(figures, threshold, errors),
                "values": _all_largest(values[:: model.sequence_parallel_size]),
                "world_size": model.data_parallel_size,
            }
            self.events.append({**spike, "cause": cause(spike), "summary": summary(spike)})


def _errors(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """v − R, float64, and which values have a coefficient; both of shape (rows, response length). No host sync."""
    counted = tokens["response_mask"].bool() & movable(tokens)
    if "value" not in tokens:  # they could not be read
        return torch.zeros_like(counted, dtype=torch.float64), counted
    return torch.where(counted, tokens["value"].double() - tokens["returns"].double(), 0.0), counted


def _error_sums(tokens: Mapping[str, Tensor]) -> Tensor:
    """The sum of squared errors, and the number of values that have one; float64, shape (2,). No host sync."""
    errors, counted = _errors(tokens)
    return torch.stack([errors.square().sum(), counted.sum().double()])


def _root_mean_square(sums: Sequence[float]) -> float | None:
    square, count = sums
    return math.sqrt(square / count) if count else None


def _largest_errors(micro_batches: Sequence[MicroBatch], rank: int) -> list[dict[str, Any]]:
    """This rank's values with the largest errors in each micro-batch."""
    found = []
    for index, micro_batch in enumerate(micro_batches):
        tokens = micro_batch.tokens
        errors, counted = _errors(tokens)
        size = torch.where(counted, errors.abs().nan_to_num(nan=math.inf), -1.0).flatten()
        most, places = size.topk(min(_VALUES, len(size)))
        for place in places[most >= 0].tolist():
            row, position = divmod(place, errors.shape[1])
            fields = {"value": "value", "old_value": "old_value", "return": "returns", "weight": "weight"}
            found.append(
                {
                    "rank": rank,
                    "micro_batch": index,
                    "row": micro_batch.rows[row],
                    "position": position,
                    **{name: float(tokens[column][row, position]) for name, column in fields.items()},
                    "error": float(errors[row, position].abs()),
                }
            )
    return found


def _all_largest(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    values = [value for of_rank in by_rank for value in of_rank]
    # NaN is larger than any number.
    return sorted(values, key=lambda value: -math.inf if math.isnan(value["error"]) else -value["error"])[:_VALUES]


def _over(figures: AllFigures, threshold: float, errors: Sequence[Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """The micro-batches over their thresholds; none where micro-batches are not measured alone."""
    return [
        {
            "rank": rank,
            "micro_batch": index,
            "rows": figures[rank, index].rows,
            "tokens": figures[rank, index].tokens,
            "norm": figures[rank, index].norm,
            "threshold": threshold * figures[rank, index].root_square_weight,
            "token_equivalent": figures[rank, index].token_equivalent,
            "error": _root_mean_square(errors[rank][index]),
            "layer_norms": figures[rank, index].layer_norms,
        }
        for rank, index in suspects(figures, threshold)[:_MICRO_BATCHES]
    ]


def _no_search(*_arguments: Any) -> Any:
    raise AssertionError("a critic's gradient is not searched")
