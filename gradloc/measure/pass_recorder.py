# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Records training passes: a micro-batch's tokens, their coefficients, and the norms of its local gradient."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..fsdp.state import get_rng_state
from ..guarded import guarded
from .micro_batch import MicroBatch
from .passes import WatchedModel

_LEFT_OUT = "training continues, and no spike is looked for in this update. The next one tries again"
_UNREAD = f"the gradient of a micro-batch, its tokens or their weights cannot be read: {_LEFT_OUT}"
_NOT_SUMMED = f"the figures of a mini-batch's tokens cannot be summed up: {_LEFT_OUT}"

# Names of coefficients ("coefficient" of log-probs, "entropy_coefficient"), each with the tensor whose gradient it is,
# and a function that brings that gradient into the shape (rows, response length), which is called after the backward.
LossInputs = Mapping[str, tuple[Tensor, Callable[[Tensor], Tensor]]]

# Returns what is known of the tokens, all of shape (rows, response length).
ReadTokens = Callable[[], Mapping[str, Tensor]]


class PassRecorder:
    """Records the training passes of a mini-batch.

    An error in measuring a pass, reading its tokens or summing them up does not end training: it is logged and sets
    `failed`, which `MiniBatch` exchanges with the other ranks. Until `discard`, later micro-batches then have `nothing`
    for their tokens.
    """

    def __init__(self, model: WatchedModel | None) -> None:
        self.failed = False  # whether there was such an error since `discard`
        self.is_off = model is None  # whether to record nothing
        self.current: MicroBatch | None = None
        self.micro_batches: list[MicroBatch] = []
        self._said: set[str] = set()
        self._model = model
        self._read_tokens: ReadTokens | None = None
        self._gradients: dict[str, Tensor] = {}  # by name, and the functions that bring them into their shape
        self._reshape: dict[str, Callable[[Tensor], Tensor]] = {}

    def begin_pass(self, inputs: dict[str, Any], rows: Sequence[int]) -> None:
        """Starts recording a training pass; called before it. Its inputs, picklable, are kept until `take`."""
        if self.is_off or self._model is None:
            return
        device, meter = self._model.device, self._model.meter
        self.current = MicroBatch(inputs, [int(row) for row in rows], get_rng_state(device))
        nothing_measured = torch.zeros(len(meter.layers), dtype=torch.float64, device=device)
        self.current.squares = self.current.sums = nothing_measured
        self._read_tokens, self._gradients = None, {}
        meter.start()

    def observe(self, read_tokens: ReadTokens, loss_inputs: LossInputs, loss_agg_mode: str | None = None) -> None:
        """Records the coefficients ∂L/∂log p of the current pass; called between its loss and its backward.

        Args:
            read_tokens (Callable): Called in `end_pass`, while the device computes the backward. Returns `log_prob`,
                `weight` (of each token in the loss, gradient accumulation included), `entropy` where the loss has it,
                `response_mask`, `token_id`, and what else `token_evidence` reports.
            loss_inputs (Mapping): What the loss is computed from.
            loss_agg_mode (str, optional): verl's name for how this loss is aggregated.
        """
        if self.is_off:
            return
        if self.current is None:
            raise RuntimeError("observe() belongs between begin_pass() and end_pass().")
        self.current.loss_agg_mode = loss_agg_mode
        self._read_tokens = read_tokens
        for name, (tensor, reshape) in loss_inputs.items():
            if tensor.requires_grad:
                self._reshape[name] = reshape
                tensor.register_hook(partial(self._gradients.__setitem__, name))

    def end_pass(self) -> None:
        """Stops recording a training pass; called after its backward."""
        if self.is_off or self._model is None:
            return
        current = self.current
        if current is None:
            raise RuntimeError("end_pass() comes after begin_pass().")
        had_failed, self.failed = self.failed, True
        with guarded(_UNREAD, self._said):
            current.squares, current.sums = self._model.meter.stop(), self._model.meter.sums
            current.tokens = {} if had_failed else self._read()
            self.failed = had_failed
        if self.failed and self._read_tokens is not None:
            current.tokens = nothing(self._model.device)
            current.squares, current.sums = (torch.zeros_like(current.squares) for _ in range(2))
        self._read_tokens, self._gradients = None, {}
        self.micro_batches.append(current)
        self.current = None

    def _read(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self._read_tokens is not None:
            tokens = self._read_tokens()
            shapes = {name: tuple(tensor.shape) for name, tensor in tokens.items()}
            if len(set(shapes.values())) > 1:
                raise ValueError(f"all token tensors must be of one shape (rows, response length), got {shapes}.")
            found = {name: with_a_column(tensor.detach()) for name, tensor in tokens.items()}
        for name, gradient in self._gradients.items():
            found[name] = with_a_column(self._reshape[name](gradient.detach()))
        return found

    def figures(self, read: Callable[[], Tensor], count: int) -> Tensor:
        """What `read` returns of the mini-batch, of shape (count,); zeros after an error, which sets `failed`, too."""
        had_failed, self.failed = self.failed, True
        with guarded(_NOT_SUMMED, self._said):
            found = read()
            self.failed = had_failed
            return found
        assert self._model is not None
        return torch.zeros(count, dtype=torch.float64, device=self._model.device)

    def discard(self) -> None:
        """Drops what was recorded since the last `take`, and a pass that was interrupted."""
        if self.current is not None and self._model is not None:
            self._model.meter.cancel()
        self.current, self.micro_batches, self.failed = None, [], False
        self._read_tokens, self._gradients = None, {}

    def take(self) -> list[MicroBatch]:
        """The micro-batches recorded since the last call."""
        taken, self.micro_batches = self.micro_batches, []
        return taken


def nothing(device: torch.device) -> dict[str, Tensor]:
    """The tokens of a micro-batch in which nothing is a token."""
    return {name: torch.zeros(1, 1, device=device) for name in ("response_mask", "weight", "log_prob")}


def unchanged(gradient: Tensor) -> Tensor:
    """For `LossInputs`: the loss was computed from a tensor of the shape (rows, response length)."""
    return gradient


def with_a_column(values: Tensor) -> Tensor:
    """Values of shape (rows, response length), masked ones if all responses are empty: maxima need a value."""
    return values if values.shape[1] else nn.functional.pad(values, (0, 1))
