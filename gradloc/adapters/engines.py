# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the FSDP engines of verl 0.9: a mixin, and what puts it over them."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from ..config import is_on
from ..fsdp import collectives
from ..guarded import guarded, warn_once
from .actor_config import CriticSpikeConfig, SpikeConfig
from .engine_data import (
    OUTPUTS,
    ROW,
    LossData,
    as_given,
    as_metric,
    flat_outputs,
    inputs_of,
    loss_scale,
    padded,
    response_index,
    sequences,
)
from .loss_weights import eos_tokens
from .replay_bundles import engine_context, ragged_rows
from .update_evidence import DATA_KEYS, TrainedData, UpdateEvidence
from .watch import Watch, read_state, watch_actor, watch_critic


class WatchedEngine:
    """Watches what an FSDP engine trains, which comes behind it in the order of bases.

    It acts only within `train_batch`, and only if the configuration that the loss is bound to turns it on. Each
    `train_batch` makes one optimizer step; see `_place`. With the step's last mini-batch, its metrics are in
    the output, and rank 0 writes its evidence.

    Attributes:
        watch (Watch | None): None where it is off, and before the first `train_batch`.
    """

    watch: Watch | None = None
    _settings: Any = None
    # Reads the state of a checkpoint that was loaded before there was a watch.
    _read_state: Callable[[], dict[str, Any] | str] | None = None
    _watching = False
    # The PPO epoch and the number of the last mini-batch in its step, and how many came before its update there.
    _where = 0, -1
    _is_last = False
    _earlier = 0

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        self.begin(data, getattr(loss_function, "keywords", {}).get("config"))
        watch = self.watch
        if watch is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        self._watching = True
        if watch.watches_passes:
            loss_function = partial(self.observed, loss_function)
        try:
            outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        finally:
            self._watching = False
            data.pop(ROW, None)
        self.end(data, outputs)
        return outputs

    def begin(self, data: TensorDict, config: Any) -> None:
        """Called before a mini-batch, with the configuration that its loss is bound to; leaves `ROW` in the data."""
        if isinstance(config, (SpikeConfig, CriticSpikeConfig)):
            if self._settings is None:
                self._build(config)
            self._settings = config
        if self.watch is not None:
            self._is_last = self._place(data)
            self._start(tu.get(data, "training_step"), tu.get(data, "rollout_is_current", False))
            data[ROW] = torch.arange(len(data))

    def end(self, data: TensorDict, outputs: dict[str, Any]) -> None:
        """Called after a mini-batch's optimizer step: the evidence, and the metrics in the outputs."""
        watch, last = self.watch, self._is_last
        assert watch is not None
        metrics, evidence = watch.metrics() if last else {}, self._evidence
        trained = TrainedData({key: tu.get(data, key) for key in DATA_KEYS if key in data.keys()})
        evidence.add(watch.lines(), trained)
        if self._where[0] == 0:  # later PPO epochs have the same rows
            evidence.take_in_rows(trained)
        if last:
            with guarded("the evidence of a step is not written", self._said):
                evidence.write(tu.get(data, "training_step"), metrics, watch.answer)
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({name: as_metric(value) for name, value in metrics.items()})

    def optimizer_step(self) -> Any:
        if not self._watching:
            return super().optimizer_step()  # type: ignore[misc]
        assert self.watch is not None
        return self.watch.step(*self._where, super().optimizer_step)  # type: ignore[misc]

    def save_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        extra = getattr(getattr(self, "checkpoint_manager", None), "should_save_extra", True)
        if self.watch is not None and extra:
            self.watch.save(local_path)

    def load_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        extra = getattr(getattr(self, "checkpoint_manager", None), "should_load_extra", True)
        read = functools.cache(partial(read_state, local_path if extra else None))
        read()  # first: the engine may remove the folder
        super().load_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        if self.watch is not None:
            self.watch.load(read)
        else:  # loaded in the first update, if that turns anything on: no collective call without it
            self._read_state = read

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        watch = self.watch
        if watch is None or not watch.watches_passes or not self._watching or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        assert loss_function is not None  # the engine's loss is only left out without a backward
        observed = partial(loss_function, inputs=self.begin_pass(micro_batch))
        return super().forward_step(micro_batch, observed, forward_only)  # type: ignore[misc]

    def begin_pass(self, micro_batch: TensorDict) -> dict[str, Any]:
        """Called before a micro-batch's forward; returns its inputs, which `observed` takes."""
        assert self.watch is not None
        # Before the engine moves it to the device, where reading lengths would wait for the device.
        inputs = inputs_of(micro_batch)
        self.watch.begin_pass(inputs, micro_batch[ROW].tolist(), partial(sequences, inputs))
        return inputs

    def observed(self, loss_function: Callable[..., Any], *arguments: Any, inputs: dict[str, Any], **named: Any) -> Any:
        """What the loss function returns, with its tokens observed; for `inputs` see `LossData`."""
        if not {"model_output", "data"} <= named.keys():  # an engine processes logits with it
            return loss_function(*arguments, **named)
        assert self.watch is not None
        watch, output, data = self.watch, named["model_output"], named["data"]
        flat = flat_outputs(output)
        seen = LossData(flat, data, inputs)
        # Only a tensor that the loss is computed from sees its gradient.
        named["model_output"] = {**output, **as_given(flat, output)}
        with watch.loss(lambda: padded(data["response_mask"]), self._batch_info):
            result = loss_function(*arguments, **named)
        loss_inputs = {OUTPUTS[key][1]: (values, seen.of_responses) for key, values in flat.items()}
        watch.observe(loss_inputs, seen.read_tokens, lambda: seen.shape, **self._batch_info())
        return result

    def _batch_info(self) -> Mapping[str, Any]:
        """With what verl aggregates the terms of KL and entropy, once a loss is computed; a critic has none."""
        return getattr(self._settings, "global_batch_info", {})

    def _place(self, data: TensorDict) -> bool:
        """Notes which mini-batch of its step this is; returns whether it is the step's last one.

        verl calls `train_batch` once for each mini-batch of an update, and says in the data which one it is; one that
        says nothing is an update of its own. Several updates may make up a step, as in verl's asynchronous trainer with
        separate rollouts: then the mini-batches count on.
        """
        update, updates = tu.get(data, "update_of_step", (0, 1))
        epoch, mini_batch = tu.get(data, "epoch_and_mini_batch", (0, 0))
        if (epoch, mini_batch) == (0, 0):
            self._earlier = self._where[1] + 1 if update else 0
        self._where = epoch, self._earlier + mini_batch
        return tu.get(data, "update_lr_scheduler", True) and update == updates - 1

    def _start(self, training_step: int | None, rollout_is_current: bool = False) -> None:
        """Begins a mini-batch; the first one begins a step."""
        assert self.watch is not None
        if self._where != (0, 0):
            self.watch.start_mini_batch()
            return
        if training_step is None and collectives.rank() == 0:
            warn_once(self._said, "the trainer passes no step number: global_step is null in the evidence")
        self.watch.start_update(training_step, rollout_is_current)

    def _build(self, config: Any) -> None:
        self._settings = config
        self._said: set[str] = set()
        self.watch = watch = self._build_watch(config)
        if watch is not None:
            tokenizer, size = getattr(self.model_config, "tokenizer", None), watch.sequence_parallel_size
            self._evidence = UpdateEvidence(config.bisect_dump_dir, tokenizer, size)
            if self._read_state is not None:
                watch.load(self._read_state)

    def _build_watch(self, config: Any) -> Watch | None:
        """What watches the engine's model with this configuration; None if nothing does."""
        group_size, scale = self.ulysses_sequence_parallel_size, partial(loss_scale, self)
        if isinstance(config, CriticSpikeConfig):
            return watch_critic(self.module, config, scale, group_size) if config.spike_detection else None
        if not is_on(config):
            return None
        return watch_actor(
            self.module,
            config,
            partial(_forward_rows, self),
            ragged_rows,
            partial(engine_context, self, config),
            loss_scale=scale,
            sequence_parallel_size=group_size,
            learning_rate=lambda: self.optimizer.param_groups[0]["lr"],
            eos_tokens=eos_tokens(self.module),
        )


