# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The configurations of a verl that is not patched, with GradLoc's keys."""

from dataclasses import dataclass

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


@dataclass
class FSDPActorConfig(SpikeConfig, config.FSDPActorConfig):  # type: ignore[misc]  # checked with a patched verl
    """verl's, with the keys of SpikeConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_spike_keys()
        if self.spike_detection or self.layer_clip.enable or self.token_clip.enable:
            status.require()


@dataclass
class McoreActorConfig(RecordedSpikeConfig, config.McoreActorConfig):
    """verl's, with the keys of RecordedSpikeConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)


@dataclass
class VeOmniActorConfig(RecordedSpikeConfig, config.VeOmniActorConfig):  # type: ignore[name-defined]
    """verl's, with the keys of RecordedSpikeConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)


@dataclass
class TorchTitanActorConfig(RecordedSpikeConfig, config.TorchTitanActorConfig):  # type: ignore[name-defined]
    """verl's, with the keys of RecordedSpikeConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)


def _check(actor: SpikeConfig) -> None:
    actor.check_spike_keys()
    if actor.spike_detection:
        status.require()


@dataclass
class FSDPCriticConfig(CriticSpikeConfig, config.FSDPCriticConfig):
    """verl's, with the keys of CriticSpikeConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_spike_keys()
        if self.spike_detection:
            status.require("critic")
