# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Extra forward/backward passes over micro-batches of any rank, in step on all ranks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import distributed, gradients
from .lockstep import Lockstep
from .taps import GradientTaps

logger = logging.getLogger(__name__)

# A unit's name: (rank, index of the micro-batch in the mini-batch).
UnitName = tuple[int, int]

# `forward(inputs, rows, response_length)`: see `GradLoc`.
Forward = Callable[[dict[str, Any], list[int], int], tuple[Tensor | None, Tensor]]


@dataclass
class MicroBatch:
    """A micro-batch of a training pass, as it is remembered until the optimizer step.

    Args:
        inputs (dict): What `Forward` needs.
        rows (list[int]): Its rows in its rank's mini-batch.
        rng_state (tuple): torch's random state before the pass.
        tokens (dict[str, Tensor]): Figures of its tokens, each of shape (rows, response length).
        squares (Tensor): The squared norm of its local gradient in each layer, float64.
    """

    inputs: dict[str, Any]
    rows: list[int]
    rng_state: tuple[Tensor, Tensor | None]
    tokens: dict[str, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None

    def portable(self, scale: float) -> "MicroBatch":
        """A copy on the CPU, with coefficients free of the loss scale."""
        inputs = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in self.inputs.items()}
        tokens = {
            name: tensor.cpu() if name == "token_id" else tensor.float().cpu() for name, tensor in self.tokens.items()
        }
        for name in ("coefficient", "entropy_coefficient"):
            tokens[name] = tokens[name] / scale if name in tokens else torch.zeros_like(tokens["weight"])
        return MicroBatch(inputs, self.rows, self.rng_state, tokens)


@dataclass(frozen=True)
class Share:
    """Some of a micro-batch's tokens: those where `keep` (bool, shape (rows, response length)) holds."""

    micro_batch: MicroBatch
    keep: Tensor


class Passes:
    """Measures and recomputes gradients of parts of micro-batches.

    The gradient of a set S of tokens is Σ_{t∈S} (∂L/∂log p_t)·∇log p_t, plus the like term of the entropies. Both
    factors are known without the loss: the coefficients ∂L/∂log p_t were noted in the training pass, with the loss's
    true masks and denominators. So a pass is a forward, and a backward from the log-probs with the coefficients of S
    and zeros elsewhere: the same as the true loss with every token outside of S detached. Rows without a token of S and
    everything after its last token play no part (in a causal model) and are not computed.

    Args:
        module (nn.Module): The model.
        taps (GradientTaps): Its taps.
        forward (Forward): Computes (entropy, log_prob).
        device (torch.device): Where the model computes.
        lockstep (Lockstep): Has seen a training pass.
        scale (float): The loss scale of the training pass.
        own (MicroBatch): Any micro-batch of this rank, for passes in which it has nothing to measure.
    """

    def __init__(
        self,
        module: nn.Module,
        taps: GradientTaps,
        forward: Forward,
        device: torch.device,
        lockstep: Lockstep,
        scale: float,
        own: MicroBatch,
    ) -> None:
        self.count = 0
        self._module = module
        self._taps = taps
        self._forward = forward
        self._device = device
        self._lockstep = lockstep
        self._scale = scale
        self._own = own
        self._cut = not _has_dropout(module)

    def measure(self, shares: Sequence[Share]) -> Tensor:
        """One pass in which rank r measures the r-th share. A collective call.

        Args:
            shares (Sequence[Share]): At most one for each rank, the same on every rank.

        Returns:
            Tensor: float64 of shape (shares, layers), squared norms of each share's gradient, free of the loss scale.

        Raises:
            RankFailedError: The pass failed on some rank.
        """
        self._taps.start()
        try:
            self.accumulate(lambda rank: shares[rank] if rank < len(shares) else None)
        finally:
            squares = self._taps.stop().to(self._device)
            gradients.clear(self._module)
        return torch.stack(distributed.gather(squares / self._scale**2))[: len(shares)]

    def accumulate(self, share_of: Callable[[int], Share | None]) -> None:
        """Like `measure`, but keeps the gradient, averaged over the ranks, and adds it to what there is.

        Args:
            share_of (Callable): Gives the share of a rank, called for this rank only. It may raise: then the pass has
                failed, on all ranks alike.
        """
        self.count += 1
        error: Exception | None = None
        try:
            with self._lockstep.recording():
                self._forward_backward(share_of(distributed.rank()))
        except Exception as caught:
            self._lockstep.catch_up(caught)
            gradients.reset_sharding(self._module)
            error = caught
        failed = torch.tensor([float(error is not None)], device=self._device)
        if not torch.stack(distributed.gather(failed)).any():
            return
        if error is not None:
            logger.warning("a pass of the gradient search failed; training goes on", exc_info=error)
        messages = distributed.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        raise distributed.RankFailedError(
            next(f"rank {rank}: {m}" for rank, m in enumerate(messages) if m is not None)
        ) from error

    def _forward_backward(self, share: Share | None) -> None:
        if share is None:
            micro_batch, keep = self._own, torch.zeros_like(self._own.tokens["response_mask"], dtype=torch.bool)
            rows, length, scale = [0], 1, 1.0  # as little as there can be
        else:
            micro_batch, keep, scale = share.micro_batch, share.keep, self._scale
            rows, length = self._extent(keep)
        gradients.set_rng_state(micro_batch.rng_state, self._device)
        entropy, log_prob = self._forward(micro_batch.inputs, rows, length)
        keep = keep[rows, :length]
        outputs, coefficients = [log_prob], [_coefficient(micro_batch, "coefficient", keep, rows, scale)]
        if entropy is not None and entropy.requires_grad and "entropy_coefficient" in micro_batch.tokens:
            outputs.append(entropy)
            coefficients.append(_coefficient(micro_batch, "entropy_coefficient", keep, rows, scale))
        coefficients = [c.to(output) for c, output in zip(coefficients, outputs, strict=True)]
        torch.autograd.backward(outputs, coefficients)

    def _extent(self, keep: Tensor) -> tuple[list[int], int]:
        """The rows to compute, and up to where; all of it for no token at all."""
        if not self._cut or not keep.any():
            return list(range(len(keep))), keep.shape[1]
        rows = keep.any(1).nonzero().flatten().tolist()
        return rows, int(keep.any(0).nonzero()[-1]) + 1


def _coefficient(micro_batch: MicroBatch, name: str, keep: Tensor, rows: list[int], scale: float) -> Tensor:
    if name not in micro_batch.tokens:
        return torch.zeros_like(keep, dtype=torch.float32)
    coefficient = micro_batch.tokens[name][rows, : keep.shape[1]]
    return torch.where(keep.to(coefficient.device), coefficient * scale, 0.0)


def _has_dropout(module: nn.Module) -> bool:
    """Whether a part of a micro-batch would see other random masks than the whole did."""
    return any(
        (isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0) or getattr(child, "attention_dropout", 0)
        for child in module.modules()
    )
