# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The data and metrics of verl 0.9's engines."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric

from ..judge.misfire import RewardedRow
from .update_evidence import Sample, rewarded_rows

# The column that a watched `train_batch` adds: each row's index in the data that it was given.
ROW = "gradloc_row"
# The columns that have a response's scores: the first one that there is, is its reward.
SCORES = ("token_level_scores", "rm_scores")


class MiniBatchPlaces:
    """Says of each mini-batch which one of its step it is.

    verl calls `train_batch` once for each mini-batch of an update, and says in the data which one it is; one that says
    nothing is an update of its own. Several updates may make up a step: then the mini-batches count on.
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


def sample_of_row(data: TensorDict, row: int) -> Sample:
    """A row of the data that `train_batch` was given."""
    ids, responses = data["input_ids"][row], data["responses"]
    if responses.is_nested:
        length = len(responses[row])
    else:
        length = int(data["attention_mask"][row, -responses.shape[1] :].sum())
    scores = [data[key][row].sum().item() for key in SCORES if key in data.keys()]
    columns = {key: tu.get(data, key)[row] for key in ("reward_model", "data_source", "uid") if key in data.keys()}
    prompt = len(ids) - length
    return Sample(ids[:prompt].tolist(), ids[prompt:].tolist(), scores[0] if scores else None, columns)


def rewards_of_rows(data: TensorDict) -> list[RewardedRow] | None:
    """What the rows of the data that `train_batch` was given were rewarded for."""
    scores = next((data[key] for key in SCORES if key in data.keys()), None)
    rewards = [None] * len(data) if scores is None else [row.sum().item() for row in scores.unbind()]
    masks = data["response_mask"].unbind()
    pairs = zip(data["advantages"].unbind(), masks, strict=True)
    advantages = [float((of_row * mask).abs().max()) if len(of_row) else 0.0 for of_row, mask in pairs]
    uids, sources = (tu.get(data, key) if key in data.keys() else None for key in ("uid", "data_source"))
    return rewarded_rows(uids, rewards, sources, advantages)
