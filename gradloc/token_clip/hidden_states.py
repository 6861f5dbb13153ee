# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Where a language model's hidden states can be seen, and which token each of their positions belongs to."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..layers.layer_names import layer_name

# Encoders of other modalities, whose hidden states are not those of the tokens.
_OTHER_MODALITY = re.compile(r"visual|vision|image|audio|speech")

# `(boundary, hidden states) -> None`, called with hidden states that require a gradient.
Seen = Callable[[str, Tensor], None]


def hook_boundaries(module: nn.Module, seen: Seen) -> list[str]:
    """Has `seen` called with the output of the embedding and of every decoder layer, in each forward with gradients.

    A forward that gradient checkpointing recomputes calls it as well. Gradients flow through the tensors of one of the
    two only: with reentrant checkpointing through the recomputed ones, otherwise through those of the first forward.

    Returns:
        list[str]: The boundaries' names in the order of the forward: "embed_tokens", "layers.0", ….

    Raises:
        ValueError: The model has no list of decoder layers.
    """
    boundaries = find_boundaries(module)
    if not boundaries:
        raise ValueError(
            f"token_clip finds no list of decoder layers in this model ({type(module).__name__}): set "
            "actor_rollout_ref.actor.token_clip.enable=False."
        )
    for boundary, owner in boundaries.items():
        owner.register_forward_hook(partial(_see_output, seen, boundary))
    return list(boundaries)


def find_boundaries(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are hidden states, the embedding and the decoder layers, in the order of the forward.

    Returns:
        dict: By name; empty if the model has no list of decoder layers.
    """
    layers = _decoder_layers(module)
    if not layers:
        return {}
    boundaries: dict[str, nn.Module] = {}
    find_embedding: Callable[[], nn.Module | None] | None = getattr(module, "get_input_embeddings", None)
    embedding = None if find_embedding is None else find_embedding()
    for name, owner in module.named_modules():
        if embedding is not None and owner is embedding:
            boundaries[layer_name(f"{name}.weight")] = owner
    for name, layer in layers:
        boundaries[layer_name(f"{name}.weight")] = layer
    return boundaries


def _decoder_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder layers by name: the longest list of modules that is in no other list, nor in another encoder."""
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and not any(part.isdigit() for part in name.split("."))
        and not _OTHER_MODALITY.search(name)
    ]
    if not lists:
        return []
    name, layers = max(lists, key=lambda found: len(found[1]))
    return [(f"{name}.{i}", layer) for i, layer in enumerate(layers)]


def _see_output(seen: Seen, boundary: str, _module: nn.Module, _inputs: object, output: object) -> None:
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if isinstance(hidden, Tensor) and hidden.requires_grad and torch.is_grad_enabled():
        seen(boundary, hidden)


@dataclass(frozen=True)
class Positions:
    """The sequences of a micro-batch, and how its hidden states hold them: padded, or with the padding removed."""

    mask: Tensor  # where the padded sequences have a token, bool of shape (rows, length)
    response_starts: Sequence[int]  # the column in `mask` of each response's first token
    # With Ulysses sequence parallelism, this rank's index in its group: which part of the positions it has.
    part: int = 0
    parts: int = 1  # the size of that group

    def select(self, rows: Sequence[int], response_length: int) -> "Positions":
        """The positions of a forward of some rows, with responses truncated to that length."""
        starts = [self.response_starts[row] for row in rows]
        ends = torch.tensor(starts, device=self.mask.device).unsqueeze(1) + response_length
        columns = torch.arange(self.mask.shape[1], device=self.mask.device)
        return replace(self, mask=self.mask[list(rows)] & (columns < ends), response_starts=starts)

    def rows_of(self, shape: Sequence[int], whole: bool = False) -> Tensor | None:
        """The row that each position belongs to, broadcastable to that shape; no host sync.

        Args:
            shape (Sequence[int]): Of hidden states without the hidden size, or of log-probs: (rows, any length) if they
                are padded; (1, positions), or (positions,) for log-probs, if the padding is removed. More positions may
                follow, of no token.
            whole (bool): Whether these are the positions of the whole group, not this rank's part.

        Returns:
            Tensor | None: int64; None if the shape is not that of these sequences.
        """
        if self._padded(shape, whole):
            return torch.arange(shape[0], device=self.mask.device).unsqueeze(1)
        cells = self._cells(shape, whole)
        return None if cells is None else (cells // self.mask.shape[1]).view(*shape)

    def tokens_of(self, shape: Sequence[int], whole: bool = False) -> tuple[Tensor, Tensor]:
        """The token that each position predicts: its row, and its index in the response (negative in the prompt).

        Args:
            shape (Sequence[int]): One that `rows_of` knows; log-probs of padded responses are (rows, response length).
            whole (bool): As there; true for log-probs.

        Returns:
            tuple[Tensor, Tensor]: Flat, on the device; no host sync.
        """
        device = self.mask.device
        starts = torch.tensor(self.response_starts).to(device, non_blocking=True)
        if self._padded(shape, whole):
            sides = (torch.arange(size, device=device) for size in shape)
            rows, columns = torch.meshgrid(*sides, indexing="ij")
            rows, columns = rows.flatten(), columns.flatten()
            if whole:
                return rows, columns
        else:
            cells = self._cells(shape, whole)
            assert cells is not None
            rows, columns = cells // self.mask.shape[1], cells % self.mask.shape[1]
        return rows, columns + 1 - starts[rows]

    def _padded(self, shape: Sequence[int], whole: bool) -> bool:
        rows, length = self.mask.shape
        # A single row without its padding is shorter than with it.
        return len(shape) == 2 and shape[0] == rows and (rows > 1 or whole or shape[1] >= length)

    def _cells(self, shape: Sequence[int], whole: bool) -> Tensor | None:
        """The flat index in `mask` of each position without padding; positions of no token get any."""
        count = shape[-1]
        part = 0 if whole else self.part
        if tuple(shape[:-1]) not in ((1,), ()) or (len(shape) == 1 and not whole):
            return None
        # Those with a token, in order. Each rank's part is as long as the others'.
        packed = torch.argsort((~self.mask).flatten().to(torch.int8), stable=True)
        cells = packed[part * count : (part + 1) * count]
        return torch.nn.functional.pad(cells, (0, count - len(cells)))
