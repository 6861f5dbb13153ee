# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The model that is trained, and what it takes to measure its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..fsdp import collectives
from ..fsdp.failed_pass import RecordedCollectives
from ..fsdp.torch_compat import missing_names
from ..layers.reduced_norms import ReducedNorms
from .micro_batch import MicroBatch
from .passes import Cut, Forward, Passes
from .probes import LocalMeter, Meter, ReducedMeter


class WatchedModel:
    """A model, how its trainer runs it, and the meter that measures its gradients; `watch` makes one.

    Args: see `GradLoc`, and for `width` see `LocalMeter`.

    Attributes:
        data_parallel_size (int): How many ranks, or groups of such ranks, have data of their own.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        device: torch.device,
        *,
        sequence_parallel_size: int = 1,
        meter: str = "local",
        recover: Callable[[], None] | None = None,
        cut: Cut | None = None,
        width: int | None = None,
    ) -> None:
        self.module = module
        self.device = device
        self.sequence_parallel_size = sequence_parallel_size  # how many neighbouring ranks work on the same data
        self.data_parallel_size = collectives.world_size() // sequence_parallel_size
        self.rank = collectives.rank() // sequence_parallel_size  # this rank's data-parallel rank
        self.forward = forward
        self.recover = recover
        self.cut = cut
        self.recorded = {
            reduce: RecordedCollectives(can_replay=sequence_parallel_size == 1) for reduce in (True, False)
        }
        if missing := missing_names(module):
            raise RuntimeError(
                f"torch {torch.__version__} lacks {', '.join(missing)}, without which the gradients of this model "
                "cannot be measured; use a torch that docs/use/support.md names"
            )
        self.reduced_norms = ReducedNorms(module, device)
        reduced = meter == "reduced" or sequence_parallel_size > 1
        self.meter: Meter = (
            ReducedMeter(self.reduced_norms, device, sequence_parallel_size)
            if reduced
            else LocalMeter(module, device, width)
        )

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
