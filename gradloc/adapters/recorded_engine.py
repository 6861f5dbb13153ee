# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for any engine of verl 0.9 whose spikes are only recorded: a mixin that uses verl's base interface."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from ..guarded import guarded
from .actor_config import SpikeConfig
from .engine_data import ROW, MiniBatchPlaces, as_metric, bound_config
from .model_facts import eos_tokens
from .recorded_loss import NotRecordedError, RecordedLoss
from .replay_bundles import engine_context
from .saved_state import read_state
from .spike_recorder import SpikeRecorder

logger = logging.getLogger(__name__)

_NOT_RECORDED = "a mini-batch is not recorded"


@dataclass
class _MiniBatch:
    """A mini-batch that is being recorded.

    Args:
        loss (RecordedLoss): The loss function that the engine is given.
        norm (float | Tensor): What `optimizer_step` returned.
        rng_state (Tensor): torch's random state on the CPU at its start.
    """

    loss: RecordedLoss
    norm: Any = None
    rng_state: Tensor = field(default_factory=torch.get_rng_state)


class RecordedEngine:
    """Records the training passes of an engine, which comes behind it in the order of bases.

    It acts only within `train_batch`, only with `spike_search=replay` in the actor configuration that the loss is bound
    to, and only on ranks that have the model's outputs. It measures nothing: on a spike, which the norm that
    `optimizer_step` returns tells, it writes what the losses were computed from. It makes no collective call, copies
    nothing from the device before a spike, and an error in it is a warning.

    Attributes:
        recorder (SpikeRecorder | None): None before the first `train_batch`, and where it is off.
    """

    recorder: SpikeRecorder | None = None
    _recorder_is_built = False
    _recorder_state: dict[str, Any] | None = None
    _recorded: _MiniBatch | None = None

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        recorder = self._recorder_of(loss_function)
        if recorder is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        place: tuple[tuple[int, int], bool] | None = None
        mini_batch: _MiniBatch | None = None
        with recorder.guarded(_NOT_RECORDED):
            place = self._recorder_places.next(data)
            recorder.start_mini_batch(place[0])
            guard = partial(recorder.guarded, _NOT_RECORDED)
            data[ROW] = torch.arange(len(data))
            mini_batch = _MiniBatch(RecordedLoss(loss_function, loss_function.keywords["config"], guard))
        self._recorded = mini_batch
        try:
            loss = loss_function if mini_batch is None else mini_batch.loss
            outputs = super().train_batch(data, loss)  # type: ignore[misc]
        finally:
            self._recorded = None
            data.pop(ROW, None)
        if place is not None:
            metrics = self._end(recorder, data, mini_batch, *place)
            outputs["metrics"].update({name: as_metric(value) for name, value in metrics.items()})
        return outputs

    def optimizer_step(self) -> Any:
        norm = super().optimizer_step()  # type: ignore[misc]
        if self._recorded is not None:
            self._recorded.norm = norm
        return norm

    def save_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        if self.recorder is not None:
            with self.recorder.guarded("the threshold's state is not saved beside the checkpoint"):
                self.recorder.save(local_path)

    def load_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        try:  # first: the engine may remove the folder
            self._recorder_state = read_state(local_path)
        except ValueError as error:
            logger.warning("%s", error)
        super().load_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        if self.recorder is not None and self._recorder_state is not None:
            self.recorder.load(self._recorder_state)

    def _end(
        self,
        recorder: SpikeRecorder,
        data: TensorDict,
        mini_batch: _MiniBatch | None,
        where: tuple[int, int],
        last: bool,
    ) -> dict[str, float]:
        """The metrics of a step that ends with this mini-batch; none after an error."""
        with recorder.guarded(_NOT_RECORDED):
            if mini_batch is not None:
                step = tu.get(data, "training_step")
                place = {"global_step": step, "epoch": where[0], "mini_batch": where[1]}
                has_scaler = getattr(self, "scaler", None) is not None
                norm, rng_state = mini_batch.norm, mini_batch.rng_state
                recorder.end_mini_batch(data, mini_batch.loss, norm, place, has_scaler, rng_state)
        with recorder.guarded("the figures of a step are not written"):
            if last:
                return recorder.end_step(tu.get(data, "training_step"))
        return {}

    def _recorder_of(self, loss_function: Callable[..., Any]) -> SpikeRecorder | None:
        """What records a mini-batch with this loss; None if nothing does."""
        config = bound_config(loss_function, SpikeConfig)
        if config is None or not config.records_spikes:
            return None
        if not self._recorder_is_built:
            self._recorder_is_built = True
            with guarded("gradient spikes are not recorded"):
                self.recorder = self._build_recorder(config)
        return self.recorder

    def _build_recorder(self, config: Any) -> SpikeRecorder | None:
        engine: Any = self
        if getattr(engine.engine_config, "dynamic_context_parallel", False):
            raise NotRecordedError(
                "with dynamic_context_parallel, ranks split one batch anew for each step, and each sees a part of it"
            )
        if not engine.is_mp_src_rank_with_outputs():
            return None
        self._recorder_places = MiniBatchPlaces()
        model_config = engine.model_config
        # FSDP's module has what transformers loaded; other engines have a model of their own.
        of_files = SimpleNamespace(
            config=getattr(model_config, "hf_config", None),
            generation_config=getattr(model_config, "generation_config", None),
        )
        module = getattr(engine, "module", None)
        recorder = SpikeRecorder(
            config,
            engine.get_data_parallel_rank(),
            engine.get_data_parallel_size(),
            partial(engine_context, self, config),
            getattr(model_config, "tokenizer", None),
            eos_tokens(module) or eos_tokens(of_files),
        )
        if self._recorder_state is not None:
            recorder.load(self._recorder_state)
        return recorder
