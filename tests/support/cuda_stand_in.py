"""Tensors of a CPU that behave as if they were on a GPU, as far as devices and host waits are concerned."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TORCH = str(Path(torch.__file__).parent)

aten = torch.ops.aten
# They give the host a value, or a tensor whose shape depends on values.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.is_nonzero}
COPIES = {aten.copy_, aten._to_copy}
INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class MixedDevices(AssertionError):
    """An operation on tensors of two devices, which a GPU would refuse."""


class CudaStandIn:
    """A context in which each tensor has a logical device, the CPU or "cuda:0".

    An operation's results are where its arguments are. One that mixes devices raises `MixedDevices`; a tensor of the
    CPU without dimensions may be mixed with others, and indices may be on the CPU. Time, memory, streams and what
    libraries compute on a GPU are not imitated. `waits` has where the host waited for the device, as "file:line" of the
    innermost frame outside torch.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._devices: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._wanted: torch.device | None = None
        self._exits = ExitStack()

    def __enter__(self) -> CudaStandIn:
        stand_in = self

        class Dispatched(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
                return stand_in.dispatched(func, args, kwargs or {})

        class Called(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
                return stand_in.called(func, args, dict(kwargs or {}))

        for context in (
            mock.patch.object(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state()),
            mock.patch.object(torch.cuda, "set_rng_state", lambda state, device: None),
            Dispatched(),
            Called(),
        ):
            self._exits.enter_context(context)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def put(self, *placed: Tensor | nn.Module) -> None:
        """Puts tensors, or a module's parameters and buffers, on "cuda:0", without a wait."""
        for each in placed:
            for tensor in [each] if isinstance(each, Tensor) else [*each.parameters(), *each.buffers()]:
                self._label(tensor, CUDA)

    def device_of(self, tensor: Tensor) -> torch.device:
        """A tensor's logical device."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._devices.get(tensor.untyped_storage()._cdata, (None, CPU))[1]

    def _label(self, tensor: Tensor, device: torch.device) -> None:
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being used again.
        self._devices[storage._cdata] = (StorageWeakRef(storage), CUDA if device.type == "cuda" else CPU)

    def _wait(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_filename == __file__
        ):
            frame = frame.f_back
        self.waits.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def _move(self, tensor: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        moved = tensor.to(dtype or tensor.dtype, copy=True)
        self._label(moved, device)
        if not non_blocking:
            self._wait()
        return moved

    def dispatched(self, operation: Any, arguments: tuple, options: dict[str, Any]) -> Any:
        """What an operation of torch does, in a forward or a backward."""
        packet = operation.overloadpacket
        tensors = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        devices = [self.device_of(tensor) for tensor in tensors]
        if CUDA in devices:
            indices = [index for index in tree_leaves(arguments[1]) if index is not None] if packet in INDEXING else []
            strangers = [
                tensor
                for tensor, device in zip(tensors, devices, strict=True)
                if device == CPU and tensor.dim() > 0 and not any(tensor is index for index in indices)
            ]
            if strangers and packet not in COPIES:
                raise MixedDevices(f"{operation} has tensors on {[str(device) for device in devices]}")
            if packet in WAITING or strangers or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self._wait()
        device = CUDA if CUDA in devices else CPU
        if not tensors:
            device = self._wanted or CPU
        result = operation(*arguments, **options)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not any(tensor is argument for argument in tensors):
                self._label(tensor, device)
        return result

    def called(self, function: Callable, arguments: tuple, options: dict[str, Any]) -> Any:
        """What a function or method of torch does where Python calls it."""
        name = getattr(function, "__name__", "")
        if function == Tensor.device.__get__:
            return self.device_of(arguments[0])
        if function == Tensor.is_cuda.__get__:
            return self.device_of(arguments[0]) == CUDA
        if function is Tensor.numpy and self.device_of(arguments[0]) == CUDA:
            raise MixedDevices("numpy() of a tensor on cuda:0")
        if function is Tensor.tolist and self.device_of(arguments[0]) == CUDA:
            arguments = (self._move(arguments[0].detach(), CPU, None, non_blocking=False),)
        if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._converted(name, arguments, options)
        wanted = options.pop("device", None)
        if wanted is None:
            return function(*arguments, **options)
        with mock.patch.object(self, "_wanted", torch.device(wanted)):
            result = function(*arguments, **options)
        if isinstance(result, Tensor):
            if function in (torch.tensor, torch.as_tensor) and torch.device(wanted).type == "cuda":
                self._wait()  # a copy of the host's memory
            self._label(result, torch.device(wanted))
        return result

    def _converted(self, name: str, arguments: tuple, options: dict[str, Any]) -> Tensor:
        """`to`, `cpu` or `cuda` of a tensor."""
        tensor, *rest = arguments
        here, copy, non_blocking = (
            self.device_of(tensor),
            options.pop("copy", False),
            options.get("non_blocking", False),
        )
        device, dtype = torch.device(name) if name != "to" else None, None
        if name == "to" and rest and isinstance(rest[0], Tensor):
            device, dtype = self.device_of(rest[0]), rest[0].dtype
        elif name == "to":
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **options)
        if device is not None and device.type != here.type:
            return self._move(tensor, device, dtype, non_blocking)
        return tensor.to(dtype or tensor.dtype, copy=copy)
