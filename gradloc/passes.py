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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from . import distributed, evidence, gradients
from .lockstep import Lockstep

logger = logging.getLogger(__name__)

# What is read after a pass.
_Read = TypeVar("_Read")

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
        squares (Tensor): The squared norm of its local gradient in each layer, float64; zero where not measured.
    """

    inputs: dict[str, Any]
    rows: list[int]
    rng_state: tuple[Tensor, Tensor | None]
    tokens: dict[str, Tensor] = field(default_factory=dict)
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def broken(self, scaled: bool) -> Tensor:
        """Where a log-prob or a coefficient is not a finite number, bool of shape (rows, response length).

        Args:
            scaled (bool): Whether the loss is scaled: then it may be that which makes a coefficient in half precision
                infinite.
        """
        broken = ~self.tokens["log_prob"].isfinite()
        for name in ("coefficient", "entropy_coefficient"):
            if name in self.tokens:
                coefficient = self.tokens[name]
                half = coefficient.dtype in (torch.float16, torch.bfloat16)
                broken |= coefficient.isnan() if scaled and half else ~coefficient.isfinite()
        return broken

    def portable(self, scale: float, inputs: bool = True) -> "MicroBatch":
        """A copy on the CPU, with coefficients free of the loss scale, suspicion, and with or without the inputs."""
        kept = self.inputs.items() if inputs else ()
        copies = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kept}
        tokens = {
            name: tensor.cpu() if name == "token_id" else tensor.float().cpu() for name, tensor in self.tokens.items()
        }
        for name in ("coefficient", "entropy_coefficient"):
            tokens[name] = tokens[name] / scale if name in tokens else torch.zeros_like(tokens["weight"])
        tokens["broken"] = self.broken(scale != 1).cpu()
        # Here, once for all ranks: on other processors exp has other last bits, and the search goes by it.
        tokens["suspicion"] = evidence.suspicion(tokens)
        return MicroBatch(copies, self.rows, self.rng_state, tokens)


@dataclass(frozen=True)
class TokenSubset:
    """Some of a micro-batch's tokens.

    Args:
        micro_batch (MicroBatch): The micro-batch.
        keep (Tensor): Which tokens (bool), or what each one's share of the gradient is multiplied with (float); shape
            (rows, response length).
    """

    micro_batch: MicroBatch
    keep: Tensor


class Passes:
    """Computes gradients of parts of micro-batches again.

    The gradient of a set S of tokens is Σ_{t∈S} (∂L/∂log p_t)·∇log p_t, plus the like term of the entropies. Both
    factors are known without the loss: the coefficients ∂L/∂log p_t were noted in the training pass, with the loss's
    true masks and denominators. So a pass is a forward, and a backward from the log-probs with the coefficients of S
    and zeros elsewhere: the same as the true loss with every token outside of S detached. Rows without a token of S and
    everything after its last token play no part (in a causal model) and are not computed.

    Args:
        module (nn.Module): The model.
        forward (Forward): Computes (entropy, log_prob).
        device (torch.device): Where the model computes.
        lockstep (Lockstep): Has seen a training pass.
        scale (float): The loss scale of the training pass.
        own (list[MicroBatch]): This rank's micro-batches, one row of which it computes where it has nothing to measure.
        sequence_parallel_size (int): So many neighbouring ranks share the same data.
        recover (Callable, optional): Called after a pass that an error broke off on this rank.

    Attributes:
        count (int): The passes so far.
        rank (int): This rank's number among those with data of their own.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        device: torch.device,
        lockstep: Lockstep,
        scale: float,
        own: Sequence[MicroBatch],
        sequence_parallel_size: int = 1,
        recover: Callable[[], None] | None = None,
    ) -> None:
        self.count = 0
        self.rank = distributed.rank() // sequence_parallel_size
        self.scale = scale
        self._module = module
        self._forward = forward
        self._device = device
        self._lockstep = lockstep
        self._own = own
        self._recover = recover
        self._idle = _healthy_row(own, scaled=scale != 1)
        self._sequence_parallel_size = sequence_parallel_size
        # Those without a row to idle with; known from the first measurement on.
        self._broken_ranks: list[int] | None = None
        self._cut = not _depends_on_the_whole(module)

    def measure(self, subset_of: Callable[[int], TokenSubset | None], read: Callable[[], _Read]) -> _Read:
        """`accumulate`, which leaves no gradient behind. A collective call."""
        try:
            return self.accumulate(subset_of, read)
        finally:
            gradients.clear(self._module)

    def rehearse(self) -> None:
        """Has every rank know the collective calls of a pass, one of its own if need be. A collective call.

        A training pass that has not reached all parameters makes fewer of them, or smaller ones.

        Raises:
            RankFailedError: That pass failed on some rank.
        """
        unknown = torch.tensor([float(not self._lockstep.knows_all)], device=self._device)
        if distributed.world_size() > self._sequence_parallel_size and torch.stack(distributed.gather(unknown)).any():
            self._lockstep.forget()
            self.measure(lambda _: None, lambda: None)

    def accumulate(self, subset_of: Callable[[int], TokenSubset | None], read: Callable[[], _Read]) -> _Read:
        """One pass that adds the gradient of every rank's subset, averaged over the ranks, to what there is.

        Args:
            subset_of (Callable): Gives the subset of a rank, called for this rank only.
            read (Callable): What to return, called after the pass. If one of the two raises on some rank, the pass has
                failed, on all ranks alike.

        Raises:
            RankFailedError: The pass failed on some rank.
        """
        self.count += 1
        error: Exception | None = None
        result: _Read | None = None
        try:
            with self._lockstep.recording(), gradients.all_reduced(self._module):
                self._forward_backward(subset_of(self.rank))
            result = read()
        except Exception as caught:
            try:
                self._lockstep.catch_up(caught)
            finally:  # or the gradients could not be put back, and that error would hide this one
                gradients.reset_sharding(self._module)
                if self._recover is not None:
                    self._recover()
            error = caught
        failed = torch.tensor([float(error is not None)], device=self._device)
        if not torch.stack(distributed.gather(failed)).any():
            return cast(_Read, result)  # no rank has an error, so this one has read
        if error is not None:
            logger.warning("a pass of the gradient search failed; training goes on", exc_info=error)
        messages = distributed.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        raise distributed.RankFailedError(
            next(f"rank {rank}: {m}" for rank, m in enumerate(messages) if m is not None)
        ) from error

    def _forward_backward(self, subset: TokenSubset | None) -> None:
        if subset is None:
            micro_batch, row = self._idle or (self._own[0], 0)
            keep = torch.zeros_like(micro_batch.tokens["response_mask"], dtype=torch.bool)
            rows, length, scale = [row], 1, 1.0  # as little as there can be
        else:
            micro_batch, keep, scale = subset.micro_batch, subset.keep, self.scale
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

    def refuse_broken_idlers(self, probe: Callable[[], Mapping[int, TokenSubset]]) -> None:
        """Where ranks measure together, one that cannot compute anything finite spoils what the others measure.

        Raises:
            RankFailedError: On all ranks, if there is one without a subset of its own.
        """
        if self._broken_ranks is None:
            flags = distributed.gather(torch.tensor([float(self._idle is None)], device=self._device))
            self._broken_ranks = [rank for rank, flag in enumerate(flags[:: self._sequence_parallel_size]) if flag]
        idle = set(self._broken_ranks) - probe().keys() if self._broken_ranks else None
        if idle:
            raise distributed.RankFailedError(
                f"rank {min(idle)}: each of its rows has a log-prob or coefficient that is not a finite number"
            )

    def _extent(self, keep: Tensor) -> tuple[list[int], int]:
        """The rows to compute, and up to where; all of it for no token at all."""
        if not self._cut or not keep.any():
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


def _healthy_row(micro_batches: Sequence[MicroBatch], scaled: bool) -> tuple[MicroBatch, int] | None:
    """A row in which everything is a finite number: times a coefficient of zero, its gradient is zero."""
    for micro_batch in micro_batches:
        healthy = (~micro_batch.broken(scaled).any(1)).nonzero()
        if len(healthy):
            return micro_batch, int(healthy[0])
    return None


def _depends_on_the_whole(module: nn.Module) -> bool:
    """Whether a part of a micro-batch would see other random masks or position encodings than the whole did."""
    return any(
        (isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0)
        # Rotary frequencies that follow the length of what is computed.
        or getattr(child, "rope_type", None) in ("dynamic", "longrope")
        # Models that drop by a function keep its rate as `dropout`, `attention_dropout`, `resid_pdrop`, ...
        or any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(child).items())
        for child in module.modules()
    )
