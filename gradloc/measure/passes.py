# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Extra forward/backward passes over micro-batches of any rank, run by all ranks together, and what measures them.

A `WatchedModel` has a meter, which measures the local gradients, or the reduced one.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..fsdp import collectives
from ..fsdp.failed_pass import RecordedCollectives
from ..fsdp.state import all_reduced, clear_gradients, reset_fsdp, set_rng_state, unreduced
from ..fsdp.torch_compat import is_sharded, missing_names
from ..layers.reduced_norms import ReducedNorms
from .local_norms import LocalNorms
from .micro_batch import MicroBatch, MicroBatchName, Token, TokenSubset

logger = logging.getLogger(__name__)

# The type of the value that is read after a pass.
_Read = TypeVar("_Read")

# `forward(inputs, rows, response_length)`: see `GradLoc`.
Forward = Callable[[dict[str, Any], list[int], int], tuple[Tensor | None, Tensor]]
# `cut(index, rows, response_length)`: a context in which a pass of this rank's micro-batch with that index has its
# backward signals cut as in training.
Cut = Callable[[int, list[int], int], AbstractContextManager[None]]

# Columns of another rank's tokens that a search and a drill read. Evidence comes from the rank that has the culprit.
_NEEDED = ("response_mask", "weight", "log_prob", "coefficient", "entropy_coefficient", "broken", "suspicion", "cut")

# A position is sent if one of these is not zero, also in padding where a loss leaves a coefficient or NaN.
_SENT = ("response_mask", "weight", "coefficient", "entropy_coefficient", "broken")

# How many probes a pass measures at most, however many ranks there are: to choose more takes every rank too long.
MOST_PROBES = 256

# The name of a group: micro-batches that are searched as one. With the local meter, a group is a single micro-batch:
# (rank, index). The reduced meter cannot separate ranks: a group is the micro-batches of all ranks with the same index:
# (None, index).
GroupName = tuple[int | None, int]

# Makes a probe: its token subsets, by the rank that owns the data. Called on the rank that measures it; may raise.
MakeProbe = Callable[[], Mapping[int, TokenSubset]]


