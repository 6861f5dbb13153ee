# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc as callbacks of a verl with callbacks.patch, in place of its hooks.

With this folder and GradLoc on PYTHONPATH, and as many of GradLoc's keys as are wanted:

    actor_rollout_ref.actor.fsdp_config.callbacks='[{_target_: gradloc_callbacks.GradLoc, spike_detection: true}]'
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from omegaconf import OmegaConf, open_dict
from verl.utils.callback import EngineCallback, TrainerCallback
from verl.workers.config import CriticConfig

from gradloc.adapters.actor_config import CriticSpikeConfig, SpikeConfig
from gradloc.adapters.engine_data import ROW
from gradloc.adapters.engines import WatchedEngine
from gradloc.adapters.spike_stop import RepeatedSpikes, start_spike_stop


class _Engine:
    """What the mixin stands over: verl's engine, which makes its own calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_step(self, *arguments: Any) -> Any:
        return self._engine.forward_step(*arguments)

    def save_checkpoint(self, local_path: str) -> None: ...

    def load_checkpoint(self, local_path: str) -> None: ...


class _Watched(WatchedEngine, _Engine):
    pass


class GradLoc(EngineCallback, TrainerCallback):
    """Its keyword arguments are GradLoc's keys; one that is out of range is refused before Ray starts."""

    def __init__(self, **keys: Any) -> None:
        self._keys = keys
        self._all_keys = SpikeConfig(**keys)

    def on_build(self, engine: Any, **_: Any) -> None:
        self._watched = _Watched(engine)
        self._config: Any = None
        self._inputs: dict[str, Any] = {}

    def on_begin(self, engine: Any, data: Any, loss_function: Any, **_: Any) -> None:
        if self._config is None:
            self._config = _with_keys(loss_function.keywords["config"], self._keys)
        self._watched.begin(data, self._config)

    def on_micro_batch(self, engine: Any, micro_batch: Any, **_: Any) -> None:
        if self._watches_passes:
            self._inputs = self._watched.begin_pass(micro_batch)

    def wrap_loss(self, engine: Any, loss_function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        if not self._watches_passes:
            return loss_function
        return lambda **given: self._watched.observed(loss_function, inputs=self._inputs, **given)

    def optimizer_step(self, engine: Any, step: Callable[[], Any], **_: Any) -> Any:
        watch = self._watched.watch
        return step() if watch is None else watch.step(*self._watched._where, step)

    def on_end(self, engine: Any, data: Any, outputs: dict[str, Any], **_: Any) -> None:
        if self._watched.watch is not None:
            data.pop(ROW)
            self._watched.end(data, outputs)

    def on_save(self, engine: Any, local_path: str, **_: Any) -> None:
        self._watched.save_checkpoint(local_path)

    def on_load(self, engine: Any, local_path: str, **_: Any) -> None:
        self._watched.load_checkpoint(local_path)

    def on_start(self, trainer: Any, **_: Any) -> None:
        config = trainer.config.copy()
        with open_dict(config):
            OmegaConf.update(config, "actor_rollout_ref.actor", asdict(self._all_keys))
        self._stop = start_spike_stop(config, trainer.total_training_steps)

    def should_stop(self, trainer: Any, metrics: Mapping[str, Any], **_: Any) -> bool:
        self._stop.is_due(metrics, trainer.global_steps)
        try:
            self._stop.end_if_due(trainer.global_steps)
        except RepeatedSpikes as spikes:
            print(spikes, flush=True)
            return True
        return False

    @property
    def _watches_passes(self) -> bool:
        return self._watched.watch is not None and self._watched.watch.watches_passes


def _with_keys(config: Any, keys: Mapping[str, Any]) -> Any:
    """verl's configuration of an actor or critic, with GradLoc's keys as well."""
    base = CriticSpikeConfig if isinstance(config, CriticConfig) else SpikeConfig
    joined: Any = dataclass(type(type(config).__name__, (base, type(config)), {}))
    return joined(**{field.name: getattr(config, field.name) for field in fields(config)}, **keys)
