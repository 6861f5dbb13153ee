# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the FSDP engines of verl 0.9, a mixin, and what puts it and that of other engines over them."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from .actor_config import CriticSpikeConfig
from .engine_data import OUTPUTS, ROW, inputs_of, loss_scale, sequences
from .replay_bundles import engine_context, ragged_rows
from .trained_engine import TrainedEngine
from .watch import Watch, watch_actor, watch_critic


class WatchedEngine(TrainedEngine):
    """Watches the training passes of an FSDP engine, which comes behind it in the order of bases."""

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        watch = self.watch
        if watch is None or not watch.watches_passes or not self._watching or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        # Before the engine moves it to the device, where reading lengths would wait for the device.
        inputs = inputs_of(micro_batch)
        watch.begin_pass(inputs, micro_batch[ROW].tolist(), partial(sequences, inputs))
        assert loss_function is not None  # the engine's loss is only left out without a backward
        observed = partial(loss_function, inputs=inputs)
        return super().forward_step(micro_batch, observed, forward_only)  # type: ignore[misc]

    def _build_watch(self, config: Any) -> Watch | None:
        group_size: int = self.ulysses_sequence_parallel_size
        scale = partial(loss_scale, self)
        if isinstance(config, CriticSpikeConfig):
            return watch_critic(self.module, config, scale, group_size) if config.spike_detection else None
        if not (config.searches_in_training or config.layer_clip.enable or config.token_clip.enable):
            return super()._build_watch(config)
        return watch_actor(
            self.module,
            config,
            partial(_forward_rows, self),
            ragged_rows,
            partial(engine_context, self, config),
            loss_scale=scale,
            sequence_parallel_size=group_size,
            learning_rate=lambda: self.optimizer.param_groups[0]["lr"],
            recorder=self._build_recorder(config),
            eos_tokens=self._eos_tokens(),
        )


def _forward_rows(
    engine: WatchedEngine, inputs: dict[str, Any], rows: list[int], response_length: int
) -> tuple[Tensor | None, Tensor]:
    """The engine's forward of some rows of a micro-batch: `forward` as `GradLoc` takes it."""
    settings = dict(inputs["settings"])
    images = settings.pop("multi_modal_inputs", None)
    device = get_device_id()
    ids, positions, responses, prompts = [], [], [], []
    for row in rows:
        # Images in a response, which tools may give, cannot be cut off.
        length = inputs["response_lengths"][row]
        kept = length if images is not None else min(length, response_length)
        sequence = inputs["input_ids"][row]
        prompt = len(sequence) - length
        sequence = sequence[: prompt + kept].to(device)
        ids.append(sequence)
        positions.append(inputs["position_ids"][row][..., : prompt + kept].to(device))
        prompts.append(sequence[:prompt])
        responses.append(sequence[prompt:])
    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in (("input_ids", ids), ("prompts", prompts), ("responses", responses))
    }
    columns["position_ids"] = tu.nested_tensor_from_tensor_list(positions)
    if images is not None:
        columns["multi_modal_inputs"] = [images[row] for row in rows]
    if isinstance(settings.get("temperature"), Tensor):
        columns["temperature"] = settings.pop("temperature")[rows].to(device)
    settings["max_response_len"] = response_length
    settings["calculate_entropy"] = engine._settings.entropy_coeff != 0
    captured: dict[str, Tensor] = {}

    def capture(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict]:
        for name in OUTPUTS:
            if name in model_output:
                captured[name] = no_padding_2_padding(model_output[name], data)
        return torch.zeros((), device=device), {}

    batch = tu.get_tensordict(columns, settings)
    unwatched = super(WatchedEngine, engine).forward_step  # type: ignore[misc]
    unwatched(batch, capture, False)
    return captured.get("entropy"), captured["log_probs"]


def watch_engines() -> None:
    """Puts mixins over all engines for language models, and over the FSDP engine for critics.

    Spikes of the FSDP engine can be searched in training; those of the others are recorded. Called when verl has
    registered those of its engines whose packages are installed.
    """
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    of_fsdp = (FSDPEngineWithLMHead, FSDPEngineWithValueHead)
    for model_type, backends in EngineRegistry._engines.items():
        for backend, registered in backends.items():
            for key, engine in registered.items():
                if backend in ("fsdp", "fsdp2") and engine in of_fsdp:
                    registered[key] = _with(WatchedEngine, engine)
                elif model_type == "language_model":
                    registered[key] = _with(TrainedEngine, engine)


@functools.cache
def _with(mixin: type, engine: type) -> type:
    if issubclass(engine, TrainedEngine):
        return engine
    return type(engine.__name__, (mixin, engine), {"__module__": __name__})
