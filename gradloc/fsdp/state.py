# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Saves and restores what an extra pass must not change: gradients, FSDP's state, buffers, flags and random state."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .torch_compat import FSDPModule, FullyShardedDataParallel, before_reduction, keeps_gradients_apart, param_groups


def flat_handles(module: nn.Module) -> list[Any]:
    """FSDP1's handles, one for each flat parameter."""
    fsdp_modules = FullyShardedDataParallel.fsdp_modules(module)
    return [fsdp_module._handle for fsdp_module in fsdp_modules if fsdp_module._handle is not None]


def flat_parameters(module: nn.Module) -> Iterator[tuple[str, Any, int]]:
    """Each parameter in FSDP1's flat parameters: its name, their handle, and its index there; in the model's order."""
    found: dict[nn.Module, list[tuple[str, Any, int]]] = {}
    for handle in flat_handles(module):
        for i, (attribute, owner, _) in enumerate(handle.flat_param._param_infos):
            found.setdefault(owner, []).append((attribute, handle, i))
    for owner_name, owner in module.named_modules():
        for attribute, handle, i in found.get(owner, ()):
            yield f"{owner_name}.{attribute}".lstrip("."), handle, i


def _holders(module: nn.Module) -> list[Tensor]:
    """All tensors with a `.grad`; with FSDP1's use_orig_params, these are views of the flat parameters' `.grad`."""
    holders = [*module.parameters(), *(handle.flat_param for handle in flat_handles(module))]
    return list({id(holder): holder for holder in holders}.values())


@contextmanager
def set_aside(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Removes all gradients of a module on entry, and restores them bit for bit on exit.

    After a call of what it yields, the gradients computed inside are kept instead, unless an error ends it.
    """
    # With CPU offload, FSDP1 reduces every backward's gradient into one buffer, which the next backward overwrites.
    kept = [
        (holder, holder.grad, holder.grad.clone() if holder.grad is not None and hasattr(holder, "_cpu_grad") else None)
        for holder in _holders(module)
    ]
    clear_gradients(module)
    replaced: list[bool] = []
    try:
        yield partial(replaced.append, True)
    except BaseException:
        replaced.clear()
        raise
    finally:
        if not replaced:
            clear_gradients(module)
        for holder, gradient, copy in kept:
            if gradient is not None and copy is not None and not replaced:
                with torch.no_grad():
                    gradient.copy_(copy)
            # A parameter without a gradient stays without one: the optimizer would update it with zeros.
            if gradient is None or not replaced:
                holder.grad = gradient


def clear_gradients(module: nn.Module) -> None:
    """Sets all gradients to None, also of FSDP1's flat parameters."""
    for holder in _holders(module):
        holder.grad = None


def reset_fsdp(module: nn.Module) -> None:
    """Resets FSDP after an error interrupted a forward or backward, so that a new forward can start."""
    for fsdp_module in FullyShardedDataParallel.fsdp_modules(module):
        fsdp_module.training_state = type(fsdp_module.training_state).IDLE
        fsdp_module._post_backward_callback_queued = False  # type: ignore[assignment]  # torch does not declare it
        if fsdp_module._is_root:
            fsdp_module._exec_order_data.next_iter()
        if fsdp_module._handle is not None:
            _reset_handle(fsdp_module._handle)
    for param_group in param_groups(module):
        for parameter in param_group.fsdp_params:
            # An unreduced gradient left here would be added to the next backward's.
            if keeps_gradients_apart(parameter):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    for child in module.modules():
        if isinstance(child, FSDPModule):
            _reset_fsdp2(child)


def _reset_handle(handle: Any) -> None:
    """Does what FSDP1 does with a handle at the end of a backward, except for the gradient."""
    flat_param = handle.flat_param
    if hasattr(flat_param, "_post_backward_hook_state"):
        flat_param._post_backward_hook_state[-1].remove()
        del flat_param._post_backward_hook_state
    if hasattr(flat_param, "_saved_grad_shard"):
        del flat_param._saved_grad_shard
    flat_param._post_backward_called = False
    handle._ran_pre_backward_hook = False
    handle._needs_pre_backward_unshard = False
    handle._post_forward_index = None
    handle._training_state = type(handle._training_state).IDLE
    handle._prefetched = False
    # Always reshard: after a forward the root points at its shard but keeps the unsharded storage, so neither of them
    # shows whether it is resharded.
    handle.reshard(free_unsharded_flat_param=handle.uses_sharded_strategy)
    handle.post_reshard()


def _reset_fsdp2(fsdp_module: FSDPModule) -> None:
    state = fsdp_module._get_fsdp_state()
    if hasattr(fsdp_module, "reset_iter_state"):
        if state._is_root:
            fsdp_module.reset_iter_state()
        return
    # torch before 2.12 does not have this method.
    state._training_state = type(state._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    stream = state._device_handle.current_stream()
    _release_in_flight(state._comm_ctx, stream)
    param_group = state._fsdp_param_group
    if param_group is not None:
        param_group._training_state = type(param_group._training_state).IDLE
        _release_in_flight(param_group, stream)
        param_group._post_forward_indices.clear()
        fsdp_module.reshard()


# FSDP2's attributes with the buffers of calls in flight, up to gigabytes, and the events after which they may be freed.
_IN_FLIGHT = (
    "all_gather_state",
    "reduce_scatter_state",
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)


def _release_in_flight(holder: Any, stream: Any) -> None:
    """Lets go of the buffers that an interrupted pass has left; the stream waits for the calls that use them."""
    for name in _IN_FLIGHT:
        held = getattr(holder, name, None)
        if held is None:
            continue
        event = held if name.endswith("_event") else getattr(held, "event", getattr(held, "all_gather_event", None))
        if event is not None:
            stream.wait_event(event)
        setattr(holder, name, None)


@contextmanager
def all_reduced(module: nn.Module) -> Iterator[None]:
    """Makes FSDP2 reduce zeros for parameters without a gradient, as unused experts have.

    FSDP2 reduces the gradients of a parameter group in one reduce-scatter, and leaves out parameters without a
    gradient. So ranks whose inputs use different experts would call it with different sizes. (From torch 2.13 on,
    `set_reduce_scatter_unused_params` does this.)
    """

    def fill_in(param_group: Any) -> None:
        parameters = [p.unsharded_param for p in param_group.fsdp_params if hasattr(p, "_unsharded_param")]
        if any(parameter.grad is not None for parameter in parameters):
            for parameter in parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))

    with ExitStack() as ended:
        for param_group in param_groups(module):
            ended.callback(before_reduction(param_group, partial(fill_in, param_group)))
        yield


