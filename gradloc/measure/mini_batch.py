# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a mini-batch before its optimizer step: its norms, its weights and its thresholds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..fsdp import collectives
from ..lines import BrokenParameters
from ..threshold import is_over
from .micro_batch import (
    MicroBatch,
    MicroBatchFigures,
    MicroBatchName,
    square_weights,
    token_equivalent,
    token_equivalents,
    usable_tokens,
)
from .passes import WatchedModel

# How many numbers of a micro-batch ranks tell each other beside its norms by layer; `_own_figures` has them in order.
_FIGURES = 7


class MiniBatch:
    """The current gradient, as it was measured in training; `gather` sets the attributes that are declared here.

    `micro_batches` are this rank's, at least one, and `global_norm` the norm of the reduced gradient, if it is known.
    """

    # Whether tokens of some rank could not be read, the same on every rank; if so, the rest is meaningless.
    failed: bool
    update_figures: Tensor  # the given figures of every rank, shape (ranks, n)
    # "unit": a micro-batch over its threshold is a spike; "global": the reduced gradient is, and always where
    # micro-batches cannot be measured alone.
    trigger: str
    token_norm: float  # the largest measured token-equivalent norm; NaN counts as infinite
    finite_norm: float  # the largest finite one, or 0
    root_mean_square: float | None  # norm/sqrt(Σw²) of the whole mini-batch; None if no token can move

    def __init__(
        self, model: WatchedModel, micro_batches: list[MicroBatch], scale: float, global_norm: float | None = None
    ) -> None:
        self.model = model
        self.micro_batches = micro_batches
        self.scale = scale
        # The squared norms by layer of the reduced gradient, without the loss scale; None until they are measured.
        self.squared_norms: Tensor | None = None
        self.broken_parameters: BrokenParameters | None = None  # `ReducedNorms.broken_parameters`, if it is not finite
        self._global_norm = global_norm
        self._by_micro_batch = not model.meter.reduces  # whether micro-batches were measured alone
        # The squared norms of their own gradients, without the loss scale; float64 of shape (micro-batches, layers).
        self.squares = torch.stack([micro_batch.squares for micro_batch in micro_batches]).to(model.device) / scale**2
        self._own_norms = self.squares.sum(1).sqrt()
        squares = torch.stack([square_weights(each.tokens) for each in micro_batches]).to(model.device)
        self._square_weights, self._root_square_weights = squares[:, 0], squares[:, 1].sqrt()

    def gather(
        self, trigger: str, update_figures: Tensor, failed: bool = False, with_squares: bool = False
    ) -> "MiniBatch":
        """Exchanges what each rank has measured, and its other figures. A collective call.

        Args:
            update_figures (Tensor): float64 of shape (n,).
            with_squares (bool): Whether the last of them are `ReducedNorms.own_squares` of gradients.
        """
        ratios = token_equivalents(self._own_norms, self._root_square_weights)
        largest_finite = ratios.nan_to_num(posinf=0.0).max()
        norms = torch.stack([ratios.max(), largest_finite, self.squares.sum(), self._square_weights.sum()])
        own = nn.functional.pad(norms, (0, 1), value=float(failed))
        gathered = collectives.gather(torch.cat([own, update_figures]).to(self.model.device))
        by_rank, self.update_figures = gathered[:, : len(own)].tolist(), gathered[:, len(own) :]
        self.failed = any(flag for *_, flag in by_rank)
        by_rank = by_rank[:: self.model.sequence_parallel_size]
        largest, finite, squares, square_weights, _ = zip(*by_rank, strict=True)
        if with_squares and not self.failed:
            reduced_norms = self.model.reduced_norms
            squares_of = self.update_figures[:, -len(reduced_norms.layers) :]
            self.squared_norms = reduced_norms.of_ranks(squares_of) / self.scale**2
        self.trigger = trigger if self._by_micro_batch else "global"
        self._largest, square, square_weight = max(largest), sum(squares), sum(square_weights)
        self._square_weight = square_weight
        if self.trigger == "unit":
            self.token_norm, self.finite_norm = self._largest, max(finite)
        else:
            # The data-parallel mean gives each token 1/W of its weight in the reduced gradient.
            norm = self.global_norm() * len(by_rank)
            self.token_norm = token_equivalent(norm, math.sqrt(square_weight))
            self.finite_norm = self.token_norm if math.isfinite(self.token_norm) else 0.0
        self.root_mean_square = None
        if square_weight:
            self.root_mean_square = math.sqrt(square / square_weight) if self._by_micro_batch else self.token_norm
        return self

    def global_norm(self) -> float:
        """The reduced gradient's norm; the first call is collective."""
        if self._global_norm is None:
            if self.squared_norms is None:
                # On the host, where the sum of the same numbers is the same on all ranks; LayerClip reads them there,
                # too.
                self.squared_norms = self.model.reduced_norms.squared_norms().cpu() / self.scale**2
            self._global_norm = math.sqrt(math.fsum(self.squared_norms.tolist()))
            if not math.isfinite(self._global_norm):
                self.broken_parameters = self.model.reduced_norms.broken_parameters()
        return self._global_norm

    def global_threshold(self, threshold: float) -> float:
        """The reduced gradient's threshold for this τ: the mean over the ranks gives each token 1/W of its weight."""
        return threshold * math.sqrt(self._square_weight) / self.model.data_parallel_size

    def is_over(self, threshold: float) -> bool:
        """Whether it is a spike for this τ."""
        return is_over(self.token_norm, threshold)

    def is_ordinary(self, threshold: float) -> bool:
        """Whether neither it nor a micro-batch that was measured alone is over its threshold for this τ."""
        return not (self.is_over(threshold) or is_over(self._largest, threshold))

    def gather_figures(self) -> dict[MicroBatchName, MicroBatchFigures]:
        """The micro-batches of all ranks. A collective call."""
        with collectives.raised_on_all_ranks(self.model.device):
            own = self._own_figures()
        counts = collectives.gather(torch.tensor([len(own)], device=self.model.device))[:, 0].tolist()
        padding = own.new_zeros(max(counts) - len(own), own.shape[1])
        by_rank = collectives.gather(torch.cat([own, padding]).to(self.model.device))
        layers = self.model.meter.layers if self._by_micro_batch else ()
        found: dict[MicroBatchName, MicroBatchFigures] = {}
        of_data = list(zip(by_rank, counts, strict=True))[:: self.model.sequence_parallel_size]
        for rank, (of_rank, count) in enumerate(of_data):
            numbers, norms = of_rank[:count].split([_FIGURES, of_rank.shape[1] - _FIGURES], 1)
            for index, (of, by_layer) in enumerate(zip(numbers.tolist(), norms, strict=True)):
                rows, tokens, broken, usable, has_advantages = map(int, of[:-2])
                found[rank, index] = MicroBatchFigures(
                    rows=rows,
                    tokens=tokens,
                    broken_tokens=broken,
                    usable_tokens=usable,
                    has_advantages=bool(has_advantages),
                    root_square_weight=of[-2],
                    norm=of[-1] if self._by_micro_batch else None,
                    layers=layers,
                    by_layer=by_layer[: len(layers)],
                )
        return found

    def layer_sums(self) -> Tensor:
        """This rank's squared norms by layer, and its Σ w_t², where there are advantages; shape (layers + 1,)."""
        counted = torch.stack([each.has_advantages() for each in self.micro_batches]).to(self.squares.device)
        sums = torch.cat([self.squares, self._square_weights.unsqueeze(1)], 1)
        return torch.where(counted.unsqueeze(1), sums, 0.0).sum(0)

    def _own_figures(self) -> Tensor:
        """What `gather_figures` tells of this rank's, float64 of shape (micro-batches, _FIGURES + layers)."""
        own = []
        for micro_batch in self.micro_batches:
            mask = micro_batch.tokens["response_mask"].bool()
            broken = micro_batch.broken(self.scale != 1)
            usable = usable_tokens(micro_batch.tokens, broken)
            counts = [mask.sum(), (broken & mask).sum(), usable.sum(), micro_batch.has_advantages()]
            own.append(torch.stack([mask.new_tensor(len(micro_batch.rows), dtype=torch.int64), *counts]))
        measured = [self._root_square_weights.unsqueeze(1), self._own_norms.unsqueeze(1), self.squares.sqrt()]
        return torch.cat([torch.stack(own).to(self.model.device, torch.float64), *measured], 1)


class OrdinaryGradient:
    """What the last mini-batch without a spike says of ordinary tokens."""

    def __init__(self) -> None:
        self.token_norm: float | None = None  # the root mean square of their gradient norms; None if unknown
        self._sums: Tensor | None = None

    def take_in(self, mini_batch: MiniBatch) -> None:
        """Takes a mini-batch without a spike as ordinary, unless none of its tokens can move."""
        if mini_batch.root_mean_square:
            self.token_norm = mini_batch.root_mean_square
            self._sums = mini_batch.layer_sums()

    def own_sums(self) -> Tensor | None:
        """What this rank knows of them, for `layer_norms`, on the CPU."""
        return None if self._sums is None else self._sums.cpu()

    def layer_norms(self, by_rank: Sequence[Tensor | None], layers: Sequence[str]) -> dict[str, float] | None:
        """Each layer's norm/sqrt(Σw²), by the `own_sums` of all data-parallel ranks; None if unknown."""
        known = [sums for sums in by_rank if sums is not None]
        *of_layers, total = torch.stack(known).sum(0).tolist() if known else [0.0]
        if not (any(of_layers) and total):
            return None
        return {layer: math.sqrt(square / total) for layer, square in zip(layers, of_layers, strict=True)}
