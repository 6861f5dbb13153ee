# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which gradient of a model can be measured."""

from torch import nn


def meter_kind(module: nn.Module) -> str:
    """The `meter` of `GradLoc`: "reduced" for a model with verl's TiledMLP, otherwise "local".

    TiledMLP computes a weight's gradient in parts, which the local meter would take for several gradients.
    """
    return "reduced" if any(getattr(child, "is_tiled_mlp", False) for child in module.modules()) else "local"