@contextmanager
def unreduced(module: nn.Module) -> Iterator[None]:
    """Makes FSDP drop gradients where it would reduce them: a backward communicates only to unshard parameters.

    FSDP2 then leaves no gradient, and takes no memory for one. FSDP1, which reshards a flat parameter only if it has a
    gradient, leaves a meaningless one for the caller to clear, which takes no memory where parameters are sharded.
    """

    def drop(param_group: Any) -> None:
        for parameter in param_group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    with ExitStack() as ended:
        for param_group in param_groups(module):
            ended.callback(before_reduction(param_group, partial(drop, param_group), last=True))
        for fsdp_module in FullyShardedDataParallel.fsdp_modules(module):
            ended.callback(setattr, fsdp_module, "_comm_hook", fsdp_module._comm_hook)
            if fsdp_module._handle is not None:
                fsdp_module._comm_hook = partial(_reduce_nothing, fsdp_module._handle.flat_param)
        yield


def _reduce_nothing(flat_param: Any, _state: object, _gradient: Tensor, *reduced: Tensor) -> None:
    """A communication hook of FSDP1: the reduced gradient, where it is one of its own, is a single undefined number."""
    for gradient in reduced:
        # One of a module that is called several times would be added up, which one number cannot be.
        vars(flat_param).pop("_saved_grad_shard", None)
        gradient.data = gradient.new_empty(1, dtype=flat_param.dtype).expand_as(gradient)


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores on exit what a pass may change besides gradients: buffers, training flags and the random state."""
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
    """torch's random state: the CPU's, and the device's if that is not the CPU (else None)."""
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), getattr(torch, device.type).get_rng_state(device)


def set_rng_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Restores what `get_rng_state` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        getattr(torch, device.type).set_rng_state(state[1], device)
