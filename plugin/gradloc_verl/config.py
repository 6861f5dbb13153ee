# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's configurations of actor and critic with GradLoc's keys: what the config groups name as `_target_`."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from verl.workers import config

from . import status

PATCHED = status.is_patched()


class _NeedsPlugin:
    """A base before the others: a run that uses GradLoc needs the whole plugin in this process."""

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the other bases
        clips = (getattr(self, name, {}) for name in ("layer_clip", "token_clip"))  # a critic has none
        if self.spike_detection or any(clip.get("enable", False) for clip in clips):
            status.require("critic" if isinstance(self, config.FSDPCriticConfig) else "actor_rollout_ref.actor")


def _with_keys(name: str, keys: str | None = None) -> Any:
    """A patched verl's own class of this name; else the package's, or verl's with the keys of one of the package's."""
    if PATCHED:
        return getattr(config, name)
    of_package = resolve_name(f"gradloc.adapters.actor_config:{keys or name}")
    if keys is None:
        return of_package
    return dataclass(type(name, (_NeedsPlugin, of_package, getattr(config, name)), {"__module__": __name__}))


LayerClipConfig = _with_keys("LayerClipConfig")
TokenClipConfig = _with_keys("TokenClipConfig")
FSDPActorConfig = _with_keys("FSDPActorConfig", "SpikeConfig")
McoreActorConfig = _with_keys("McoreActorConfig", "RecordedSpikeConfig")
VeOmniActorConfig = _with_keys("VeOmniActorConfig", "RecordedSpikeConfig")
TorchTitanActorConfig = _with_keys("TorchTitanActorConfig", "RecordedSpikeConfig")
FSDPCriticConfig = _with_keys("FSDPCriticConfig", "CriticSpikeConfig")
