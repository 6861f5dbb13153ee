# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the package uses of torch that torch may move, rename or drop, and whether it is there.

verl's configuration imports this package for every user, even if their torch cannot run GradLoc or LayerClip.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
except ImportError:  # torch before 2.6
    FSDPModule = FullyShardedDataParallel = DTensor = None  # type: ignore[assignment,misc]

# Then nothing that measures gradients works.
IS_TOO_OLD = FSDPModule is None

# Names that must exist, by module or class. A test compares them with the sources.
REQUIRED: dict[str, tuple[str, ...]] = {
    "torch": ("_foreach_mul_", "_foreach_norm"),
    "torch._C": ("_current_graph_task_id",),
    "nn.Module": ("_buffers",),
    "nn.modules.dropout": ("_DropoutNd",),
    "FullyShardedDataParallel": ("_comm_hook", "_exec_order_data", "_handle", "_is_root", "training_state"),
    "FlatParamHandle": (
        *("_needs_pre_backward_unshard", "_prefetched", "_training_state", "_use_orig_params"),
        *("flat_param", "post_reshard", "process_group", "reshard", "uses_sharded_strategy"),
    ),
    "FlatParameter": (
        *("_is_padding_mask", "_numels_with_padding"),
        *("_param_infos", "_params", "_shapes", "_shard_param_infos"),
    ),
    "FSDPModule": ("_get_fsdp_state", "reshard"),
    "FSDPState": ("_is_root",),
    "FSDPParamGroup": ("fsdp_params", "post_backward", "reduce_grads"),
    "FSDPParam": ("_module_info", "_unsharded_param", "is_dtensor", "reduce_dtype", "unsharded_param"),
}


def missing_names(module: nn.Module) -> list[str]:
    """The names in `REQUIRED` that this torch lacks for this model, such as "FSDPParam.reduce_dtype"."""
    if IS_TOO_OLD:
        return ["FSDPModule"]
    kinds = set()
    missing: dict[str, None] = {}
    for kind, found in _objects(module):
        kinds.add(kind)
        missing |= {f"{kind}.{name}": None for name in REQUIRED[kind] if not _has(found, name)}
    if not missing and is_sharded(module) and not kinds & {"FlatParamHandle", "FSDPParamGroup"}:
        missing["FSDPParamGroup"] = None
    return list(missing)


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of the model are shared out, so that a pass has to gather them."""
    handles = [fsdp_module._handle for fsdp_module in FullyShardedDataParallel.fsdp_modules(module)]
    return any(handle is not None and handle.uses_sharded_strategy for handle in handles) or any(
        size > 1 and not placement.is_replicate()
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


def param_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups: the parameters that it unshards together, and whose gradients it reduces together."""
    found: list[Any] = []
    for fsdp_module in module.modules():
        if isinstance(fsdp_module, FSDPModule):
            state = fsdp_module._get_fsdp_state()
            # Before torch 2.12 there is at most one.
            found += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    # Modules that were given to `fully_shard` as a list share a group.
    return list({id(param_group): param_group for param_group in found if param_group is not None}.values())


def keeps_gradients_apart(parameter: Any) -> bool:
    """Whether FSDP2 keeps an unreduced gradient in another dtype than its parameter's outside of `.grad`.

    So it is before torch 2.15, where later gradients are added to `.grad` instead.
    """
    return "unsharded_accumulated_grad" in vars(parameter)


# A group's attribute with the functions that are called before its reduction.
_ACTIONS = "_gradloc_before_reduction"


def parameters_of(param_group: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each parameter of a group as (owner, attribute, FSDPParam); a tied one as often as it is in the model."""
    for parameter in param_group.fsdp_params:
        place = parameter._module_info
        yield place.module, place.param_name, parameter
        for owner, attribute in zip(place.shared_modules, place.shared_param_names, strict=True):
            yield owner, attribute, parameter


def before_reduction(param_group: Any, action: Callable[[], None], last: bool = False) -> Callable[[], None]:
    """Has `action` called before FSDP2 reduces a group's gradients, or keeps them until a later backward reduces them.

    A backward may come there several times, each time with gradients that were not there before. It is called before
    all others that there are now, or as the `last`.

    Returns:
        Callable: Ends that.
    """
    actions: list[Callable[[], None]] = vars(param_group).setdefault(_ACTIONS, [])

    def post_backward(*arguments: Any) -> None:
        for each in actions.copy():
            each()
        type(param_group).post_backward(param_group, *arguments)

    def remove() -> None:
        if action in actions:
            actions.remove(action)
        if not actions:
            vars(param_group).pop("post_backward", None)

    actions.insert(len(actions) if last else 0, action)
    param_group.post_backward = post_backward
    return remove


def _objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What `REQUIRED` is about, as far as it can be reached."""
    yield from (("torch", torch), ("torch._C", torch._C))
    yield from (("nn.Module", module), ("nn.modules.dropout", nn.modules.dropout))
    for fsdp_module in FullyShardedDataParallel.fsdp_modules(module):
        yield "FullyShardedDataParallel", fsdp_module
        if (handle := getattr(fsdp_module, "_handle", None)) is not None:
            yield "FlatParamHandle", handle
            yield "FlatParameter", getattr(handle, "flat_param", None)
    fsdp_modules = [child for child in module.modules() if isinstance(child, FSDPModule)]
    yield from (("FSDPModule", fsdp_module) for fsdp_module in fsdp_modules)
    if all(hasattr(fsdp_module, "_get_fsdp_state") for fsdp_module in fsdp_modules):
        yield from (("FSDPState", fsdp_module._get_fsdp_state()) for fsdp_module in fsdp_modules)
        for param_group in param_groups(module):
            yield "FSDPParamGroup", param_group
            yield from (("FSDPParam", parameter) for parameter in getattr(param_group, "fsdp_params", ()))


def _has(found: Any, name: str) -> bool:
    """Whether an object has the attribute, or its class says that it will: some come with the first pass."""
    kinds = type(found).__mro__
    return hasattr(found, name) or any(name in {**vars(k), **getattr(k, "__annotations__", {})} for k in kinds)
