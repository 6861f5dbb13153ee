# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The model that is trained, and what it takes to measure its gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..fsdp import collectives
from ..fsdp.torch_compat import missing_names
from ..layers.reduced_norms import ReducedNorms
from .micro_batch import MicroBatch
from .passes import Forward, PassedModel, Passes
from .probes import LocalMeter, Meter, ReducedMeter


class WatchedModel(PassedModel):
    """A model, how its trainer runs it, and the meter that measures its gradients; `watch` makes one.

    For `width` see `LocalMeter`, for all else `GradLoc`.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        device: torch.device,
        meter: str = "local",
        width: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, forward, device, **options)
        # How many ranks, or groups of such ranks, have data of their own.
        self.data_parallel_size = collectives.world_size() // self.sequence_parallel_size
        if missing := missing_names(module):
            raise RuntimeError(
                f"torch {torch.__version__} lacks {', '.join(missing)}, without which the gradients of this model "
                "cannot be measured; use a torch that docs/use/support.md names"
            )
        self.reduced_norms = ReducedNorms(module, device)
        self.meter: Meter
        if meter == "reduced" or self.sequence_parallel_size > 1:
            self.meter = ReducedMeter(self.reduced_norms, device, self.sequence_parallel_size)
        else:
            self.meter = LocalMeter(module, device, width)

    @classmethod
    def watch(cls, module: nn.Module, forward: Forward, device: torch.device, **options: Any) -> "WatchedModel":
        """Makes one. A collective call.

        Raises:
            RankFailedError: On some rank the model cannot be watched, for example because its torch lacks something.
        """
        with collectives.raised_on_all_ranks(device):
            return cls(module, forward, device, **options)

    def passes(self, own: Sequence[MicroBatch], scale: float) -> Passes:
        """Extra passes over this mini-batch."""
        return Passes(self, own, scale)

    def reduced_squares(self, scale: float) -> Tensor:
        """The squared norms by layer of the reduced gradient, without the loss scale. A collective call."""
        return self.reduced_norms.squared_norms() / scale**2