class Passes:
    """Recomputes the gradients of parts of micro-batches.

    The gradient of a set S of tokens is Σ_{t∈S} (∂L/∂log p_t)·∇log p_t, plus the same term for the entropies. The loss
    is not needed to recompute it: the coefficients ∂L/∂log p_t were recorded in the training pass, with the loss's
    masks and denominators. So a pass is a forward, and a backward from the log-probs with the coefficients of S and
    zeros elsewhere. The result is the gradient of the loss with every token outside of S detached. In a causal model,
    rows without a token of S, and positions after the last token of S, have no influence and are not computed.

    The first healthy row of this rank's micro-batches `own` is the dummy input if it has no probe.
    """

    def __init__(self, model: "WatchedModel", own: Sequence[MicroBatch], scale: float) -> None:
        self.count = 0
        self.scale = scale
        self._model = model
        self._own = own
        # A row with only finite values, so that its gradient with zero coefficients is zero; None if there is none.
        healthy = (
            (each, row) for each in own for row in (~each.broken(scale != 1).any(1)).nonzero().flatten().tolist()
        )
        self._dummy_input = next(healthy, None)
        self._may_truncate = not _depends_on_the_whole(model.module)

    def measure(self, subset_of: Callable[[int], TokenSubset | None], read: Callable[[], _Read], reduce: bool) -> _Read:
        """Like `accumulate`, but there is no gradient before it, nor after it. A collective call."""
        try:
            return self.accumulate(subset_of, read, reduce=reduce)
        finally:
            clear_gradients(self._model.module)

    def accumulate(
        self,
        subset_of: Callable[[int], TokenSubset | None],
        read: Callable[[], _Read],
        own_index: int | None = None,
        reduce: bool = True,
    ) -> _Read:
        """Runs a pass that adds the gradient of every rank's subset, averaged over the ranks, to the current gradient.

        A collective call.

        Args:
            subset_of (Callable): Returns the subset of a rank; called for this rank only.
            read (Callable): Called after the pass, which the meter has recorded; its result is returned.
            own_index (int, optional): The index of the rank's own micro-batch that its subset is of, if its signals are
                to be cut as in training.
            reduce (bool): Whether FSDP reduces the gradient; otherwise only the local one can be measured.

        Raises:
            RankFailedError: The pass, `subset_of` or `read` failed on some rank.
        """
        self.count += 1
        found: list[_Read] = []
        recorded = self._model.recorded[reduce]
        is_rehearsal = recorded.needs_rehearsal

        def run() -> None:
            self._model.meter.start()
            with all_reduced(self._model.module) if reduce else unreduced(self._model.module):
                self._forward_backward(subset_of(self._model.rank), own_index)
            found.append(read())

        try:
            error = recorded.run(run, self._model.device, is_sharded(self._model.module))
        except collectives.RankLostError as lost:
            error = lost
        finally:
            self._model.meter.cancel()
        try:
            # After a rehearsal also without an error: so it is known that this works.
            if is_rehearsal or not found:
                reset_fsdp(self._model.module)
            if not found and self._model.recover is not None:
                self._model.recover()
        except Exception as caught:
            error = error or caught
        if isinstance(error, collectives.RankLostError):
            raise error
        try:
            collectives.raise_on_all_ranks(error, self._model.device)
        except collectives.RankFailedError:
            if is_rehearsal:
                recorded.forget()
            if error is not None:
                logger.warning("an extra pass of GradLoc failed; training continues", exc_info=error)
            raise
        return found[0]

    def whole_micro_batches(
        self, names: Collection[MicroBatchName], removed: Collection[Token] = ()
    ) -> list[Callable[[int], TokenSubset | None]]:
        """What to `accumulate` for the gradient of all micro-batches but for some tokens, one pass for each index."""

        def subset_of(index: int, rank: int) -> TokenSubset | None:
            if (rank, index) not in names:
                return None
            micro_batch = self._own[index].portable(self.scale)
            keep = micro_batch.tokens["response_mask"].bool()
            for name, row, position in removed:
                if name == (rank, index):
                    keep[row, position] = False
            return TokenSubset(micro_batch, keep)

        return [partial(subset_of, index) for index in range(1 + max(index for _, index in names))]

    def _forward_backward(self, subset: TokenSubset | None, own_index: int | None = None) -> None:
        if subset is None:
            micro_batch, row = self._dummy_input or (self._own[0], 0)
            keep = torch.zeros_like(micro_batch.tokens["response_mask"], dtype=torch.bool)
            rows, length, scale = [row], 1, 1.0  # the smallest possible input
        else:
            micro_batch, keep, scale = subset.micro_batch, subset.keep, self.scale
            rows, length = self._extent(keep)
        cut = None if subset is None else self._model.cut
        with nullcontext() if own_index is None or cut is None else cut(own_index, rows, length):
            set_rng_state(micro_batch.rng_state, self._model.device)
            entropy, log_prob = self._model.forward(micro_batch.inputs, rows, length)
            keep = keep[rows, :length]
            outputs, coefficients = [log_prob], [_coefficient(micro_batch, "coefficient", keep, rows, scale)]
            if entropy is not None and entropy.requires_grad and "entropy_coefficient" in micro_batch.tokens:
                outputs.append(entropy)
                coefficients.append(_coefficient(micro_batch, "entropy_coefficient", keep, rows, scale))
            coefficients = [c.to(output) for c, output in zip(coefficients, outputs, strict=True)]
            torch.autograd.backward(outputs, coefficients)

    def check_dummy_inputs(self, subset_of: Callable[[int], TokenSubset | None]) -> None:
        """Checks that no rank without a subset has a dummy input that gives NaN. A collective call.

        For passes whose reduced gradient counts: such a NaN would make it useless.

        Raises:
            RankFailedError: There is such a rank, or `subset_of` failed on some rank.
        """
        with collectives.raised_on_all_ranks(self._model.device):
            if self._dummy_input is None and subset_of(self._model.rank) is None:
                raise ValueError("each of its rows has a log-prob or coefficient that is not a finite number")

    def _extent(self, keep: Tensor) -> tuple[list[int], int]:
        """The rows to compute and their length; the whole micro-batch if no token is kept or it must not be cut."""
        if not self._may_truncate or not keep.any():
            return list(range(len(keep))), keep.shape[1]
        used = keep != 0
        rows = used.any(1).nonzero().flatten().tolist()
        return rows, int(used.any(0).nonzero()[-1]) + 1


def _coefficient(micro_batch: MicroBatch, name: str, keep: Tensor, rows: list[int], scale: float) -> Tensor:
    if name not in micro_batch.tokens:
        return torch.zeros_like(keep, dtype=torch.float32)
    coefficient = micro_batch.tokens[name][rows, : keep.shape[1]]
    keep = keep.to(coefficient.device)
    return torch.where(keep != 0, coefficient * scale * keep, 0.0)


def _depends_on_the_whole(module: nn.Module) -> bool:
    """Whether a part of a micro-batch would get other dropout masks or position encodings than the whole got."""
    return any(
        (isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0)
        # Rotary frequencies that depend on the sequence length.
        or getattr(child, "rope_type", None) in ("dynamic", "longrope")
        # Models that use functional dropout store its rate as `dropout`, `attention_dropout`, `resid_pdrop`, ...
        or any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(child).items())
        for child in module.modules()
    )


