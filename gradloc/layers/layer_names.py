# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which layer a parameter belongs to."""

import logging
import re
from collections.abc import Iterable

logger = logging.getLogger(__name__)

# What FSDP1, activation checkpointing, torch.compile and LoRA insert into parameter names.
_WRAPPERS = re.compile(r"\b(?:_(?:fsdp|checkpoint)_wrapped_module|_orig_mod|base_model\.model|base_layer)\.")
_LORA = re.compile(r"\.(?:lora_|modules_to_save\b|original_module\b).*")
_MODEL = re.compile(r"^(?:(?:model|transformer|language_model|decoder|module)\.)+")
# The router of a mixture of experts. A "gate" elsewhere (such as in attention) is not a router.
_ROUTER = re.compile(r"\.(?:router|(?:mlp|moe|block_sparse_moe|feed_forward|ffn)\.gate)(?:\.|$)")


def layer_name(parameter_name: str) -> str:
    """The layer of a parameter: "embed_tokens", "layers.3", "norm", "lm_head", "visual.blocks.0", ….

    A numbered block is one layer, including all experts of a mixture of experts; only their router is a separate
    layer, "layers.3.router". Outside of numbered blocks, a parameter's layer is the module that owns it, so that a
    model with unusual names is covered as well.
    """
    parts = plain_name(parameter_name).split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            block, rest = ".".join(parts[: i + 1]), ".".join(["", *parts[i + 1 :]])
            return f"{block}.router" if _ROUTER.search(rest) else block
    name = _LORA.sub("", ".".join(parts))
    return name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name


def layers_by_parameter(parameter_names: Iterable[str]) -> dict[str, str]:
    """The layer of each parameter of a model: its `layer_name`, or without numbered blocks its top-level module.

    It takes the names of all the model's parameters, frozen ones included.
    """
    names = list(parameter_names)
    if any(part.isdigit() for name in names for part in plain_name(name).split(".")):
        return {name: layer_name(name) for name in names}
    layers = {name: plain_name(name).partition(".")[0] for name in names}
    logger.warning(
        "No parameter of this model lies in a numbered block (such as layers.0), so its top-level modules are used as "
        "layers: %s.",
        ", ".join(dict.fromkeys(layers.values())),
    )
    return layers


def plain_name(parameter_name: str) -> str:
    """A parameter's name without what wrappers, and the model itself, put before its parts."""
    return _MODEL.sub("", _WRAPPERS.sub("", parameter_name))
