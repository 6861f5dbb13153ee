# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the probes of a search: one for each rank in a pass, by local norms, or one by the reduced norm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..fsdp import collectives
from ..layers.reduced_norms import ReducedNorms
from .local_norms import LocalNorms
from .micro_batch import AllFigures, MicroBatch, MicroBatchName, TokenSubset, suspects
from .passes import Passes

# What a search and a drill read of another rank's tokens. The evidence of culprits comes from the rank that has them.
_NEEDED = ("response_mask", "weight", "log_prob", "coefficient", "entropy_coefficient", "broken", "suspicion", "cut")

# Where one of these is not zero, a position is sent; padding in which a loss leaves a coefficient or NaN, too.
_SENT = ("response_mask", "weight", "coefficient", "entropy_coefficient", "broken")


# The name of a group: micro-batches that are searched as one. With the local meter, a group is a single micro-batch:
# (rank, index). The reduced meter cannot separate ranks: a group is the micro-batches of all ranks with the same index:
# (None, index).
GroupName = tuple[int | None, int]

# Makes a probe: its token subsets, by the rank that owns the data. Called on the rank that measures it; may raise.
MakeProbe = Callable[[], Mapping[int, TokenSubset]]


class LocalMeter(LocalNorms):
    """Measures each rank's local gradient before FSDP averages it: in one pass, every rank measures another probe.

    All ranks make the same calls; `obtain` and `measure` are collective.
    """

    kind = "local"  # its name in the evidence
    reduces = False  # whether FSDP reduces the gradient of a probe

    def __init__(self, module: nn.Module, device: torch.device, width: int | None = None) -> None:
        super().__init__(module, device)
        # How many probes count as one pass. More than there are ranks are measured one after the other.
        self.width = width or collectives.world_size()

    def groups(self, figures: AllFigures, threshold: float) -> dict[GroupName, list[MicroBatchName]]:
        """The groups to search, largest norm first if the norms are known; else each is first measured as a whole."""
        return {name: [name] for name in suspects(figures, threshold)}

    def obtain(
        self, names: Sequence[MicroBatchName], own: Sequence[MicroBatch], scale: float
    ) -> dict[MicroBatchName, MicroBatch]:
        """The micro-batches of a group, and perhaps others, with what this rank needs to search them and for probes."""

        def portable(index: int) -> MicroBatch:
            return own[index].portable(scale)

        return {(rank, index): collectives.broadcast(partial(portable, index), rank) for rank, index in names}

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        """Measures at most `width` probes in one pass.

        Returns:
            Tensor: float64 of shape (probes, layers): the squared norms of each probe's gradient, without the loss
                scale and without the mean over the ranks.

        Raises:
            RankFailedError: The pass failed on some rank.
        """
        count, ranks = passes.count, collectives.world_size()
        parts = [probes[start : start + ranks] for start in range(0, len(probes), ranks)]
        squares = torch.cat([self._measure_one_each(passes, part) for part in parts])
        passes.count = count + 1
        return squares

    def _measure_one_each(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        def subset_of(rank: int) -> TokenSubset | None:
            if rank >= len(probes):
                return None
            (subset,) = probes[rank]().values()
            return subset

        self.start()
        try:
            own = passes.measure(subset_of, lambda: self.stop() / passes.scale**2, self.reduces)
        finally:
            self.cancel()
        return collectives.gather(own)[: len(probes)]


class ReducedMeter:
    """Measures the reduced gradient: one probe per pass, for which every rank computes the tokens of its own data.

    Needed with sequence parallelism: there a rank's local gradient is not the gradient of its data, and hooks would
    see only parts of it. Nothing is measured in training passes. For what has no docstring see `LocalMeter`.
    """

    kind = "reduced"
    width = 1
    reduces = True

    def __init__(self, reduced_norms: ReducedNorms, device: torch.device, sequence_parallel_size: int) -> None:
        self.layers = reduced_norms.layers
        self._reduced_norms = reduced_norms
        self._device = device
        self._sequence_parallel_size = sequence_parallel_size

    def start(self) -> None:
        pass

    cancel = close = start

    def stop(self) -> Tensor:
        return torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)

    def groups(self, figures: AllFigures, threshold: float) -> dict[GroupName, list[MicroBatchName]]:
        groups: dict[GroupName, list[MicroBatchName]] = {}
        for rank, index in figures:
            groups.setdefault((None, index), []).append((rank, index))
        return groups

    def obtain(
        self, names: Sequence[MicroBatchName], own: Sequence[MicroBatch], scale: float
    ) -> dict[MicroBatchName, MicroBatch]:
        # Every rank computes its own data, so all micro-batches are sent at once, without their inputs; one rank sends
        # for all that work on the same data. (An all-gather would pad what each rank sends to the longest.)
        senders = range(0, collectives.world_size(), self._sequence_parallel_size)

        def packed() -> list[MicroBatch]:
            return [pack(micro_batch.portable(scale, inputs=False)) for micro_batch in own]

        everywhere = [[unpack(each) for each in collectives.broadcast(packed, sender)] for sender in senders]
        rank = collectives.rank() // self._sequence_parallel_size
        for micro_batch, mine in zip(everywhere[rank], own, strict=True):
            micro_batch.inputs = mine.inputs
        return {(r, i): micro_batch for r, of_rank in enumerate(everywhere) for i, micro_batch in enumerate(of_rank)}

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        (probe,) = probes
        passes.check_dummy_inputs(lambda: probe().keys())
        own = passes.measure(lambda rank: probe().get(rank), self._reduced_norms.own_squares, self.reduces)
        world_size = collectives.world_size() // self._sequence_parallel_size
        return (self._reduced_norms.add_up(own).cpu() * (world_size / passes.scale) ** 2).unsqueeze(0)


Meter = LocalMeter | ReducedMeter


def pack(micro_batch: MicroBatch) -> MicroBatch:
    """What a search needs of the tokens of a micro-batch that `MicroBatch.portable` returned.

    Its tokens are one-dimensional, those of the places in `sent`, of shape (rows, response length).
    """
    tokens = micro_batch.tokens
    sent = torch.stack([tokens[name] != 0 for name in _SENT]).any(0)
    columns = {name: tokens[name][sent] for name in _NEEDED if name in tokens}
    return replace(micro_batch, tokens={**columns, "sent": sent})


def unpack(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch that was packed, with zeros for what was not sent."""
    columns = dict(micro_batch.tokens)
    sent = columns.pop("sent")
    tokens = {
        name: torch.zeros(sent.shape, dtype=column.dtype).masked_scatter(sent, column)
        for name, column in columns.items()
    }
    return replace(micro_batch, tokens=tokens)
