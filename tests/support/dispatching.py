"""What operations of torch take: how many there are, and the memory of their results."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Counts operations, but for views, which launch nothing; and the bytes of the storages made that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += not any(of.alias_info and not of.alias_info.is_write for of in func._schema.returns)
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
