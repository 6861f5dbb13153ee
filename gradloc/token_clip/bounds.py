# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The bounds of backward signals at all boundaries, and how many signals may be cut."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..fsdp import collectives
from .config import TokenClipConfig
from .usual_signal import UsualSignal

logger = logging.getLogger(__name__)


class Bounds:
    """What the last optimizer steps say of a mini-batch's signals; the same on every rank.

    Args:
        boundaries (Sequence[str]): In the order of the forward.
        config (TokenClipConfig): The settings.
        device (torch.device): The device that the model computes on.
        sequence_parallel_size (int): How many neighbouring ranks work on the same data.

    Attributes:
        tensor (Tensor): The bounds, on the device, float32 of shape (boundaries,); infinite in the warm-up.
        limit (int): How many signals of a rank may be cut at a boundary in a mini-batch.
        limit_of_part (int): The same below the log-probs, where each rank of a group has a part of the positions.
    """

    def __init__(
        self, boundaries: Sequence[str], config: TokenClipConfig, device: torch.device, sequence_parallel_size: int
    ) -> None:
        self._config = config
        self._device = device
        self._sequence_parallel_size = sequence_parallel_size
        self._usual = {boundary: UsualSignal() for boundary in boundaries}
        # Of a mini-batch, on all ranks.
        self._tokens = 0.0
        self._set()

    def usual(self, boundary: str) -> float:
        """A boundary's usual largest signal; 0 in the warm-up."""
        return self._usual[boundary].value

    def take_in(self, largest: Mapping[str, float], tokens: float) -> None:
        """Adds a step.

        Args:
            largest (Mapping[str, float]): Its largest signal by boundary.
            tokens (float): How many tokens of all ranks have a weight in the loss.
        """
        config = self._config
        for boundary, value in largest.items():
            self._usual[boundary].take_in(value, config.factor, config.beta, config.warmup_steps)
        self._tokens = tokens or self._tokens
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank and for any number of ranks."""
        return {"boundaries": {name: asdict(usual) for name, usual in self._usual.items()}, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None (no saved state) the warm-up starts over.

        Raises:
            ValueError: The state belongs to other boundaries.
        """
        if state is None:
            logger.warning(
                "No TokenClip statistics are loaded (there is no gradloc_state.pt beside the checkpoint, or "
                "checkpoint.load_contents is without 'extra'); the warm-up starts over."
            )
            state = {"boundaries": {name: {} for name in self._usual}, "tokens": 0.0}
        saved, here = set(state["boundaries"]), set(self._usual)
        if saved != here:
            raise ValueError(
                "The checkpoint's TokenClip statistics belong to another model (boundaries only in the checkpoint: "
                f"{sorted(saved - here)}; only in this model: {sorted(here - saved)}): resume from a checkpoint of "
                "this model, or set actor_rollout_ref.actor.token_clip.enable=False."
            )
        self._usual = {name: UsualSignal(**state["boundaries"][name]) for name in self._usual}
        self._tokens = state["tokens"]
        self._set()

    def _set(self) -> None:
        groups = collectives.world_size() // self._sequence_parallel_size
        self.limit = max(1, int(self._config.max_share * self._tokens / groups))
        self.limit_of_part = max(1, self.limit // self._sequence_parallel_size)
        bounds = [self._config.factor * usual.value or math.inf for usual in self._usual.values()]
        # Pageable memory is copied at once, so the host need not wait until the device has it.
        self.tensor = torch.tensor(bounds, dtype=torch.float32).to(self._device, non_blocking=True)
