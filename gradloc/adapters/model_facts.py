# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a model says of itself: where its rollout stops, and which of its gradients can be measured."""

from typing import Any

from torch import nn


def eos_tokens(model: Any) -> set[int]:
    """The ids at which a rollout of a model stops, by the configurations that it, or verl's HFModelConfig, has."""
    ends: set[int] = set()
    for name in ("generation_config", "config", "hf_config"):
        found = getattr(getattr(model, name, None), "eos_token_id", None)
        ends.update([found] if isinstance(found, int) else found or ())
    return ends


def meter_kind(module: nn.Module) -> str:
    """The `meter` of `GradLoc`: "reduced" for a model with verl's TiledMLP, otherwise "local".

    TiledMLP computes a weight's gradient in parts, which the local meter would take for several gradients.
    """
    return "reduced" if any(getattr(child, "is_tiled_mlp", False) for child in module.modules()) else "local"
