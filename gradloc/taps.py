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
"""Every rank's own gradient norms, read in the moment before FSDP averages them over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from .gradients import piece_norms
from .layers import layer_groups
from .sharding import FSDPModule


@dataclass(frozen=True)
class _Slot:
    """Where a parameter sits in the model: `getattr(owner, attribute)`, a member of layer group `layer`.

    What is found there may be a view of a flat parameter, which does not say whether the `original` one is frozen.
    """

    owner: nn.Module
    attribute: str
    layer: int
    original: Tensor | None


class GradientTaps:
    """Accumulates the norm of the local (unsharded, unreduced) gradient, one figure for each layer.

    FSDP makes a unit's parameters whole shortly before the unit's forward. A forward pre-hook on the unit then finds
    them where the forward will, and puts a tensor hook on each: the hook sees the gradient of this rank's own data.
    FSDP1 shows fresh views in every forward; FSDP2 (and no FSDP) one leaf for good, which is hooked only once. Nothing
    is hooked while a backward runs: gradient checkpointing recomputes the forward there, but the gradients flow
    through the first forward's tensors.

    Args:
        module (nn.Module): The model, wrapped by FSDP1, by FSDP2 or not at all.
        device (torch.device): Where it computes.

    Attributes:
        layers (list[str]): The layer groups, in the order of the figures.
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
        for unit, slots in self._slots(module).items():
            self._handles.append(unit.register_forward_pre_hook(self._pre_forward_hook(slots)))

    def start(self) -> None:
        """Begins a recording; what an earlier one left is dropped."""
        self._norms.clear()
        self._recording = True

    def stop(self) -> Tensor:
        """Ends the recording.

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
            # Kept from pass to pass, because copying it to the device waits for the device.
            layers = [layer for layer, pieces in order for _ in range(pieces)]
            self._order, self._index = order, torch.tensor(layers, device=self._device)
        return total.index_add_(0, self._index, torch.cat([norms for _, norms in recorded]).double().square())

    def cancel(self) -> None:
        """Ends the recording, if there is one, and drops it."""
        self._recording = False
        self._norms.clear()

    def remove(self) -> None:
        """Takes all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        for handle in self._hooked_leaves.values():
            handle.remove()

    def _slots(self, module: nn.Module) -> dict[nn.Module, list[_Slot]]:
        """The parameters, by the module whose forward comes right after they are made whole."""
        slots: dict[nn.Module, list[_Slot]] = {}
        parameters = _flat_parameters(module) or _plain_parameters(module)
        found = {
            f"{owner_name}.{attribute}".lstrip("."): (owner, attribute, unit, original)
            for owner_name, owner in module.named_modules()
            for attribute, unit, original in parameters.get(owner, ())
        }
        groups = layer_groups(found)
        self.layers = list(dict.fromkeys(groups.values()))
        for name, (owner, attribute, unit, original) in found.items():
            slots.setdefault(unit, []).append(_Slot(owner, attribute, self.layers.index(groups[name]), original))
        return slots

    def _pre_forward_hook(self, slots: list[_Slot]):
        def hook(_module: nn.Module, _args: object) -> None:
            if not self._recording or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
                return
            for slot in slots:
                if slot.original is None or slot.original.requires_grad:
                    self._tap(getattr(slot.owner, slot.attribute), slot.layer)

        return hook

    def _tap(self, parameter: Tensor, layer: int) -> None:
        if not parameter.requires_grad or (parameter.is_leaf and parameter in self._hooked_leaves):
            return

        def hook(gradient: Tensor) -> None:
            if self._recording:
                self._norms.append((layer, piece_norms(gradient)))

        handle = parameter.register_hook(hook)
        if parameter.is_leaf:
            self._hooked_leaves[parameter] = handle


# attribute, unit, original parameter
_Place = tuple[str, nn.Module, Tensor | None]


def _flat_parameters(module: nn.Module) -> dict[nn.Module, list[_Place]]:
    """FSDP1's parameters, by their owners."""
    found: dict[nn.Module, list[_Place]] = {}
    for fsdp in FullyShardedDataParallel.fsdp_modules(module):
        if fsdp._handle is not None:
            flat = fsdp._handle.flat_param
            use_originals = fsdp._handle._use_orig_params
            originals: Sequence[Tensor] = (flat._params or []) if use_originals else [flat] * len(flat._param_infos)
            for (attribute, owner, _), original in zip(flat._param_infos, originals, strict=True):
                found.setdefault(owner, []).append((attribute, fsdp._fsdp_wrapped_module, original))
    return found


def _plain_parameters(module: nn.Module) -> dict[nn.Module, list[_Place]]:
    """The parameters under FSDP2 or without sharding, by their owners. A tied one counts once."""
    units = {name for name, unit in module.named_modules() if isinstance(unit, FSDPModule) or unit is module}
    found: dict[nn.Module, list[_Place]] = {}
    for name, _ in module.named_parameters():
        owner_name, _, attribute = name.rpartition(".")
        unit_name = owner_name
        while unit_name not in units:
            unit_name = unit_name.rpartition(".")[0]
        unit = module.get_submodule(unit_name)
        found.setdefault(module.get_submodule(owner_name), []).append((attribute, unit, None))
    return found
