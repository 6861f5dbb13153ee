# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Norms of each rank's local gradient, measured just before FSDP's reduce-scatter averages the gradients."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..fsdp.state import flat_handles, flat_parameters
from ..fsdp.torch_compat import FSDPModule, before_reduction, keeps_gradients_apart, param_groups, parameters_of
from ..guarded import release_frames
from ..layers.reduced_norms import layers_by_parameter, norms_of_all, on_device


class LocalNorms:
    """Accumulates the norms of the local (unsharded, unreduced) gradient by layer.

    All gradients that FSDP reduces together are measured in one call, as a norm for each parameter costs the host more
    time. Under FSDP1, a hook on a flat parameter sees the gradient of all its parameters in one tensor. Under FSDP2,
    the gradients of a parameter group are complete where their reduction begins.

    Elsewhere each parameter has a tensor hook of its own: without FSDP, and under FSDP2 where a gradient is added to
    that of earlier backwards (see `_Group`). A parameter is always the same leaf there, so it is hooked only once, in
    a forward pre-hook: the first with gradients, which with reentrant checkpointing is in the backward.

    Args:
        summed (Collection[str]): The names of small parameters, at most one of a layer, whose gradients' elements are
            added up as well: the sum is linear, so that passes and ranks can be compared with the reduced gradient.
    """

    def __init__(self, module: nn.Module, device: torch.device, summed: Collection[str] = ()) -> None:
        self.layers: list[str] = []  # the layers, in the order of the norms
        self.sums = torch.zeros(0)  # what the last `stop` found of `summed`: float64 of shape (len(layers),)
        self._device = device
        self._recording = False
        self._error: Exception | None = None
        self._found: list[tuple[int, Tensor]] = []  # norms, of shape (), each with its layer
        self._sums: list[tuple[int, Tensor]] = []
        self._summed = summed
        self._flats: list[_Flat] = []
        self._groups: list[_Group] = []
        self._hooked_leaves = WeakTensorKeyDictionary()
        self._removers: list[Callable[[], None]] = []
        if handles := flat_handles(module):
            self._watch_flat_parameters(module, handles)
        else:
            self._watch_parameters(module)

    def start(self) -> None:
        """Starts recording; an earlier recording is discarded."""
        self.cancel()
        for flat in self._flats:
            if flat.parameter.requires_grad and not flat.hooked:
                self._removers.append(flat.parameter.register_hook(self._guarded(flat.pieces)).remove)
                flat.hooked = True
        for group in self._groups:
            group.together = None
        self._recording = True

    def stop(self) -> Tensor:
        """Stops recording.

        Returns:
            Tensor: float64 of shape (len(layers),), each layer's squared gradient norm, without a host sync.

        Raises:
            Exception: What a hook raised; see `_guarded`.
        """
        error, found = self._error, (self._found, self._sums)
        self.cancel()
        if error is not None:
            raise error
        squares, self.sums = (torch.zeros(len(self.layers), dtype=torch.float64, device=self._device) for _ in found)
        for total, of, power in zip((squares, self.sums), found, (2, 1), strict=True):
            if of:
                layers, values = zip(*of, strict=True)
                total.index_add_(0, on_device(layers, self._device), torch.stack(values).double().pow(power))
        return squares

    def cancel(self) -> None:
        """Stops recording, if it has started, and discards the norms."""
        self._recording, self._error = False, None
        self._found, self._sums = [], []

    def close(self) -> None:
        """Removes all hooks from the model."""
        for remove in self._removers:
            remove()
        for handle in self._hooked_leaves.values():
            handle.remove()

    def _guarded(self, find: Callable[..., Sequence[tuple[int, Tensor, Tensor | None]] | None]) -> Callable[..., None]:
        """A hook that notes the norms of the gradients that `find` returns; on one device.

        Each has the index of its layer, and its part that is `summed`.

        Errors are kept for `stop`: in a training pass, they would end training.
        """

        def hook(*arguments: Any) -> None:
            if self._recording and self._error is None:
                try:
                    if found := find(*arguments):
                        norms, layers = norms_of_all((layer, gradient) for layer, gradient, _ in found)
                        self._found += zip(layers, norms, strict=True)
                        small = ((layer, part) for layer, _, part in found if part is not None)
                        self._sums += [(layer, part.sum(dtype=torch.float32)) for layer, part in small]
                except Exception as error:
                    release_frames(error)
                    self._error = error

        return hook

    def _watch_flat_parameters(self, module: nn.Module, handles: Sequence[Any]) -> None:
        """Under FSDP1."""
        names = {(id(handle), i): name for name, handle, i in flat_parameters(module)}
        layers = self._name_layers(names.values())
        for handle in handles:
            flat = handle.flat_param
            stops = [*accumulate(flat._numels_with_padding)]
            with_padding = zip([0, *stops[:-1]], stops, flat._is_padding_mask, strict=True)
            bounds = [(start, stop) for start, stop, is_padding in with_padding if not is_padding]
            originals: Sequence[Tensor] = (flat._params or []) if handle._use_orig_params else [flat] * len(bounds)
            parts = [
                (layers[names[id(handle), i]], *of_part, original)
                for i, (of_part, original) in enumerate(zip(bounds, originals, strict=True))
            ]
            named = [(names[id(handle), i], of_part) for i, of_part in enumerate(bounds)]
            self._flats.append(_Flat(flat, parts, {layers[name]: part for name, part in named if name in self._summed}))

    def _watch_parameters(self, module: nn.Module) -> None:
        """Under FSDP2, or without FSDP."""
        places = _places(module)
        layers = self._name_layers(places)
        grouped: dict[tuple[nn.Module, str], tuple[_Group, Any]] = {}
        for param_group in param_groups(module):
            group = _Group(param_group)
            self._groups.append(group)
            self._removers.append(before_reduction(param_group, self._guarded(group.gradients)))
            for owner, attribute, parameter in parameters_of(param_group):
                if not parameter.is_dtensor:
                    grouped[owner, attribute] = group, parameter
        slots: dict[nn.Module, list[tuple[nn.Module, str, tuple[int, bool], _Group | None]]] = {}
        for name, (owner, attribute, fsdp_module) in places.items():
            of_group, parameter = grouped.get((owner, attribute), (None, None))
            place = layers[name], name in self._summed
            if of_group is not None:
                of_group.parameters.append((*place, parameter))
            slots.setdefault(fsdp_module, []).append((owner, attribute, place, of_group))
        for fsdp_module, of_module in slots.items():
            handle = fsdp_module.register_forward_pre_hook(self._guarded(partial(self._before_forward, of_module)))
            self._removers.append(handle.remove)

    def _name_layers(self, names: Iterable[str]) -> dict[str, int]:
        """Sets the layers. Returns the index of each parameter's layer, by the parameter's name."""
        layers = layers_by_parameter(names)
        self.layers = list(dict.fromkeys(layers.values()))
        return {name: self.layers.index(layer) for name, layer in layers.items()}

    def _before_forward(
        self, slots: "Sequence[tuple[nn.Module, str, Any, _Group | None]]", _module: nn.Module, _args: object
    ) -> None:
        """Decides how a module's parameters are measured.

        Each has its owner, its attribute, its layer with whether it is `summed`, and its group, if any.
        """
        if not torch.is_grad_enabled():
            return
        in_backward = torch._C._current_graph_task_id() != -1
        for found in {id(group): group for *_, group in slots if group is not None}.values():
            # A backward recomputes what was decided in the forward; with reentrant checkpointing, nothing was.
            if not in_backward or found.together is None:
                found.together = found.has_only_new_gradients()
        for owner, attribute, place, group in slots:
            if group is None or not group.together:
                self._hook_parameter(getattr(owner, attribute), place, group)

    def _hook_parameter(self, parameter: Tensor, place: tuple[int, bool], group: "_Group | None") -> None:
        if not parameter.requires_grad or parameter in self._hooked_leaves:
            return

        def alone(gradient: Tensor) -> list[tuple[int, Tensor, Tensor | None]]:
            layer, is_summed = place
            is_alone = group is None or not group.together
            return [(layer, gradient, gradient if is_summed else None)] if is_alone else []

        self._hooked_leaves[parameter] = parameter.register_hook(self._guarded(alone))


