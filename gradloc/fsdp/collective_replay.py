# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the collective calls of a pass on a rank where an error interrupted it, so that no rank deadlocks."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

# All collective functions that a forward or backward pass may call; older torch versions lack some of them.
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
    """An error on this rank that cannot be propagated: it aborts the run, because the other ranks would deadlock."""


@dataclass(frozen=True)
class _TensorSpec:
    """The shape, dtype and device of a tensor in a recorded call."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Call:
    function: Callable
    arguments: Any

    def replay(self) -> None:
        """Repeats the call with dummy data (zeros)."""
        args, kwargs = tree_map_only(_TensorSpec, _TensorSpec.zeros, self.arguments)
        work = self.function(*args, **kwargs)
        if work is not None:
            work.wait()


class CollectiveReplay:
    """Records the collective calls of a pass, and replays them on a rank where an error interrupts a later pass.

    FSDP all-gathers parameters and reduce-scatters gradients during a pass, in the same order on all ranks and in all
    passes. If an error (such as out of memory) interrupts a pass on one rank, the other ranks wait in the next of these
    calls. To avoid a deadlock, the failed rank makes the remaining calls, as recorded in an earlier pass, with dummy
    data. So all ranks reach the end of the pass and discard it.

    Args:
        can_replay (bool): Whether all passes make the same calls. With sequence parallelism they do not, because shapes
            depend on the data; an error in a pass then aborts the run.
    """

    def __init__(self, can_replay: bool = True) -> None:
        self._can_replay = can_replay
        self._recorded_calls: list[_Call] | None = None
        self._whole = False
        self._calls: list[_Call] = []
        self._inside = False
        self._originals: dict[str, Callable] = {}

    @property
    def has_recording(self) -> bool:
        """Whether a pass has been recorded."""
        return self._recorded_calls is not None

    @property
    def knows_all(self) -> bool:
        """Whether the recorded calls match every later pass, or no recording is needed."""
        return self._whole or not self._can_replay

    def forget(self) -> None:
        """Discards the recorded calls."""
        self._recorded_calls = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wraps one pass and records its calls; they are kept if the pass raises no error."""
        self.start()
        try:
            yield
        except BaseException:
            self._restore()
            raise
        self.stop()

    def start(self) -> None:
        """Starts recording a pass."""
        self._calls = []
        if not self._originals:
            self._originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
            for name, function in self._originals.items():
                setattr(dist, name, self._recorded(function))

    def stop(self, whole: Callable[[], bool] = lambda: True) -> None:
        """Stops recording and keeps the calls; does nothing if no recording is running.

        Args:
            whole (Callable): Returns whether the pass has made all calls that a pass can make. Called only if the pass
                was recorded.
        """
        if self._originals:
            self._restore()
            self._recorded_calls, self._whole = self._calls, whole()

    def _restore(self) -> None:
        for name, function in self._originals.items():
            setattr(dist, name, function)
        self._originals = {}

    def complete(self, error: Exception) -> None:
        """Makes the remaining calls of the pass that `error` interrupted.

        Raises:
            RankLostError: The remaining calls are unknown, or one of them failed as well (another rank has died).
        """
        traceback.clear_frames(error.__traceback__)  # frees the memory that the frames of the pass hold
        done = len(self._calls)
        try:
            if not self._can_replay:
                raise RuntimeError("with sequence parallelism, every pass makes other collective calls")
            if self._recorded_calls is None or done > len(self._recorded_calls):
                raise RuntimeError("no earlier pass with these collective calls was recorded")
            for call in self._recorded_calls[done:]:
                call.replay()
        except Exception as failure:
            raise RankLostError(
                f"a pass of the gradient search failed on this rank ({type(error).__name__}: {error}), which cannot be "
                f"propagated to the other ranks: {type(failure).__name__}: {failure}"
            ) from error

    def _recorded(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # called by another of these functions
                return function(*args, **kwargs)
            specs = tree_map_only(Tensor, lambda t: _TensorSpec(t.shape, t.dtype, t.device), (args, kwargs))
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            self._calls.append(_Call(function, specs))
            return result

        return call
