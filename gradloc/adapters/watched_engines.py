# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Puts the mixins of this package over the engines that verl 0.9 has registered."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

from .critic_engine import WatchedValueEngine
from .fsdp_engine import WatchedEngine
from .recorded_engine import RecordedEngine


def watch_engines() -> None:
    """Puts mixins over all engines for language models, and over the FSDP engines for critics.

    Spikes of the FSDP engine can be searched in training; those of the others are recorded. Called when verl has
    registered those of its engines whose packages are installed.
    """
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    watched = {
        FSDPEngineWithLMHead: _with(WatchedEngine, FSDPEngineWithLMHead),
        FSDPEngineWithValueHead: _with(WatchedValueEngine, FSDPEngineWithValueHead),
    }
    for model_type, backends in EngineRegistry._engines.items():
        for backend, registered in backends.items():
            for key, engine in registered.items():
                if backend in ("fsdp", "fsdp2"):
                    registered[key] = watched.get(engine, engine)
                if model_type == "language_model":
                    registered[key] = _recorded(registered[key])


_classes: dict[type, type] = {}


def _recorded(engine: type) -> type:
    if issubclass(engine, RecordedEngine):
        return engine
    if engine not in _classes:
        _classes[engine] = _with(RecordedEngine, engine)
    return _classes[engine]


def _with(mixin: type, engine: type) -> type:
    return type(engine.__name__, (mixin, engine), {"__module__": __name__})