class LocalMeter(LocalNorms):
    """Measures each rank's local gradient before FSDP averages it: in one pass, every rank measures another probe.

    All ranks make the same calls; `obtain` and `measure` are collective.
    """

    reduces = False  # whether FSDP reduces the gradient of a probe

    def __init__(self, module: nn.Module, device: torch.device, summed: Collection[str] = ()) -> None:
        super().__init__(module, device, summed)
        self.width = min(collectives.world_size(), MOST_PROBES)  # how many probes count as one pass

    def obtain(
        self, names: Sequence[MicroBatchName], own: Sequence[MicroBatch], scale: float
    ) -> dict[MicroBatchName, MicroBatch]:
        """The micro-batches of a group, and perhaps others, with what this rank needs to search them and for probes."""

        def portable(index: int) -> MicroBatch:
            found = own[index].portable(scale)
            return replace(found, tokens={name: found.tokens[name] for name in _NEEDED if name in found.tokens})

        return {(rank, index): collectives.broadcast(partial(portable, index), rank) for rank, index in names}

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        """Measures at most `width` probes in one pass.

        Returns:
            Tensor: float64 of shape (probes, layers): the squared norms of each probe's gradient, without the loss
                scale and without the mean over the ranks.

        Raises:
            RankFailedError: The pass failed on some rank.
        """

        def subset_of(rank: int) -> TokenSubset | None:
            if rank >= len(probes):
                return None
            (subset,) = probes[rank]().values()
            return subset

        own = passes.measure(subset_of, lambda: self.stop() / passes.scale**2, self.reduces)
        return collectives.gather_of_first(own, len(probes))


class ReducedMeter:
    """Measures the reduced gradient: one probe per pass, for which every rank computes the tokens of its own data.

    Needed with sequence parallelism: there a rank's local gradient is not the gradient of its data, and hooks would
    see only parts of it. Nothing is measured in training passes. For what has no docstring see `LocalMeter`.
    """

    width = 1
    reduces = True

    def __init__(self, reduced_norms: ReducedNorms, device: torch.device, sequence_parallel_size: int) -> None:
        self.layers = reduced_norms.layers
        self.sums = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        self._reduced_norms = reduced_norms
        self._device = device
        self._sequence_parallel_size = sequence_parallel_size

    def start(self) -> None:
        pass

    cancel = close = start

    def stop(self) -> Tensor:
        return torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)

    def obtain(
        self, names: Sequence[MicroBatchName], own: Sequence[MicroBatch], scale: float
    ) -> dict[MicroBatchName, MicroBatch]:
        # Every rank computes its own data, so all micro-batches are sent at once, without their inputs; one rank sends
        # for all that work on the same data. (An all-gather would pad what each rank sends to the longest.)
        senders = range(0, collectives.world_size(), self._sequence_parallel_size)
        sent = [
            collectives.broadcast(lambda: [pack(each.portable(scale, inputs=False)) for each in own], sender)
            for sender in senders
        ]
        everywhere = [[unpack(each) for each in of_rank] for of_rank in sent]
        rank = collectives.rank() // self._sequence_parallel_size
        for micro_batch, mine in zip(everywhere[rank], own, strict=True):
            micro_batch.inputs = mine.inputs
        return {(r, i): micro_batch for r, of_rank in enumerate(everywhere) for i, micro_batch in enumerate(of_rank)}

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        (probe,) = probes

        def subset_of(rank: int) -> TokenSubset | None:
            return probe().get(rank)

        passes.check_dummy_inputs(subset_of)
        own = passes.measure(subset_of, self._reduced_norms.own_squares, self.reduces)
        world_size = collectives.world_size() // self._sequence_parallel_size
        return (self._reduced_norms.add_up(own).cpu() * (world_size / passes.scale) ** 2).unsqueeze(0)


Meter = LocalMeter | ReducedMeter


class WatchedModel:
    """A model, how its trainer runs it, and the meter that measures its gradients. To make one is a collective call.

    For `cut` see `Cut`, for all else `GradLoc`.

    Raises:
        RankFailedError: On some rank the model cannot be watched, for example because its torch lacks something.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        device: torch.device,
        meter: str = "local",
        sequence_parallel_size: int = 1,
        recover: Callable[[], None] | None = None,
        cut: Cut | None = None,
    ) -> None:
        self.module, self.forward, self.device = module, forward, device
        self.sequence_parallel_size, self.recover, self.cut = sequence_parallel_size, recover, cut
        self.rank = collectives.rank() // sequence_parallel_size  # the data-parallel rank
        # How many ranks, or groups of such ranks, have data of their own.
        self.data_parallel_size = collectives.world_size() // sequence_parallel_size
        # Recorded in earlier passes, by whether these reduced their gradients.
        self.recorded = {reduce: RecordedCollectives(sequence_parallel_size == 1) for reduce in (True, False)}
        self.meter: Meter
        with collectives.raised_on_all_ranks(device):
            if missing := missing_names(module):
                raise RuntimeError(
                    f"torch {torch.__version__} lacks {', '.join(missing)}, without which the gradients of this model "
                    "cannot be measured; use a torch that docs/use/support.md names"
                )
            self.reduced_norms = ReducedNorms(module, device)
            if meter == "reduced" or sequence_parallel_size > 1:
                self.meter = ReducedMeter(self.reduced_norms, device, sequence_parallel_size)
            else:
                self.meter = LocalMeter(module, device, self.reduced_norms.small_names)


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
