# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The data and metrics of verl 0.9's engines, whose sequences are ragged."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric

from .update_evidence import EVIDENCE_KEYS, VALUE_KEYS

# The column that a watched `train_batch` adds: each row's index in the data that it was given.
ROW = "gradloc_row"


def loss_scale(engine: Any) -> float:
    """The loss scale of an engine's backward passes; 1 without a scaler."""
    scaler = getattr(engine, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def as_metric(value: float | list[float]) -> Metric:
    """A figure of the update as verl logs it; of a list, which has a value for each mini-batch, it logs the mean.

    The trainer takes the mean over the mini-batches that have a metric: here one.
    """
    metric = Metric(AggregationType.MEAN)
    metric.extend([float(of_step) for of_step in (value if isinstance(value, list) else [value])])
    return metric


# By verl's names, the evidence's for what a model gives of each token, and for the loss's derivative by it.
OUTPUTS = {
    "log_probs": ("log_prob", "coefficient"),
    "entropy": ("entropy", "entropy_coefficient"),
    "values": ("value", "coefficient"),
}


def padded(values: Tensor) -> Tensor:
    """A column of the responses, of shape (rows, response length)."""
    return values.to_padded_tensor(0) if values.is_nested else values


# A forward's inputs besides the tokens: settings of the batch, and images.
_SETTINGS = ("use_remove_padding", "pad_mode", "use_fused_kernels", "temperature", "pad_token_id")
_IMAGES = "multi_modal_inputs"
# The columns of a loss's data that are kept.
_COLUMNS = (*EVIDENCE_KEYS.values(), *VALUE_KEYS.values())


def inputs_of(micro_batch: TensorDict | Mapping[str, Any]) -> dict[str, Any]:
    """The part of a micro-batch that a forward needs; without nested tensors, so that it can be sent."""
    responses = micro_batch["responses"]
    if responses.is_nested:
        lengths = responses.offsets().diff()
    else:
        lengths = micro_batch["attention_mask"][:, -responses.shape[1] :].sum(1)
    return {
        "input_ids": [row.detach() for row in micro_batch["input_ids"].unbind()],
        "position_ids": [row.detach() for row in micro_batch["position_ids"].unbind()],
        "response_lengths": lengths.tolist(),
        "settings": {key: tu.get(micro_batch, key) for key in (*_SETTINGS, _IMAGES) if key in micro_batch.keys()},
    }


def sequences(inputs: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Where a micro-batch has tokens, padded on the right, and the column of each response's first one."""
    lengths = torch.tensor([len(row) for row in inputs["input_ids"]])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    starts = (lengths - torch.tensor(inputs["response_lengths"])).tolist()
    return mask.to(get_device_id(), non_blocking=True), starts


def flat_outputs(model_output: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a model gave, by the names of `OUTPUTS`: values of whole sequences, one after the other."""
    given = {name: model_output[name] for name in OUTPUTS if name in model_output}
    return {name: values.values() if values.is_nested else values for name, values in given.items()}


def as_given(flat: Mapping[str, Tensor], model_output: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat values in the form that the model gave them, which the loss may need, and with a gradient of their own."""
    forms = {name: model_output[name] for name in flat}
    return {
        name: torch.nested.nested_tensor_from_jagged(flat[name], form.offsets(), form.lengths())
        if form.is_nested
        else flat[name]
        for name, form in forms.items()
    }


class LossData:
    """What a micro-batch's loss is computed from: references, without a graph. Only `read_tokens` copies.

    Args:
        flat (Mapping): What `flat_outputs` gave.
        data (TensorDict): The micro-batch as the loss gets it.
        inputs (Mapping): What `inputs_of` gave while the micro-batch was on the host.
    """

    def __init__(self, flat: Mapping[str, Tensor], data: TensorDict, inputs: Mapping[str, Any]) -> None:
        self._data = data.select(*(key for key in _COLUMNS if key in data.keys()))
        self._flat = {name: values.detach() for name, values in flat.items()}
        self._inputs = inputs

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, response length)."""
        lengths, mask = self._inputs["response_lengths"], self._data["response_mask"]
        return len(lengths), max(lengths) if mask.is_nested else mask.shape[1]

    def read_tokens(self) -> dict[str, Tensor]:
        """What is known of its tokens, by the evidence's names, each of `shape`."""
        keys = VALUE_KEYS if "values" in self._flat else EVIDENCE_KEYS
        tokens = {name: padded(self._data[key]) for name, key in keys.items() if key in self._data.keys()}
        return tokens | {OUTPUTS[key][0]: self.of_responses(values) for key, values in self._flat.items()}

    def of_responses(self, values: Tensor) -> Tensor:
        """Flat values of the responses alone, of `shape`; 0 behind a response's end. No host sync."""
        is_response, index = self._index
        return torch.where(is_response, values[index], 0.0)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        return response_index(self._inputs, self.shape[1], self._data["response_mask"].device)


def response_index(inputs: Mapping[str, Any], width: int, device: Any) -> tuple[Tensor, Tensor]:
    """Where there is a response, of shape (rows, width), and where among flat values its own are.

    A token's log-prob stands at the position before it.
    """
    lengths = inputs["response_lengths"], [len(row) for row in inputs["input_ids"]]
    responses, sequences = torch.tensor(lengths).to(device, non_blocking=True).unsqueeze(2)
    position = torch.arange(width, device=device)
    is_response = position < responses
    return is_response, torch.where(is_response, sequences.cumsum(0) - responses - 1 + position, 0)
