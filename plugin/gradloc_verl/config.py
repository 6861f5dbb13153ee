# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's configurations of actor and critic with GradLoc's keys: what the config groups name as `_target_`.

In a patched verl they are verl's own, which have the keys already.
"""

from dataclasses import dataclass

from verl.workers import config as of_verl

from . import status
from .patched import is_patched

if is_patched():
    FSDPActorConfig = of_verl.FSDPActorConfig
    FSDPCriticConfig = of_verl.FSDPCriticConfig
    LayerClipConfig = of_verl.LayerClipConfig
    TokenClipConfig = of_verl.TokenClipConfig
else:
    from gradloc.adapters.actor_config import LayerClipConfig, SpikeConfig, TokenClipConfig
    from gradloc.adapters.critic_config import CriticSpikeConfig

    @dataclass
    class FSDPActorConfig(SpikeConfig, of_verl.FSDPActorConfig):  # type: ignore[no-redef]
        """verl's, with the keys of SpikeConfig."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_spike_keys()
            if self.spike_detection or self.layer_clip.enable or self.token_clip.enable:
                status.require()

    @dataclass
    class FSDPCriticConfig(CriticSpikeConfig, of_verl.FSDPCriticConfig):  # type: ignore[no-redef]
        """verl's, with the keys of CriticSpikeConfig."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_spike_keys()
            if self.spike_detection:
                status.require("critic")


__all__ = ["FSDPActorConfig", "FSDPCriticConfig", "LayerClipConfig", "TokenClipConfig"]
