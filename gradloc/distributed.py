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
"""The few collective operations of the search, and how ranks agree that one of them has failed."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# How long a rank whose probe failed waits for the others to fail likewise before it gives the run up: far more than
# ranks differ by in one pass, far less than the time-out of a collective call.
PATIENCE_SECONDS = 60.0


class RankLostError(RuntimeError):
    """A probe broke off on this rank in the middle of FSDP's collective calls, and other ranks wait inside them."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(values: Tensor) -> list[Tensor]:
    """Every rank's tensor of the same shape, in rank order, on the CPU."""
    if world_size() == 1:
        return [values.cpu()]
    out = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(out, values)
    return list(torch.stack(out).cpu())


def gather_objects(value: Any) -> list[Any]:
    """Every rank's (picklable) value, in rank order."""
    if world_size() == 1:
        return [value]
    out: list[Any] = [None] * world_size()
    dist.all_gather_object(out, value)
    return out


def broadcast(make: Any, source: int) -> Any:
    """`make()` as evaluated on rank `source`, on every rank.

    Raises:
        RuntimeError: `make()` raised on the source; raised on every rank alike.
    """
    box: list[Any] = [None]
    if rank() == source:
        try:
            box = [(make(), None)]
        except Exception as error:  # relayed: the others wait for this broadcast
            box = [(None, f"{type(error).__name__}: {error}")]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=source)
    value, error = box[0]
    if error is not None:
        raise RuntimeError(f"rank {source} could not share a micro-batch: {error}")
    return value


class FailureNotice:
    """Tells a rank whose probe failed inside the model whether all others failed with it.

    Then, and only then, no rank is left waiting in one of FSDP's collective calls, and the ranks can go on together.
    The notice goes through the process group's key-value store, which needs no matching calls.
    """

    def __init__(self) -> None:
        self._round = 0

    def next_round(self) -> None:
        """Called by every rank before every pass."""
        self._round += 1

    def failed(self, error: Exception) -> None:
        """Returns once every rank has failed.

        Raises:
            RankLostError: Some rank has not failed within `PATIENCE_SECONDS`.
        """
        if world_size() == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        key = f"gradloc/failed/{self._round}"
        deadline = time.monotonic() + PATIENCE_SECONDS
        store.add(key, 1)
        while store.add(key, 0) < world_size():
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"a probe of the gradient search failed on rank {rank()} but not on all ranks, "
                    f"so they cannot go on together: {type(error).__name__}: {error}"
                ) from error
            time.sleep(0.05)
