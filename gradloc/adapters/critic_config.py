# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's critic configuration that turn the watch over it on."""

from dataclasses import dataclass, fields

from verl.base_config import BaseConfig

from .actor_config import SpikeConfig


@dataclass
class CriticSpikeConfig(BaseConfig):
    """A base of the critic's configuration, before verl's own.

    Args:
        spike_detection (bool): Whether to find what spikes of the critic's gradient norm come from.
        grad_norm_threshold (float | str): Gradient norm of a single value (its share of the gradient divided by its
            weight in the loss) that counts as a spike; "auto": 5 × the 90th percentile of the last 256 mini-batches.
        bisect_dump_dir (str): Directory of the evidence, critic.jsonl.
    """

    spike_detection: bool = False
    grad_norm_threshold: float | str = "auto"
    bisect_dump_dir: str = "checkpoints/bisect_dump"

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # verl's own, which is the next base
        keys = {key.name: getattr(self, key.name) for key in fields(CriticSpikeConfig)}
        try:
            SpikeConfig(**keys)
        except ValueError as error:
            raise ValueError(f"[critic] {str(error).removeprefix('[actor] ')}") from None
