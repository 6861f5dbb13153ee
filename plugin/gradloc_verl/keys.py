# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The configurations of a verl that is not patched, with GradLoc's keys."""

from dataclasses import dataclass
from typing import Any

from verl.workers import config

from gradloc.adapters.actor_config import LayerClipConfig, RecordedSpikeConfig, SpikeConfig, TokenClipConfig
from gradloc.adapters.critic_config import CriticSpikeConfig

from . import status

__all__ = [
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "LayerClipConfig",
    "McoreActorConfig",
    "TokenClipConfig",
    "TorchTitanActorConfig",
    "VeOmniActorConfig",
]


class _NeedsPlugin:
    """A base before the others: a run that uses GradLoc needs the whole plugin in this process."""

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the other bases
        if self.spike_detection or any(clip.get("enable", False) for clip in (self.layer_clip, self.token_clip)):
            status.require()


@dataclass
class FSDPActorConfig(_NeedsPlugin, SpikeConfig, config.FSDPActorConfig):  # type: ignore[misc]  # checked with a patched verl
    """verl's, with the keys of SpikeConfig."""


@dataclass
class McoreActorConfig(_NeedsPlugin, RecordedSpikeConfig, config.McoreActorConfig):
    """verl's, with the keys of RecordedSpikeConfig."""


@dataclass
class VeOmniActorConfig(_NeedsPlugin, RecordedSpikeConfig, config.VeOmniActorConfig):  # type: ignore[name-defined]
    """verl's, with the keys of RecordedSpikeConfig."""


@dataclass
class TorchTitanActorConfig(_NeedsPlugin, RecordedSpikeConfig, config.TorchTitanActorConfig):  # type: ignore[name-defined]
    """verl's, with the keys of RecordedSpikeConfig."""


@dataclass
class FSDPCriticConfig(CriticSpikeConfig, config.FSDPCriticConfig):
    """verl's, with the keys of CriticSpikeConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spike_detection:
            status.require("critic")
