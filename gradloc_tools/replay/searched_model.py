# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The model of a search: in one process as a replay computes it, or sharded by FSDP2 over the processes of torchrun."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from gradloc.measure.passes import Forward

from .model import Model, compute_logits, cut_row, has_dropout, response_log_probs
from .model import forward as forward_row

# Log-probs and entropies of a row's response.
_Outputs = tuple[Tensor, Tensor | None]


def build_forward(model: Model) -> Forward:
    """The forward of a model in one process: one row after the other, without padding, as a replay computes them.

    Of several rows, one at a time is computed again in the backward, so that they take the memory of one.

    Its inputs are `rows`, the `Row`s of a micro-batch, and `entropy`, whether the loss has entropies.
    """

    def forward(inputs: Mapping[str, Any], rows: Sequence[int], response_length: int) -> tuple[Tensor | None, Tensor]:
        of_row = partial(_again_in_backward, forward_row) if len(rows) > 1 else forward_row
        cut = [cut_row(inputs["rows"][index], response_length) for index in rows]
        return _stacked([of_row(model, row, inputs["entropy"]) for row in cut], response_length)

    return forward


def shard_model(model: Model, device: torch.device, mesh: DeviceMesh) -> tuple[Model, Forward]:
    """Shards a model on the CPU by FSDP2 over a mesh; decoder layers compute again in the backward.

    Its forward computes all rows at once, padded on the right: FSDP would reduce the gradient of each row alone.

    Args:
        model (Model): The model, whose parameters are replaced.
        device (torch.device): Where it computes from now on.

    Returns:
        tuple[Model, Forward]: The sharded model, and its forward with the inputs of `build_forward`.
    """
    module: Any = model.module
    if hasattr(module, "gradient_checkpointing_enable") and not has_dropout(module):
        module.gradient_checkpointing_enable({"use_reentrant": False})
        for child in module.modules():
            if getattr(child, "gradient_checkpointing", False):
                child.training = True  # alone: without it, transformers does not compute the layer again
    shard(module, model.dtype, mesh)
    sharded = replace(model, device=device, layer_of={})

    def forward(inputs: Mapping[str, Any], rows: Sequence[int], response_length: int) -> tuple[Tensor | None, Tensor]:
        cut = [cut_row(inputs["rows"][index], response_length) for index in rows]
        lengths = [len(row.input_ids) for row in cut]
        ids = nn.utils.rnn.pad_sequence([row.input_ids for row in cut], batch_first=True).to(device)
        positions = nn.utils.rnn.pad_sequence([row.position_ids for row in cut], batch_first=True).to(device)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths).unsqueeze(1)).to(ids)
        logits = compute_logits(sharded, ids, mask, positions)
        parts = [(logits[i, :length], ids[i, :length]) for i, length in enumerate(lengths)]
        found = [
            _again_in_backward(response_log_probs, *part, row, inputs["entropy"])
            for part, row in zip(parts, cut, strict=True)
        ]
        return _stacked(found, response_length)

    return sharded, forward


def _again_in_backward(function: Callable[..., _Outputs], *arguments: Any) -> _Outputs:
    found: _Outputs = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return found


def _stacked(found: Sequence[_Outputs], length: int) -> tuple[Tensor | None, Tensor]:
    """Entropies, if there are any, and log-probs of rows, each with zeros up to a length: (rows, length)."""

    def stack(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([nn.functional.pad(each, (0, length - len(each))) for each in values])

    entropies = [entropy for _, entropy in found if entropy is not None]
    return stack(entropies) if entropies else None, stack([log_prob[:length] for log_prob, _ in found])


def shard(model: nn.Module, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Shards a model by FSDP2, layer by layer, so that no more than a layer is whole in float32.

    Args:
        model (nn.Module): One of transformers, on the CPU or on the device.
        dtype (torch.dtype): What it computes in. Its parameters are float32, as in verl, or float64 with that.
    """
    # torch before 2.6 does not have FSDP2
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    kept = torch.float64 if dtype == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept, cast_forward_inputs=False)
    whole = set(getattr(model, "_no_split_modules", None) or ())
    for module in [child for child in model.modules() if type(child).__name__ in whole] + [model]:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(kept)
        fully_shard(module, mesh=mesh, mp_policy=policy)
