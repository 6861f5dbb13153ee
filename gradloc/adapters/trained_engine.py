# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for any engine of verl 0.9: a mixin that uses verl's base interface."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from ..fsdp import collectives
from ..guarded import ForeseenError, guarded, warn_once
from .actor_config import CriticSpikeConfig, SpikeConfig
from .engine_data import OUTPUTS, ROW, LossData, MiniBatchPlaces, as_metric, flat_outputs, loss_scale, padded
from .loss_weights import eos_tokens
from .saved_state import read_state
from .spike_recorder import SpikeRecorder
from .update_evidence import DATA_KEYS, TrainedData, UpdateEvidence
from .watch import Watch


class TrainedEngine:
    """Watches what an engine trains, which comes behind it in the order of bases.

    It acts only within `train_batch`, and only if the configuration that the loss is bound to turns it on. Each
    `train_batch` makes one optimizer step; see `MiniBatchPlaces`. With the step's last mini-batch, its metrics are in
    the output, and rank 0 writes its evidence.

    Of an engine that has only the base interface, spikes are recorded (`spike_search=replay`), on ranks that have the
    model's outputs. That makes no collective call, and an error in it is a warning. See `WatchedEngine` for FSDP's.

    Attributes:
        watch (Watch | None): None where it is off, and before the first `train_batch`.
    """

    watch: Watch | None = None
    _settings: Any = None
    # Reads the state of a checkpoint that was loaded before there was a watch.
    _read_state: Callable[[], dict[str, Any]] | None = None
    _watching = False

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        config = getattr(loss_function, "keywords", {}).get("config")
        if isinstance(config, (SpikeConfig, CriticSpikeConfig)):
            if self._settings is None:
                self._build(config)
            self._settings = config
        watch = self.watch
        if watch is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        self._where, last = self._places.next(data)
        step = tu.get(data, "training_step")
        self._start(step)
        data[ROW] = torch.arange(len(data))
        self._watching = True
        if watch.recorder is not None or watch.watches_passes:
            loss_function = partial(self._observed, loss_function)
        try:
            outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        finally:
            self._watching = False
            watch.stop()
            data.pop(ROW, None)
        metrics = watch.metrics() if last else {}
        evidence = self._evidence
        own = [] if watch.recorder is None else watch.recorder.events
        lines = watch.lines()
        trained = TrainedData({key: tu.get(data, key) for key in DATA_KEYS if key in data.keys()})
        evidence.add(lines, trained)
        if self._where[0] == 0:  # later PPO epochs have the same rows
            evidence.take_in_rewards(trained)
        with guarded("the evidence of a step is not written", self._said):
            if watch.recorder is not None:
                evidence.add(own, trained, own=True)
            if last:
                evidence.write(step, metrics, watch.warnings)
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({name: as_metric(value) for name, value in metrics.items()})
        return outputs

    def optimizer_step(self) -> Any:
        if not self._watching:
            return super().optimizer_step()  # type: ignore[misc]
        assert self.watch is not None
        return self.watch.step(*self._where, super().optimizer_step)  # type: ignore[misc]

    def save_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        if self.watch is not None and getattr(self._checkpoints, "should_save_extra", True):
            self.watch.save(local_path)

    def load_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        extra = getattr(self._checkpoints, "should_load_extra", True)
        read = functools.cache(partial(read_state, local_path if extra else None))
        with suppress(ValueError):  # raised again where it is loaded
            read()  # first: the engine may remove the folder
        super().load_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        if self.watch is not None:
            self.watch.load(read)
        else:  # loaded in the first update, if that turns anything on: no collective call without it
            self._read_state = read

    def _observed(
        self, loss_function: Callable[..., Any], *arguments: Any, inputs: dict[str, Any] | None = None, **named: Any
    ) -> Any:
        """What the loss function returns, with the tokens that it is computed from observed.

        For `inputs` see `LossData`. Where spikes are only recorded, an error in that is a warning.
        """
        assert self.watch is not None
        watch, recorder = self.watch, self.watch.recorder
        seen = None
        if {"model_output", "data"} <= named.keys():  # else an engine processes logits with it
            output, data = named["model_output"], named["data"]
            with nullcontext() if recorder is None or watch.watches_passes else recorder.recording(data):
                flat = flat_outputs(output)
                seen = LossData(flat, data, inputs)
        if seen is None:
            return loss_function(*arguments, **named)
        # Only a tensor that the loss was given itself sees its gradient.
        named["model_output"] = {**output, **flat}
        with watch.loss(lambda: padded(data["response_mask"]), self._batch_info):
            result = loss_function(*arguments, **named)
        loss_inputs = {OUTPUTS[key][1]: (values, seen.of_responses) for key, values in flat.items()}
        read = watch.observe(loss_inputs, seen.read_tokens, lambda: seen.shape, **self._batch_info())
        if recorder is not None:
            with recorder.recording(data):
                recorder.observe(seen, loss_inputs, read, result)
        return result

    def _batch_info(self) -> Mapping[str, Any]:
        """With what verl aggregates the terms of KL and entropy, once a loss is computed; a critic has none."""
        return getattr(self._settings, "global_batch_info", {})

    @property
    def _checkpoints(self) -> Any:
        return getattr(self, "checkpoint_manager", None)

    def _start(self, training_step: int | None) -> None:
        """Begins a mini-batch; the first one begins a step."""
        assert self.watch is not None
        if self._where != (0, 0):
            self.watch.start_mini_batch()
            return
        if training_step is None and collectives.rank() == 0:
            warn_once(self._said, "the trainer passes no step number: global_step is null in the evidence")
        self.watch.start_update(training_step)

    def _build(self, config: Any) -> None:
        self._settings, self._places = config, MiniBatchPlaces()
        self._said: set[str] = set()
        self.watch = self._build_watch(config)
        if self.watch is None:
            return
        rank = None if self.watch.recorder is None else self.watch.recorder.rank
        tokenizer, size = getattr(self.model_config, "tokenizer", None), self.watch.sequence_parallel_size
        self._evidence = UpdateEvidence(config.bisect_dump_dir, tokenizer, size, rank)
        if self._read_state is not None:
            self.watch.load(self._read_state)

    def _build_watch(self, config: Any) -> Watch | None:
        """What watches the engine's model with this configuration; None if nothing does."""
        recorder = self._build_recorder(config)
        if recorder is None:
            return None
        return Watch(config, partial(loss_scale, self), 1, recorder, self._eos_tokens())

    def _eos_tokens(self) -> set[int]:
        """FSDP's module has what transformers loaded; other engines have a model of their own."""
        return eos_tokens(getattr(self, "module", None)) or eos_tokens(self.model_config)

    def _build_recorder(self, config: Any) -> SpikeRecorder | None:
        """What records the spikes of this rank; None if nothing does."""
        if not config.records_spikes:
            return None
        with guarded("gradient spikes are not recorded"):
            if getattr(self.engine_config, "dynamic_context_parallel", False):
                raise ForeseenError(
                    "with dynamic_context_parallel, ranks split one batch anew for each step, and each sees a part of "
                    "it"
                )
            if self.is_mp_src_rank_with_outputs():
                return SpikeRecorder(self, config)
        return None
