# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shards a model of transformers by FSDP2."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """Shards a model by FSDP2, layer by layer, so that no more than a layer is whole in float32.

    Args:
        model (nn.Module): One of transformers, on the CPU or on the device.
        dtype (torch.dtype): What it computes in. Its parameters are float32, as in verl, or float64 with that.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept, cast_forward_inputs=False)
    whole = set(getattr(model, "_no_split_modules", None) or ())
    for module in [child for child in model.modules() if type(child).__name__ in whole] + [model]:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(kept)
        fully_shard(module, mesh=mesh, mp_policy=policy)
