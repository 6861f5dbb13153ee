# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Puts the mixins of this package over the engines that verl 0.9 has registered."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import functools

from .fsdp_engine import WatchedEngine
from .trained_engine import TrainedEngine


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
