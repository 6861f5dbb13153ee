# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Records training passes: a micro-batch's tokens, their coefficients, and the norms of its local gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..fsdp.state import get_rng_state
from .micro_batch import MicroBatch
from .watched_model import WatchedModel

# Names of coefficients, each with the tensor whose gradient it is, and a function that brings that gradient into the
# shape (rows, response length).
LossInputs = Mapping[str, tuple[Tensor, Callable[[Tensor], Tensor]]]


class PassRecorder:
    """Records the training passes of a mini-batch.

    Args:
        model (WatchedModel): The model that is trained.

    Attributes:
        current (MicroBatch | None): The one whose pass is being recorded.
        micro_batches (list[MicroBatch]): Those recorded since the last `take`.
    """

    def __init__(self, model: WatchedModel) -> None:
        self.current: MicroBatch | None = None
        self.micro_batches: list[MicroBatch] = []
        self._model = model

    def begin(self, inputs: dict[str, Any], rows: Sequence[int]) -> None:
        """Called before a pass.

        Args:
            inputs (dict): The inputs of `Forward`; kept until `take`.
            rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
        """
        self.current = MicroBatch(inputs, [int(row) for row in rows], get_rng_state(self._model.device))
        self._model.meter.start()

    def observe(self, tokens: Mapping[str, Tensor], loss_inputs: LossInputs) -> None:
        """Called between a pass's loss and its backward.

        Args:
            tokens (Mapping[str, Tensor]): What is known of the tokens, all of shape (rows, response length).
            loss_inputs (Mapping): See `LossInputs`; what needs no gradient is left out.
        """
        current = self.current
        if current is None:
            raise RuntimeError("observe() belongs between begin_pass() and end_pass().")
        shapes = {name: tuple(tensor.shape) for name, tensor in tokens.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"all token tensors must be of one shape (rows, response length), got {shapes}.")
        current.tokens = {name: with_a_column(tensor.detach()) for name, tensor in tokens.items()}
        for name, (tensor, reshape) in loss_inputs.items():
            if tensor.requires_grad:
                tensor.register_hook(_catch(current.tokens, name, reshape))

    def end(self) -> None:
        """Called after a pass's backward."""
        if self.current is None:
            raise RuntimeError("end_pass() comes after begin_pass().")
        self.current.squares = self._model.meter.stop()
        self.micro_batches.append(self.current)
        self.current = None

    def discard(self) -> None:
        """Drops what was recorded since the last `take`, and a pass that was interrupted."""
        self.current, self.micro_batches = None, []

    def take(self) -> list[MicroBatch]:
        """The micro-batches recorded since the last call."""
        taken, self.micro_batches = self.micro_batches, []
        return taken


def unchanged(gradient: Tensor) -> Tensor:
    """For `LossInputs`: the loss was computed from a tensor of the shape (rows, response length)."""
    return gradient


def with_a_column(values: Tensor) -> Tensor:
    """Values of shape (rows, response length), masked ones if all responses are empty: maxima need a value."""
    return values if values.shape[1] else nn.functional.pad(values, (0, 1))


def _catch(tokens: dict[str, Tensor], name: str, reshape: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        tokens[name] = with_a_column(reshape(gradient.detach()))

    return hook
