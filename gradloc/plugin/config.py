# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's configurations of actor and critic with GradLoc's keys: what the config groups name as `_target_`."""

from dataclasses import dataclass
from typing import Any

from verl.workers import config

from ..adapters.actor_config import CriticSpikeConfig, LayerClipConfig, SpikeConfig, TokenClipConfig
from ..config import is_on
from . import status

__all__ = ["FSDPActorConfig", "FSDPCriticConfig", "LayerClipConfig", "TokenClipConfig"]

PATCHED = status.is_patched()


class _NeedsPlugin:
    """A base before the others: a run that uses GradLoc needs the whole plugin in this process."""

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the other bases
        if is_on(self):
            status.require("critic" if isinstance(self, config.FSDPCriticConfig) else "actor_rollout_ref.actor")


def _with_keys(name: str, keys: type) -> Any:
    """A patched verl's own class of this name; else verl's with these keys."""
    if PATCHED:
        return getattr(config, name)
    return dataclass(type(name, (_NeedsPlugin, keys, getattr(config, name)), {"__module__": __name__}))


FSDPActorConfig = _with_keys("FSDPActorConfig", SpikeConfig)
FSDPCriticConfig = _with_keys("FSDPCriticConfig", CriticSpikeConfig)
