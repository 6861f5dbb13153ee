# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the collective calls of a pass on a rank where an error interrupted it, so that no rank deadlocks."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..guarded import release_frames
from .collectives import RankLostError, gather, world_size
from .torch_compat import tree_leaves, tree_map_only

_Made = TypeVar("_Made")

# How often an allocation is tried, and for how many seconds other threads may run in between: autograd's threads let go
# of a failed pass's tensors only when they get the interpreter lock.
_ATTEMPTS = 5
_PAUSE = 0.05


def release_unused() -> None:
    """Frees objects that only cycles of references hold, and the memory that the allocator keeps for later."""
    gc.collect()
    for name in ("cuda", "npu", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_available() and device.is_initialized():
            device.empty_cache()


def allocate(make: Callable[[], _Made]) -> _Made:
    """What `make` returns, which only allocates; after an error it is tried again a few times."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return make()
        except RuntimeError as error:  # out of memory: each kind of device has its own type
            release_frames(error)
        release_unused()
        time.sleep(_PAUSE)
    return make()


# All collective functions that a forward or backward pass may call; older torch versions lack some of them.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_reduce", "all_to_all", "all_to_all_single", "broadcast"),
)
# A rank's announcement before each call of a rehearsal.
_CALLS, _HAS_ENDED, _HAS_FAILED = 1.0, 2.0, 3.0


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

    @property
    def signature(self) -> tuple[str, list[_TensorSpec]]:
        """The function's name and its tensors."""
        return self.function.__name__, [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, _TensorSpec)]

    def replay(self) -> None:
        """Repeats the call with dummy data (zeros)."""
        args, kwargs = allocate(lambda: tree_map_only(_TensorSpec, _TensorSpec.zeros, self.arguments))
        work = self.function(*args, **kwargs)
        if work is not None:
            work.wait()


class RecordedCollectives:
    """Records the collective calls of a pass, and replays them on a rank where an error interrupts a later pass.

    FSDP all-gathers parameters and reduce-scatters gradients during a pass, in the same order on all ranks and in all
    passes that begin with sharded parameters. If an error (such as out of memory) interrupts a pass on one rank, the
    other ranks wait in the next of these calls. To avoid a deadlock, the failed rank makes the remaining calls, as
    recorded in an earlier pass, with dummy data. So all ranks reach the end of the pass and discard it.

    Training passes are not recorded. One may begin with parameters that an earlier forward without gradients has left
    unsharded, and then it makes fewer calls than the passes of a search, each of which follows a backward.
    """

    def __init__(self, can_replay: bool = True) -> None:
        # Whether all passes make the same calls. With sequence parallelism they do not, because shapes depend on the
        # data; an error in a pass then aborts the run.
        self._can_replay = can_replay
        self._recorded_calls: list[_Call] | None = None
        self._calls: list[_Call] = []
        self._inside = False

    @property
    def needs_rehearsal(self) -> bool:
        """Whether the next pass is a rehearsal: its calls are unknown and can be found out."""
        return world_size() > 1 and self._can_replay and self._recorded_calls is None

    def forget(self) -> None:
        """Discards the recorded calls."""
        self._recorded_calls = None

    def run(self, make_pass: Callable[[], None], device: torch.device, gathers: bool) -> Exception | None:
        """Runs and records a pass, so that an error in it leaves no rank waiting. A collective call.

        In a rehearsal, all ranks say before each call that they are about to make it. If one of them has ended or
        failed, none does.

        Args:
            gathers (bool): Whether the pass has to gather parameters.

        Returns:
            Exception | None: This rank's error. If some rank has one in a rehearsal, the calls are still unknown on all
                ranks.

        Raises:
            RankLostError: See `complete`.
        """
        rehearses = self.needs_rehearsal
        stopped: set[float] = set()

        def say(what: float) -> None:
            if rehearses and not stopped:
                said = set(gather(torch.tensor([what], device=device)).flatten().tolist())
                stopped.update(said if said != {_CALLS} else ())
            if stopped and what == _CALLS:
                raise RuntimeError("the rehearsal has ended on another rank")

        error: Exception | None = None
        try:
            with self.recording(before_call=partial(say, _CALLS)):
                make_pass()
            if rehearses and gathers and not any(c.function.__name__.startswith("all_gather") for c in self._calls):
                raise RuntimeError(
                    "none of the collective calls that gather sharded parameters was seen, so after an error in a pass "
                    "the other ranks would wait for ever"
                )
        except Exception as caught:
            release_frames(caught)
            error = caught
        if not rehearses:
            if error is not None:
                self.complete(error)
            return error
        was_stopped = bool(stopped)
        say(_HAS_FAILED if error is not None else _HAS_ENDED)
        if stopped != {_HAS_ENDED}:
            self.forget()
            if _HAS_FAILED not in stopped:
                return RuntimeError("the ranks make different numbers of collective calls in a pass")
        return None if was_stopped else error

    @contextmanager
    def recording(self, before_call: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wraps one pass and records its calls, before each of which `before_call` may make others.

        They are kept if the pass raises no error.
        """
        self._calls = []
        originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
        for name, function in originals.items():
            setattr(dist, name, self._recorded(function, before_call))
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(dist, name, function)
        self._recorded_calls = self._calls

    def complete(self, error: Exception) -> None:
        """Makes the remaining calls of the pass that `error` interrupted.

        Raises:
            RankLostError: The remaining calls are unknown, or one of them failed as well (another rank has died).
        """
        if world_size() == 1:
            return
        release_unused()
        done = len(self._calls)
        try:
            if not self._can_replay:
                raise RuntimeError("with sequence parallelism, every pass makes other collective calls")
            # A call that does not match the other ranks' calls is worse than an abort.
            if self._recorded_calls is None or [call.signature for call in self._calls] != [
                call.signature for call in self._recorded_calls[:done]
            ]:
                raise RuntimeError("no earlier pass with these collective calls was recorded")
            for call in self._recorded_calls[done:]:
                call.replay()
        except Exception as failure:
            raise RankLostError(
                f"an extra pass of GradLoc failed on this rank ({type(error).__name__}: {error}), which cannot be "
                f"propagated to the other ranks: {type(failure).__name__}: {failure}"
            ) from error

    def _recorded(self, function: Callable, before_call: Callable[[], None]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # called by another of these functions
                return function(*args, **kwargs)
            specs = tree_map_only(Tensor, lambda t: _TensorSpec(t.shape, t.dtype, t.device), (args, kwargs))
            self._inside = True
            try:
                before_call()
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            self._calls.append(_Call(function, specs))
            return result

        return call
