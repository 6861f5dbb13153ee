# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Where a language model's hidden states can be seen, and which token each of their positions belongs to."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..layers.layer_names import layer_name

# Encoders of other modalities, whose hidden states are not those of the tokens.
_OTHER_MODALITY = re.compile(r"visual|vision|image|audio|speech")


def find_boundaries(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are hidden states, the embedding and the decoder layers, in the order of the forward.

    They are given by name: "embed_tokens", "layers.0", …; there are none if the model has no list of decoder layers.
    """
    # The decoder layers are the longest list of modules that is in no other list, nor in another encoder.
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and not any(part.isdigit() for part in name.split("."))
        and not _OTHER_MODALITY.search(name)
    ]
    if not lists:
        return {}
    found = []
    find_embedding: Callable[[], nn.Module | None] | None = getattr(module, "get_input_embeddings", None)
    if find_embedding is not None and (embedding := find_embedding()) is not None:
        found = [(name, owner) for name, owner in module.named_modules() if owner is embedding]
    list_name, layers = max(lists, key=lambda each: len(each[1]))
    found += [(f"{list_name}.{i}", layer) for i, layer in enumerate(layers)]
    return {layer_name(f"{name}.weight"): owner for name, owner in found}


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

    def places(self, shape: Sequence[int], whole: bool = False) -> tuple[Tensor, Tensor] | None:
        """Where the position is that predicts each token of the sequences; no host sync.

        Args:
            shape (Sequence[int]): Of hidden states without the hidden size, or of log-probs: (rows, any length) if they
                are padded; (1, positions), or (positions,) for log-probs, if the padding is removed. More positions may
                follow, of no token.
            whole (bool): Whether these are the positions of the whole group, not this rank's part; so are log-probs, of
                shape (rows, response length) if they are padded.

        Returns:
            tuple[Tensor, Tensor] | None: Its flat index in that shape, int64 of shape (rows, length + 1), by the
                token's column; and whether there is one, bool. None if the shape is not that of these sequences.
        """
        (rows, length), device = self.mask.shape, self.mask.device
        # A single row without its padding is shorter than with it.
        if len(shape) == 2 and shape[0] == rows and (rows > 1 or whole or shape[1] >= length):
            starts = torch.tensor(self.response_starts).to(device, non_blocking=True).unsqueeze(1)
            at = torch.arange(length + 1, device=device) - (starts if whole else torch.ones_like(starts))
            known, row = (at >= 0) & (at < shape[1]), torch.arange(rows, device=device).unsqueeze(1)
            return at.clamp(0, shape[1] - 1) + row * shape[1], known
        if tuple(shape[:-1]) not in ((1,), ()) or (len(shape) == 1 and not whole):
            return None
        # Those with a token, in order. Each rank's part is as long as the others'.
        packed = self.mask.flatten().cumsum(0).view(rows, length) - 1 - (0 if whole else self.part * shape[-1])
        known = self.mask & (packed >= 0) & (packed < shape[-1])
        return pad(packed.clamp(0, shape[-1] - 1), (1, 0)), pad(known, (1, 0))
