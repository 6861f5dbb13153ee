# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The boundaries between a language model's layers, where its hidden states can be seen."""

import re
from collections.abc import Callable

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

    Args:
        module (nn.Module): The model, wrapped by FSDP1, by FSDP2 or not at all.
        seen (Seen): The function.

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
        owner.register_forward_hook(_forward_hook(boundary, seen))
    return list(boundaries)


def find_boundaries(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are hidden states, the embedding and the decoder layers, in the order of the forward.

    Args:
        module (nn.Module): The model, wrapped by FSDP1, by FSDP2 or not at all.

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


def _forward_hook(boundary: str, seen: Seen) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad and torch.is_grad_enabled():
            seen(boundary, hidden)

    return hook
