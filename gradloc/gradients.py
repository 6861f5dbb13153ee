# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Sharded gradients and random state: reading, setting aside, putting back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle

from .sharding import FSDPModule

# On the CPU a norm runs in one float32 accumulator, which costs 1e-3 of it at 28 million elements; in chunks of this
# size 2e-7. GPUs sum in blocks anyway.
_CPU_CHUNK = 2**16


def chunks(gradient: Tensor) -> Sequence[Tensor]:
    """The gradient in pieces whose float32 norms are exact enough; a GPU's is one piece."""
    return gradient.flatten().split(_CPU_CHUNK) if gradient.device.type == "cpu" else [gradient]


@torch.no_grad()
def piece_norms(gradient: Tensor) -> Tensor:
    """The norms of pieces that are short enough for float32, which make up the gradient: float32, one-dimensional."""
    whole = gradient.numel() // _CPU_CHUNK if gradient.device.type == "cpu" else 0
    if whole == 0:
        return torch.linalg.vector_norm(gradient, dtype=torch.float32).reshape(1)
    flat = gradient.flatten()
    rows, tail = flat[: whole * _CPU_CHUNK].view(whole, _CPU_CHUNK), flat[whole * _CPU_CHUNK :]
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return torch.cat([norms, torch.linalg.vector_norm(tail, dtype=torch.float32).reshape(1)]) if len(tail) else norms


def _flat_handles(module: nn.Module) -> list[FlatParamHandle]:
    """FSDP1's handles, one for each flat parameter."""
    units = FullyShardedDataParallel.fsdp_modules(module)
    return [unit._handle for unit in units if unit._handle is not None]


def _holders(module: nn.Module) -> list[Tensor]:
    """Everything that has a `.grad` of its own; with FSDP1's original parameters these are views of the flat ones'."""
    holders = [*module.parameters(), *(handle.flat_param for handle in _flat_handles(module))]
    return list({id(holder): holder for holder in holders}.values())


class SetAside:
    """Takes all gradients off a module while new ones are computed; leaving it puts the very same bits back.

    A context manager. After `replace()` in it, the new ones stay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replaced = False

    def replace(self) -> None:
        self._replaced = True

    def __enter__(self) -> "SetAside":
        self._kept = [(holder, holder.grad, _copy_if_reused(holder)) for holder in _holders(self._module)]
        clear(self._module)
        return self

    @torch.no_grad()
    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._replaced:
            for holder, gradient, _copy in self._kept:
                if gradient is None:  # zeros in the place of none would have the optimizer step
                    holder.grad = None
            return
        clear(self._module)
        for holder, gradient, copy in self._kept:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            holder.grad = gradient


def clear(module: nn.Module) -> None:
    """Drops all gradients, FSDP1's flat ones included."""
    for holder in _holders(module):
        holder.grad = None


def _copy_if_reused(holder: Tensor) -> Tensor | None:
    # FSDP1 with CPU offload reduces every backward into one buffer, which the next backward overwrites.
    return holder.grad.clone() if holder.grad is not None and hasattr(holder, "_cpu_grad") else None


def reset_sharding(module: nn.Module) -> None:
    """Brings FSDP back to where a forward may start, after a forward or backward that was broken off by an error."""
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        unit.training_state = TrainingState.IDLE
        unit._post_backward_callback_queued = False  # type: ignore[assignment]  # torch does not declare it
        if unit._is_root:
            unit._exec_order_data.next_iter()
        if unit._handle is not None:
            _reset_handle(unit._handle)
    for group in _parameter_groups(module):
        for parameter in group.fsdp_params:
            # What a backward left here, unreduced, would be added to the next one's.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    for child in module.modules():
        if isinstance(child, FSDPModule):
            _reset_fsdp2(child)


def _reset_handle(handle: FlatParamHandle) -> None:
    """What FSDP1 does with a handle at the end of a backward, less the gradient."""
    flat_param = handle.flat_param
    if hasattr(flat_param, "_post_backward_hook_state"):
        flat_param._post_backward_hook_state[-1].remove()
        del flat_param._post_backward_hook_state
    if hasattr(flat_param, "_saved_grad_shard"):
        del flat_param._saved_grad_shard
    flat_param._post_backward_called = False  # type: ignore[attr-defined]  # torch does not declare it
    handle._ran_pre_backward_hook = False  # type: ignore[attr-defined]  # torch does not declare it
    handle._needs_pre_backward_unshard = False
    handle._post_forward_index = None
    handle._training_state = HandleTrainingState.IDLE
    handle._prefetched = False
    # Whether it is sharded cannot be told: the root keeps its storage after a forward though it points at the shard.
    handle.reshard(free_unsharded_flat_param=handle.uses_sharded_strategy)
    handle.post_reshard()


def _reset_fsdp2(unit: FSDPModule) -> None:
    state = unit._get_fsdp_state()
    if hasattr(unit, "reset_iter_state"):
        if state._is_root:
            unit.reset_iter_state()
        return
    # torch before 2.12 has no such method.
    state._training_state = type(state._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    state._comm_ctx.all_gather_state = None
    group = state._fsdp_param_group
    if group is not None:
        group._training_state = type(group._training_state).IDLE
        group._all_gather_result = None
        group._post_forward_indices.clear()
        unit.reshard()


def all_reached(module: nn.Module) -> bool:
    """Whether a first pass has left a gradient for every parameter that FSDP2 has and that is trained."""
    parameters = [parameter.sharded_param for group in _parameter_groups(module) for parameter in group.fsdp_params]
    return all(parameter.grad is not None for parameter in parameters if parameter.requires_grad)


@contextmanager
def all_reduced(module: nn.Module) -> Iterator[None]:
    """Lets FSDP2 reduce zeros for parameters that a backward has not reached, such as idle experts.

    It reduces the gradients of a unit in one call and leaves out parameters without one: ranks whose inputs reach
    different experts would disagree about the size. (From torch 2.13 on, `set_reduce_scatter_unused_params` does this.)
    """
    groups = _parameter_groups(module)

    def reduce_all(group: Any) -> None:
        parameters = [p.unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        if any(parameter.grad is not None for parameter in parameters):
            for parameter in parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        type(group).post_backward(group)

    for group in groups:
        group.post_backward = lambda *_, group=group: reduce_all(group)
    try:
        yield
    finally:
        for group in groups:
            del group.post_backward


def _parameter_groups(module: nn.Module) -> list[Any]:
    """Those of all of FSDP2's units."""
    found: list[Any] = []
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            # torch before 2.12 has one at most.
            found += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back what forwards may change besides gradients: buffers, training flags and the random state."""
    flags = [(child, child.training) for child in module.modules()]
    buffers = [
        (child, name, buffer, buffer.clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    rng_state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(rng_state, device)
        for child, training in flags:
            child.training = training
        for child, name, buffer, copy in buffers:
            child._buffers[name] = buffer
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(copy)


def get_rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """torch's random state: the CPU's and, where it has one of its own, the device's."""
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), getattr(torch, device.type).get_rng_state(device)


def set_rng_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Puts back what `get_rng_state` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        getattr(torch, device.type).set_rng_state(state[1], device)