def _forward_rows(
    engine: WatchedEngine, inputs: dict[str, Any], rows: list[int], response_length: int
) -> tuple[Tensor | None, Tensor]:
    """The engine's forward of some rows of a micro-batch: `forward` as `GradLoc` takes it."""
    settings, device = dict(inputs["settings"]), get_device_id()
    images = settings.pop("multi_modal_inputs", None)
    cut: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "response_lengths": []}
    for row in rows:
        # Images in a response, which tools may give, cannot be cut off.
        length = inputs["response_lengths"][row]
        kept = length if images is not None else min(length, response_length)
        end = len(inputs["input_ids"][row]) - length + kept
        cut["response_lengths"].append(kept)
        for name in ("input_ids", "position_ids"):
            cut[name].append(inputs[name][row][..., :end].to(device))
    columns: dict[str, Any] = {
        "input_ids": torch.nested.as_nested_tensor(cut["input_ids"], layout=torch.jagged),
        "position_ids": tu.nested_tensor_from_tensor_list(cut["position_ids"]),
    }
    if images is not None:
        columns["multi_modal_inputs"] = [images[row] for row in rows]
    settings["calculate_entropy"] = engine._settings.entropy_coeff != 0
    captured: dict[str, Tensor] = {}

    def capture(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict]:
        is_response, index = response_index(cut, response_length, device)
        for name, values in flat_outputs(model_output).items():
            captured[name] = torch.where(is_response, values[index], 0.0)
        return torch.zeros((), device=device), {}

    unwatched = super(WatchedEngine, engine).forward_step  # type: ignore[misc]
    unwatched(tu.get_tensordict(columns, settings), capture, False)
    return captured.get("entropy"), captured["log_probs"]


def watch_engines() -> None:
    """Puts the mixin over verl's FSDP engines for language models and for critics, where they are registered."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for backends in EngineRegistry._engines.values():
        for registered in backends.values():
            for key, engine in registered.items():
                if engine in (FSDPEngineWithLMHead, FSDPEngineWithValueHead):
                    registered[key] = _watched(engine)


@functools.cache
def _watched(engine: type) -> type:
    return type(engine.__name__, (WatchedEngine, engine), {"__module__": __name__})
