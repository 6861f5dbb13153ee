# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Keeping a rank whose pass broke off in step with the others."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

# Everything that a forward or backward pass may call; older torch versions lack some.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


class RankLostError(RuntimeError):
    """A probe broke off on this rank, and it could not keep up with the collective calls of the others."""


@dataclass(frozen=True)
class _Blank:
    """Stands for a tensor of a recorded call."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def fill(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Call:
    function: Callable
    arguments: Any

    def repeat(self) -> None:
        """The same call with zeros for data."""
        args, kwargs = tree_map_only(_Blank, _Blank.fill, self.arguments)
        work = self.function(*args, **kwargs)
        if work is not None:
            work.wait()


class CollectiveReplay:
    """Lets a rank make the collective calls that an error kept it from.

    FSDP gathers parameters and reduces gradients in the course of a pass, in an order that is the same on all ranks
    and in all passes. When a pass breaks off on one rank (out of memory, an error of the model), the others wait in the
    next of these calls. This rank then makes the rest of them, as recorded in an earlier pass, with zeros for data: all
    ranks come to the end of the pass, where they can agree that it is worthless.

    Args:
        can_repeat (bool): Whether the calls of all passes are alike. With sequence parallelism they are not: shapes
            follow the data, and a rank whose pass breaks off is lost.
    """

    def __init__(self, can_repeat: bool = True) -> None:
        self._can_repeat = can_repeat
        self._pattern: list[_Call] | None = None
        self._whole = False
        self._calls: list[_Call] = []
        self._inside = False
        self._originals: dict[str, Callable] = {}

    @property
    def has_pattern(self) -> bool:
        """Whether a pass has been recorded."""
        return self._pattern is not None

    @property
    def knows_all(self) -> bool:
        """Whether what is recorded is good for all passes to come, and needed at all."""
        return self._whole or not self._can_repeat

    def forget(self) -> None:
        """Drops the pattern."""
        self._pattern = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around one pass; one that ends well is the pattern for those to come."""
        self.start()
        try:
            yield
        except BaseException:
            self._restore()
            raise
        self.stop()

    def start(self) -> None:
        """Begins to record a pass."""
        self._calls = []
        if not self._originals:
            self._originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
            for name, function in self._originals.items():
                setattr(dist, name, self._noting(function))

    def stop(self, whole: Callable[[], bool] = lambda: True) -> None:
        """Ends a recording, if there is one under way, and keeps it as the pattern.

        Args:
            whole (Callable): Whether the pass has made all calls that a pass can make. Asked only if it was recorded.
        """
        if self._originals:
            self._restore()
            self._pattern, self._whole = self._calls, whole()

    def _restore(self) -> None:
        for name, function in self._originals.items():
            setattr(dist, name, function)
        self._originals = {}

    def catch_up(self, error: Exception) -> None:
        """Makes the calls that are left of the pass that `error` broke off.

        Raises:
            RankLostError: They are not known, or one of them failed, too (another rank is gone).
        """
        traceback.clear_frames(error.__traceback__)  # they hold the pass's memory
        done = len(self._calls)
        try:
            if not self._can_repeat:
                raise RuntimeError("with sequence parallelism the calls of one pass do not fit another")
            if self._pattern is None or done > len(self._pattern):
                raise RuntimeError("no pass with these collective calls was recorded before")
            for call in self._pattern[done:]:
                call.repeat()
        except Exception as failure:
            raise RankLostError(
                f"a pass of the gradient search failed on this rank ({type(error).__name__}: {error}), and it cannot "
                f"keep up with the other ranks: {type(failure).__name__}: {failure}"
            ) from error

    def _noting(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one of these functions in terms of another
                return function(*args, **kwargs)
            blank = tree_map_only(Tensor, lambda t: _Blank(t.shape, t.dtype, t.device), (args, kwargs))
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            self._calls.append(_Call(function, blank))
            return result

        return call
