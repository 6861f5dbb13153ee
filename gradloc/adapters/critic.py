# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The watch over verl's critics of 0.7 and 0.9: what builds it, the recorded value loss, and the evidence."""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from verl.trainer.ppo import core_algos
from verl.utils.device import get_device_name

from ..critic_watch import CriticWatch
from ..evidence.writer import record_critic
from ..fsdp import collectives
from ..measure.token_weights import token_weights
from .loss_weights import RecordedAggregation
from .model_facts import meter_kind
from .update_evidence import Sample, add_facts, facts_of_token

logger = logging.getLogger(__name__)

# How many spikes of an update are logged one by one.
_LOGGED_SPIKES = 3

# `observe(value, weight, returns=…, old_value=…, response_mask=…)`, as `CriticWatch` takes it.
Observe = Callable[..., None]


def build_watch(
    module: nn.Module, config: Any, loss_scale: Callable[[], float], sequence_parallel_size: int
) -> CriticWatch | None:
    """What watches a critic; None if its configuration does not turn it on."""
    if not config.get("spike_detection", False):
        return None
    return CriticWatch(
        module,
        config.grad_norm_threshold,
        get_device_name(),
        loss_scale,
        sequence_parallel_size,
        meter=meter_kind(module),
    )


@contextmanager
def recorded_value_loss(observe: Observe, factor: Callable[[Tensor], float] = lambda mask: 1.0) -> Iterator[None]:
    """Within it, `observe` is called after each value loss that verl computes.

    verl's trainers take `compute_value_loss` from a module, so it is replaced there.

    Args:
        observe (Callable): See `Observe`.
        factor (Callable): What the trainer multiplies a micro-batch's loss by, from its response mask.
    """
    has_critic = importlib.util.find_spec("verl.workers.critic") is not None
    module: Any = core_algos if has_critic else importlib.import_module("verl.workers.utils.losses")
    original = module.compute_value_loss
    aggregation = RecordedAggregation()

    def recorded(*, vpreds: Tensor, values: Tensor, returns: Tensor, response_mask: Tensor, **options: Any) -> Any:
        aggregation.start()
        try:
            result = original(vpreds=vpreds, values=values, returns=returns, response_mask=response_mask, **options)
        finally:
            aggregation.stop()
        call, of_loss = aggregation.take(), factor(response_mask)

        def weight() -> Tensor:
            assert call is not None  # verl's value loss makes one
            return token_weights(call.aggregate, response_mask.float()) * of_loss

        observe(vpreds, weight, returns=returns, old_value=values, response_mask=response_mask)
        return result

    module.compute_value_loss = recorded
    try:
        yield
    finally:
        module.compute_value_loss = original


def describe(
    spikes: Sequence[dict[str, Any]],
    tokenizer: Callable[[], Any],
    sample_of: Callable[[Mapping[str, Any]], Sample],
    sequence_parallel_size: int,
) -> None:
    """Adds to the values of spikes what the data say of them. A collective call.

    Args:
        spikes (Sequence[dict]): The same on every rank; they are changed.
        tokenizer (Callable): Returns the critic's tokenizer, None if there is none: then values have no text. Called
            only where there is a spike; may raise.
        sample_of (Callable): The sample of a value, on the rank that has it; may raise.
        sequence_parallel_size (int): How many neighbouring ranks have the same data.
    """
    values = [value for spike in spikes for value in spike["values"]]

    def facts_of(number: int) -> dict[str, Any]:
        value = values[number]
        facts = facts_of_token(sample_of(value), value["position"], tokenizer())
        return {name: facts.get(name) for name in _FACTS}

    if values:
        add_facts(values, facts_of, sequence_parallel_size)


# What is written of a value's token and response.
_FACTS = ("token", "context", "reward", "data_source", "uid")


def write(directory: str, global_step: int | None, spikes: Sequence[Mapping[str, Any]]) -> None:
    """Logs the spikes of an update and writes them, on rank 0."""
    if collectives.rank() != 0:
        return
    for spike in spikes[:_LOGGED_SPIKES]:
        logger.warning("Gradient spike of the critic in step %s: %s", global_step, spike["summary"])
    if (more := len(spikes) - _LOGGED_SPIKES) > 0:
        logger.warning("%d more spikes of the critic in step %s: see %s", more, global_step, directory)
    record_critic(directory, global_step, spikes)
