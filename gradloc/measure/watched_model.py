# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The model that is trained, and what it takes to measure its gradients."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..fsdp import collectives
from ..fsdp.failed_pass import RecordedCollectives
from ..fsdp.torch_compat import missing_names
from ..layers.reduced_norms import ReducedNorms
from .local_norms import LocalNorms
from .micro_batch import MicroBatch
from .passes import Cut, Forward, Passes
from .probes import LocalMeter, Meter, ReducedMeter

logger = logging.getLogger(__name__)

_NAMED = 16


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
        squared_norms: Callable[[], Tensor] | None = None,
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
        reduced_norms = ReducedNorms(module, device)
        self._reduced_layers = reduced_norms.layers
        self._broken_parameters = reduced_norms.broken_parameters
        self._reduced_squares = squared_norms or reduced_norms.squared_norms
        reduced = meter == "reduced" or sequence_parallel_size > 1
        self.meter: Meter = (
            ReducedMeter(reduced_norms, device, sequence_parallel_size)
            if reduced
            else LocalMeter(LocalNorms(module, device), device, width)
        )

    @classmethod
    def watch(cls, module: nn.Module, forward: Forward, device: torch.device, **options: Any) -> "WatchedModel":
        """Makes one. A collective call.

        Raises:
            RankFailedError: On some rank the model cannot be watched, for example because its torch lacks something.
        """
        with collectives.raised_on_all_ranks(device):
            return cls(module, forward, device, **options)

    @classmethod
    def unless_it_fails(cls, what: str, *arguments: Any, **options: Any) -> "WatchedModel | None":
        """Makes one, a collective call. If that fails, logs once that `what` is off, on all ranks, and returns None."""
        try:
            return cls.watch(*arguments, **options)
        except collectives.RankFailedError as error:
            if collectives.rank() == 0:
                logger.warning("%s is off, and training goes on without it: %s", what, error)
            return None

    def passes(self, own: Sequence[MicroBatch], scale: float) -> Passes:
        """Extra passes over this mini-batch."""
        return Passes(self, own, scale)

    def reduced_squares(self, scale: float) -> Tensor:
        """The squared norms by layer of the reduced gradient, without the loss scale. A collective call."""
        return self._reduced_squares() / scale**2

    def broken_parameters(self) -> dict[str, Any]:
        """Which parameters have a NaN or infinite gradient. A collective call.

        Returns:
            dict: Their `count`, `of` how many, and the first 16 `names` as the backward reaches them.
        """
        names, of = self._broken_parameters()
        return {"count": len(names), "of": of, "names": names[:_NAMED]}

    def by_reduced_layer(self, squared_norms: Tensor) -> dict[str, float]:
        """The norms of the reduced gradient by layer, from its squared norms."""
        return dict(zip(self._reduced_layers, squared_norms.sqrt().tolist(), strict=True))