@dataclass
class _Flat:
    """One of FSDP1's flat parameters, a leaf whose gradient has all its views' of one backward in one tensor."""

    parameter: Tensor
    # Each parameter in it: (index of the layer, start, stop, the original parameter). With `use_orig_params` the
    # original may be frozen, and its part has a gradient all the same.
    parts: list[tuple[int, int, int, Tensor]]
    summed: dict[int, tuple[int, int]]  # by layer, where its `summed` parameter is
    hooked: bool = False

    def pieces(self, gradient: Tensor) -> list[tuple[int, Tensor, Tensor | None]]:
        """Those of its trainable parts, as `_guarded` takes them; neighbours in a layer are one piece."""
        found: list[tuple[int, Tensor, Tensor | None]] = []
        for (layer, trains), neighbours in groupby(self.parts, key=lambda part: (part[0], part[3].requires_grad)):
            if trains:
                (_, start, stop, _), *others = neighbours
                # There are only zeros between neighbours.
                stop, summed = others[-1][2] if others else stop, self.summed.get(layer)
                is_in = summed is not None and start <= summed[0] < stop
                found.append((layer, gradient[start:stop], gradient[slice(*summed)] if summed and is_in else None))
        return found


@dataclass
class _Group:
    """One of FSDP2's parameter groups; parameters that FSDP2 leaves out have none."""

    param_group: Any  # torch's object
    # Those that are measured: (index of the layer, whether it is `summed`, FSDPParam).
    parameters: list[tuple[int, bool, Any]] = field(default_factory=list)
    together: bool | None = None  # whether they are measured together in this pass; None until that is decided

    def has_only_new_gradients(self) -> bool:
        """Whether the gradients at the start of the reduction will come from this backward alone.

        While the reduction is deferred to a later backward, some versions of FSDP2 keep them in the dtype of the
        reduction elsewhere. In others, or if that is the dtype that they have, they stay where later ones are added to
        them. Called when the parameters are unsharded.
        """
        trainable = [p for *_, p in self.parameters if p._unsharded_param.requires_grad]
        if all(keeps_gradients_apart(p) and p.reduce_dtype not in (None, p._unsharded_param.dtype) for p in trainable):
            return True
        return self.param_group.reduce_grads and all(p._unsharded_param.grad is None for *_, p in self.parameters)

    def gradients(self) -> list[tuple[int, Tensor, Tensor | None]]:
        """The gradients that there are, as `_guarded` takes them; none if they are not measured together."""
        if not self.together:
            return []
        found: list[tuple[int, Tensor, Tensor | None]] = []
        for layer, is_summed, parameter in self.parameters:
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if gradient is not None:
                found.append((layer, gradient, gradient if is_summed else None))
        return found


def _places(module: nn.Module) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Where each parameter is under FSDP2 or without sharding, by its name: (owner, attribute, FSDP module).

    The FSDP module is the one whose forward it is unsharded for. A tied parameter is listed once.
    """
    fsdp_names = {name for name, child in module.named_modules() if isinstance(child, FSDPModule) or child is module}
    found = {}
    for name, _ in module.named_parameters():
        owner_name, _, attribute = name.rpartition(".")
        fsdp_name = owner_name
        while fsdp_name not in fsdp_names:
            fsdp_name = fsdp_name.rpartition(".")[0]
        found[name] = module.get_submodule(owner_name), attribute, module.get_submodule(fsdp_name)
    return found
