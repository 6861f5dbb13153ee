# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Memory after a pass that ran out of it."""

import gc
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

_Made = TypeVar("_Made")

# How often an allocation is tried, and for how many seconds other threads may run in between: autograd's threads let go
# of a failed pass's tensors only when they get the interpreter lock.
_ATTEMPTS = 5
_PAUSE = 0.05


def release_frames(error: BaseException) -> None:
    """Clears the local variables of all frames that an error, or an error behind it, came through.

    They hold the tensors of the pass. An error that was raised while another was handled, or from another, holds that
    one's frames, too.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [found.__context__, found.__cause__]


def release_unused() -> None:
    """Frees objects that only cycles of references hold, and the memory that the allocator keeps for later."""
    gc.collect()
    for name in ("cuda", "npu", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_available() and device.is_initialized():
            device.empty_cache()


def allocate(make: Callable[[], _Made]) -> _Made:
    """What `make` returns, which only allocates; after an error it is tried again a few times.

    Raises:
        RuntimeError: Of the last attempt.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return make()
        except RuntimeError as error:  # out of memory: each kind of device has its own type
            release_frames(error)
        release_unused()
        time.sleep(_PAUSE)
    return make()
