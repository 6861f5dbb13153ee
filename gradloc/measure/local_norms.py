# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Norms of each rank's local gradient, measured just before FSDP's reduce-scatter averages the gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..fsdp.torch_compat import FSDPModule
from ..layers.float32_norms import chunk_norms
from ..layers.layer_names import layers_by_parameter


@dataclass(frozen=True)
class _Slot:
    """Where a parameter is in the model: `getattr(owner, attribute)`, in the layer with index `layer`.

    With FSDP1 this may be a view of a flat parameter, which does not show whether the `original` parameter is frozen.
    """

    owner: nn.Module
    attribute: str
    layer: int
    original: Tensor | None


class LocalNorms:
    """Accumulates the norms of the local (unsharded, unreduced) gradient by layer.

    FSDP unshards the parameters of an FSDP module just before its forward. A forward pre-hook on that module then
    registers a tensor hook on each parameter, which gets the gradient of this rank's own data. FSDP1 creates new views
    in every forward. With FSDP2, or without FSDP, a parameter is always the same leaf, which is hooked only once. No
    hook is registered during a backward: gradient checkpointing recomputes the forward there, but the gradients flow
    through the tensors of the first forward.

    Args:
        module (nn.Module): The model, wrapped by FSDP1, by FSDP2 or not at all.
        device (torch.device): The device that the model computes on.

    Attributes:
        layers (list[str]): The layers, in the order of the norms.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.layers: list[str] = []
        self._device = device
        self._recording = False
        self._norms: list[tuple[int, Tensor]] = []
        self._order: list[tuple[int, int]] = []
        self._index: Tensor | None = None
        self._hooked_leaves = WeakTensorKeyDictionary()
        self._handles = []
        for fsdp_module, slots in self._slots(module).items():
            self._handles.append(fsdp_module.register_forward_pre_hook(self._pre_forward_hook(slots)))

    def start(self) -> None:
        """Starts recording; an earlier recording is discarded."""
        self._norms.clear()
        self._recording = True

    def stop(self) -> Tensor:
        """Stops recording.

        Returns:
            Tensor: float64 of shape (len(layers),), each layer's squared gradient norm, without a host sync.
        """
        self._recording = False
        recorded, self._norms = self._norms, []
        total = torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)
        if not recorded:
            return total
        order = [(layer, len(norms)) for layer, norms in recorded]
        if self._index is None or order != self._order:
            # Cached between passes, because copying it to the device is a host sync.
            layers = [layer for layer, pieces in order for _ in range(pieces)]
            self._order, self._index = order, torch.tensor(layers, device=self._device)
        return total.index_add_(0, self._index, torch.cat([norms for _, norms in recorded]).double().square())

    def cancel(self) -> None:
        """Stops recording, if it has started, and discards the norms."""
        self._recording = False
        self._norms.clear()

    def remove(self) -> None:
        """Removes all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        for handle in self._hooked_leaves.values():
            handle.remove()

    def _slots(self, module: nn.Module) -> dict[nn.Module, list[_Slot]]:
        """The parameters, by the FSDP module whose forward they are unsharded for."""
        slots: dict[nn.Module, list[_Slot]] = {}
        parameters = _flat_parameters(module) or _plain_parameters(module)
        found = {
            f"{owner_name}.{attribute}".lstrip("."): (owner, attribute, fsdp_module, original)
            for owner_name, owner in module.named_modules()
            for attribute, fsdp_module, original in parameters.get(owner, ())
        }
        layers = layers_by_parameter(found)
        self.layers = list(dict.fromkeys(layers.values()))
        for name, (owner, attribute, fsdp_module, original) in found.items():
            slot = _Slot(owner, attribute, self.layers.index(layers[name]), original)
            slots.setdefault(fsdp_module, []).append(slot)
        return slots

    def _pre_forward_hook(self, slots: list[_Slot]):
        def hook(_module: nn.Module, _args: object) -> None:
            if not self._recording or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
                return
            for slot in slots:
                if slot.original is None or slot.original.requires_grad:
                    self._hook_parameter(getattr(slot.owner, slot.attribute), slot.layer)

        return hook

    def _hook_parameter(self, parameter: Tensor, layer: int) -> None:
        if not parameter.requires_grad or (parameter.is_leaf and parameter in self._hooked_leaves):
            return

        def hook(gradient: Tensor) -> None:
            if self._recording:
                self._norms.append((layer, chunk_norms(gradient)))

        handle = parameter.register_hook(hook)
        if parameter.is_leaf:
            self._hooked_leaves[parameter] = handle


# attribute, FSDP module, original parameter
_Place = tuple[str, nn.Module, Tensor | None]


def _flat_parameters(module: nn.Module) -> dict[nn.Module, list[_Place]]:
    """The parameters under FSDP1, by owner."""
    found: dict[nn.Module, list[_Place]] = {}
    for fsdp_module in FullyShardedDataParallel.fsdp_modules(module):
        handle = fsdp_module._handle
        if handle is not None:
            flat = handle.flat_param
            use_originals = handle._use_orig_params
            originals: Sequence[Tensor] = (flat._params or []) if use_originals else [flat] * len(flat._param_infos)
            for (attribute, owner, _), original in zip(flat._param_infos, originals, strict=True):
                found.setdefault(owner, []).append((attribute, fsdp_module._fsdp_wrapped_module, original))
    return found


def _plain_parameters(module: nn.Module) -> dict[nn.Module, list[_Place]]:
    """The parameters under FSDP2 or without sharding, by owner. A tied parameter is listed once."""
    fsdp_names = {name for name, child in module.named_modules() if isinstance(child, FSDPModule) or child is module}
    found: dict[nn.Module, list[_Place]] = {}
    for name, _ in module.named_parameters():
        owner_name, _, attribute = name.rpartition(".")
        fsdp_name = owner_name
        while fsdp_name not in fsdp_names:
            fsdp_name = fsdp_name.rpartition(".")[0]
        fsdp_module = module.get_submodule(fsdp_name)
        found.setdefault(module.get_submodule(owner_name), []).append((attribute, fsdp_module, None))
    return found
