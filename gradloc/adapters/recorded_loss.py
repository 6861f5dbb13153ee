# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Records the micro-batches of a mini-batch from within the loss function that verl's engines are given."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from ..guarded import ForeseenError
from ..measure.micro_batch import MicroBatch
from .engine_data import FORWARD_SETTINGS, OUTPUTS, ROW, ResponseCutter, inputs_of, read_tokens
from .loss_weights import AggregationCall, RecordedAggregation, with_derived
from .update_evidence import EVIDENCE_KEYS

# What is kept of a micro-batch's data. Images are not: a bundle cannot have them.
_SETTINGS = [name for name in FORWARD_SETTINGS if name != "multi_modal_inputs"]
_COLUMNS = (*EVIDENCE_KEYS.values(), "input_ids", "position_ids", "attention_mask", ROW, *_SETTINGS)


Guard = Callable[[], AbstractContextManager[None]]


@dataclass
class RecordedMicroBatch:
    """References to what a micro-batch's loss is computed from; nothing is copied before `read`."""

    data: TensorDict  # the columns and settings of the micro-batch, on its device
    has_images: list[bool]  # for each row; empty without such a column
    flat: dict[str, Tensor]  # log-probs and entropies of whole sequences, one after the other, without a graph
    call: AggregationCall | None = None  # what the loss called
    options: dict[str, Any] = field(default_factory=dict)  # with which verl aggregates the terms of KL and entropy
    gradients: dict[str, Tensor] = field(default_factory=dict)  # those of `flat`, after the backward
    # The derivative of what the engine computes the backward of with respect to the loss.
    factor: list[Tensor] = field(default_factory=list)

    def read(self, config: Any, eos_tokens: set[int], rng_state: Tensor) -> tuple[MicroBatch, float]:
        """The micro-batch as a training pass records it, and what to divide its coefficients by.

        Engines multiply the loss before the backward: by fp16's scale, by the number of micro-batches, by that of
        tokens. The derivative with respect to the loss itself says by how much, so that coefficients are those of the
        loss of a data-parallel rank, whatever the engine does.

        Args:
            config (ActorConfig): verl's configuration of the actor.
            eos_tokens (set[int]): Where a rollout stops.
            rng_state (Tensor): Of the loss function.
        """
        data = self.data
        if "position_ids" not in data.keys():
            rows = [torch.arange(len(row), device=row.device) for row in data["input_ids"].unbind()]
            data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        inputs = inputs_of(data)
        if self.has_images:
            inputs["settings"]["multi_modal_inputs"] = self.has_images
        as_response = ResponseCutter(inputs, data["response_mask"])
        tokens = read_tokens(data, self.flat, as_response)
        tokens = with_derived(tokens, self.call, config, eos_tokens, 1.0, self.options)
        tokens |= {OUTPUTS[key].coefficient: as_response(gradient) for key, gradient in self.gradients.items()}
        factor = float(self.factor[0]) if self.factor else 1.0
        if not (math.isfinite(factor) and factor > 0):
            raise ForeseenError(f"the engine multiplies the loss by {factor}")
        micro_batch = MicroBatch(inputs, data[ROW].tolist(), (rng_state, None))
        micro_batch.tokens = tokens
        return micro_batch, factor


class RecordedLoss:
    """The loss function that an engine is given, which records each micro-batch beside computing its loss.

    Its result is that of the loss function, which it is in all other respects, too: verl reads the configuration that
    it is bound to, and engines may call it with other arguments to process logits. After an error in
    recording, nothing more is recorded.

    Args:
        loss_function (Callable): verl's.
        config (ActorConfig): verl's configuration of the actor.
        guard (Callable): Returns what errors in recording are kept in; see `guarded`.

    Attributes:
        micro_batches (list[RecordedMicroBatch]): In the order of their losses.
        tokens_of_mini_batch (float | None): The number of tokens that the loss divides by, of all ranks.
        rng_state (Tensor): torch's random state on the CPU at the start of the mini-batch.
    """

    def __init__(self, loss_function: Callable[..., Any], config: Any, guard: Guard) -> None:
        self.micro_batches: list[RecordedMicroBatch] = []
        self.tokens_of_mini_batch: float | None = None
        self.rng_state = torch.get_rng_state()
        self._loss_function = loss_function
        self._config = config
        self._guard = guard
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of an object that is not complete yet
            raise AttributeError(name)
        return getattr(self._loss_function, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._failed or "model_output" not in named or "data" not in named:
            return self._loss_function(*arguments, **named)
        with self._recording():
            flat, recorded = self._begin(named["model_output"], named["data"])
        if self._failed:
            return self._loss_function(*arguments, **named)
        # Only a tensor that the loss was given itself sees its gradient.
        named["model_output"] = {**named["model_output"], **flat}
        aggregation = RecordedAggregation()
        aggregation.start()
        try:
            result = self._loss_function(*arguments, **named)
        finally:
            recorded.call = aggregation.take()
        with self._recording():
            self._observe(result, flat, recorded)
        return result

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Around a part of the recording: after an error, nothing is recorded any more."""
        self._failed = True
        with self._guard():
            yield
            self._failed = False
        if self._failed:
            self.micro_batches = []

    def _begin(self, model_output: Mapping[str, Tensor], data: TensorDict) -> tuple[dict[str, Tensor], Any]:
        if self.tokens_of_mini_batch is None and (count := tu.get(data, "batch_num_tokens")) is not None:
            self.tokens_of_mini_batch = float(count)
        if "log_probs" not in model_output:
            raise ForeseenError("the loss has no log-probs")
        if ROW not in data.keys():
            raise ForeseenError("the engine does not hand all columns of the data to the loss")
        flat = {name: _flat(model_output[name]) for name in OUTPUTS if name in model_output}
        images = tu.get(data, "multi_modal_inputs") if "multi_modal_inputs" in data.keys() else ()
        recorded = RecordedMicroBatch(
            data.select(*(key for key in _COLUMNS if key in data.keys())),
            [bool(of_row) for of_row in images],
            {name: values.detach() for name, values in flat.items()},
        )
        return flat, recorded

    def _observe(self, result: Any, flat: Mapping[str, Tensor], recorded: RecordedMicroBatch) -> None:
        loss = result[0] if isinstance(result, tuple) else result
        if loss.requires_grad:
            loss.register_hook(lambda gradient: recorded.factor.append(gradient.detach()))
        for name, values in flat.items():
            if values.requires_grad:
                values.register_hook(partial(_keep, recorded.gradients, name))
        recorded.options = dict(self._config.global_batch_info)
        self.micro_batches.append(recorded)


def _flat(values: Tensor) -> Tensor:
    flat = values.values() if values.is_nested else values
    if flat.dim() != 1:
        raise ForeseenError(f"log-probs or entropies have the shape {tuple(flat.shape)}: they are not one per token")
    return flat


def _keep(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    gradients[name] = gradient.detach()
