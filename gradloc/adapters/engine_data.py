# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The data and metrics of verl 0.9's engines, whose sequences are ragged."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric

from .update_evidence import DATA_KEYS, EVIDENCE_KEYS, VALUE_KEYS, TrainedData

# The column that a watched `train_batch` adds: each row's index in the data that it was given.
ROW = "gradloc_row"


class MiniBatchPlaces:
    """Says of each mini-batch which one of its step it is.

    verl calls `train_batch` once for each mini-batch of an update, and says in the data which one it is; one that says
    nothing is an update of its own. Several updates may make up a step, as in verl's asynchronous trainer with separate
    rollouts: then the mini-batches count on.
    """

    def __init__(self) -> None:
        self._mini_batches = self._earlier = 0

    def next(self, data: TensorDict) -> tuple[tuple[int, int], bool]:
        """The PPO epoch and the number of a mini-batch in its step, and whether it is the step's last one."""
        update, updates = tu.get(data, "update_of_step", (0, 1))
        epoch, mini_batch = tu.get(data, "epoch_and_mini_batch", (0, 0))
        if (epoch, mini_batch) == (0, 0):
            self._earlier = self._mini_batches if update else 0
        where = epoch, self._earlier + mini_batch
        self._mini_batches = where[1] + 1
        return where, tu.get(data, "update_lr_scheduler", True) and update == updates - 1


def bound_config(loss_function: Callable[..., Any], kinds: type | tuple[type, ...]) -> Any:
    """The configuration that a loss is bound to, if it is of one of these kinds; None otherwise."""
    config = getattr(loss_function, "keywords", {}).get("config")
    return config if isinstance(config, kinds) else None


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


def trained_data(data: TensorDict) -> TrainedData:
    """The data that `train_batch` was given."""
    return TrainedData({key: tu.get(data, key) for key in DATA_KEYS if key in data.keys()})


class Output(NamedTuple):
    """The evidence's names for what a model gives of each token, and for the loss's derivative by it."""

    value: str
    coefficient: str


# By verl's names.
OUTPUTS = {
    "log_probs": Output("log_prob", "coefficient"),
    "entropy": Output("entropy", "entropy_coefficient"),
    "values": Output("value", "coefficient"),
}


def padded(values: Tensor) -> Tensor:
    """A column of the responses, of shape (rows, response length)."""
    return values.to_padded_tensor(0) if values.is_nested else values


def read_tokens(
    data: TensorDict, outputs: Mapping[str, Tensor], as_response: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """What is known of a micro-batch's tokens, by the evidence's names.

    Args:
        outputs (Mapping[str, Tensor]): What the model gave, by the names of `OUTPUTS`, as flat values.
        as_response (Callable): A `ResponseCutter`.
    """
    keys = VALUE_KEYS if "values" in outputs else EVIDENCE_KEYS
    tokens = {name: padded(data[key]) for name, key in keys.items() if key in data.keys()}
    return tokens | {OUTPUTS[key].value: as_response(values) for key, values in outputs.items()}


class ResponseCutter:
    """Cuts the responses out of flat values of whole sequences; no host sync.

    A token's log-prob stands at the position before it.

    Args:
        inputs (Mapping): What `inputs_of` gave.
        mask (Tensor): The response mask, padded or nested, on the values' device.
    """

    def __init__(self, inputs: Mapping[str, Any], mask: Tensor) -> None:
        self._lengths = inputs["response_lengths"], [len(row) for row in inputs["input_ids"]]
        self._width = max(inputs["response_lengths"]) if mask.is_nested else mask.shape[1]
        self._device = mask.device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, response length)."""
        return len(self._lengths[0]), self._width

    def __call__(self, values: Tensor) -> Tensor:
        """The values of the responses, shape (rows, response length); 0 behind a response's end."""
        is_response, index = self._index
        return torch.where(is_response, values[index], 0.0)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        responses, sequences = torch.tensor(self._lengths).to(self._device, non_blocking=True).unsqueeze(2)
        position = torch.arange(self._width, device=self._device)
        is_response = position < responses
        return is_response, torch.where(is_response, sequences.cumsum(0) - responses - 1 + position, 0)


# What a forward needs besides the tokens: settings of the batch.
FORWARD_SETTINGS = (
    "use_remove_padding",
    "pad_mode",
    "use_fused_kernels",
    "temperature",
    "pad_token_id",
    "max_response_len",
    "multi_modal_inputs",
)


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
        "settings": {key: tu.get(micro_batch, key) for key in FORWARD_SETTINGS if key in micro_batch.keys()},
    }


def sequences(inputs: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Where a micro-batch has tokens, padded on the right, and the column of each response's first one."""
    lengths = torch.tensor([len(row) for row in inputs["input_ids"]])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    starts = (lengths - torch.tensor(inputs["response_lengths"])).tolist()
    return mask.to(get_device_id(), non_blocking=True), starts
