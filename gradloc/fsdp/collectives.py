# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The collective operations of the search; an error on one rank is raised on every rank."""

import logging
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)


class RankFailedError(RuntimeError):
    """An error on one rank, raised on every rank with the same message."""


class RankLostError(RuntimeError):
    """An error on this rank that cannot be propagated: it aborts the run, because the other ranks would deadlock."""


@contextmanager
def guarded_on_all_ranks(what: str) -> Iterator[None]:
    """Around a diagnostic that makes collective calls: an error that all ranks have met is a warning.

    `what` is what the error leaves undone, a sentence.

    Raises:
        RankLostError: Instead of an error on this rank alone, for which the other ranks may wait.
    """
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        if world_size() > 1 and not isinstance(error, RankFailedError):
            raise RankLostError(
                f"{what}: an error on this rank ({type(error).__name__}: {error}) cannot be propagated to the others"
            ) from error
        logger.warning("%s; training continues", what, exc_info=True)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(values: Tensor) -> Tensor:
    """Every rank's tensor of the same shape, stacked in rank order, on the CPU."""
    return _gathered(values).cpu()


def gather_of_first(values: Tensor, count: int) -> Tensor:
    """`gather` of the first `count` ranks, of which there may be far more: what is received does not grow with them.

    An all-reduce, in which each adds to zeros, so that all ranks have the same bits.
    """
    if world_size() < 2 * count:
        return gather(values)[:count]
    out = values.new_zeros(count, *values.shape)
    if rank() < count:
        out[rank()] = values
    dist.all_reduce(out)
    return out.cpu()


def _gathered(values: Tensor) -> Tensor:
    if world_size() == 1:
        return values.unsqueeze(0)
    out = values.new_empty(world_size() * values.numel())
    # The older name, which newer torch warns of, is that of torch before 2.13.
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather_single(out, values.contiguous().view(-1))
    return out.view(world_size(), *values.shape)


def total(values: Tensor) -> Tensor:
    """The sum of every rank's tensor of the same shape, without a host sync; all ranks have the same bits.

    An all-reduce does not promise the latter. Here each rank adds the same gathered numbers, one by one: rounding is
    then the same on any processor.
    """
    return added(_gathered(values))


def added(sums: Tensor) -> Tensor:
    """What `total` gives of every rank's tensor, stacked. No collective call."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = torch.cat([sums[:half] + sums[half : 2 * half], sums[2 * half :]])
    return sums[0]


def sum_counts(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """The sum of every rank's `make()`, int64 of the same shape, on the CPU. What is received is that of one rank.

    An all-reduce, because sums of integers are the same in any order.

    Raises:
        RankFailedError: `make()` raised on some rank.
    """
    with raised_on_all_ranks(device):
        counts = make().to(device)
    if world_size() > 1:
        dist.all_reduce(counts)
    return counts.cpu()


def gather_objects(value: Any) -> list[Any]:
    """Every rank's (picklable) value, in rank order."""
    if world_size() == 1:
        return [value]
    out: list[Any] = [None] * world_size()
    dist.all_gather_object(out, value)
    return out


def gather_on_first(value: Any) -> list[Any] | None:
    """On rank 0 every rank's (picklable) value, in rank order; None on the others, which receive none of them.

    Nothing is padded: a rank sends what it has.

    Raises:
        RankFailedError: A value could not be pickled, or rank 0 has no room for them.
    """
    if world_size() == 1:
        return [value]
    device = _object_device()
    with raised_on_all_ranks(device):
        own = torch.frombuffer(bytearray(zlib.compress(pickle.dumps(value), 1)), dtype=torch.uint8).to(device)
    sizes = gather(torch.tensor([len(own)], device=device))[:, 0].tolist()
    received = sizes if rank() == 0 else [0] * len(sizes)
    with raised_on_all_ranks(device):
        out = own.new_empty(sum(received))
    # Not a gather, which takes the same size from each.
    dist.all_to_all_single(out, own, received, [len(own), *[0] * (len(sizes) - 1)])
    found = None
    with raised_on_all_ranks(device):
        if rank() == 0:
            found = [pickle.loads(zlib.decompress(part.numpy())) for part in out.cpu().split(sizes)]
    return found


def _object_device() -> torch.device:
    """Where torch's own collective calls put objects: on the CPU if the default group has a backend for it."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


@contextmanager
def raised_on_all_ranks(device: torch.device) -> Iterator[None]:
    """Wraps code without collective calls; an error in it on one rank is raised on every rank. A collective call.

    Raises:
        RankFailedError: Instead of any other exception, with the same message.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # raised below, once all ranks know of it
        failure = error
    raise_on_all_ranks(failure, device)


def raise_on_all_ranks(failure: Exception | None, device: torch.device) -> None:
    """Raises an error on every rank if some rank has one. A collective call.

    Raises:
        RankFailedError: With the message of the first rank that has one.
    """
    if not gather(torch.tensor([float(failure is not None)], device=device)).any():
        return
    messages = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    raise RankFailedError(next(f"rank {rank}: {m}" for rank, m in enumerate(messages) if m is not None)) from failure


def exchange(make: Callable[[], Any]) -> list[Any]:
    """Calls `make()` on every rank and returns all results on every rank, in rank order.

    Raises:
        RankFailedError: `make()` raised on some rank.
    """
    results = gather_objects(_attempt(make))
    for rank, (_, failure) in enumerate(results):
        if failure is not None:
            raise RankFailedError(f"rank {rank}: {failure}")
    return [value for value, _ in results]


def broadcast(make: Callable[[], Any], sender: int) -> Any:
    """Calls `make()` on rank `sender` and returns the result on every rank.

    Raises:
        RankFailedError: `make()` raised on the sender.
    """
    box: list[Any] = [_attempt(make) if rank() == sender else None]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=sender)
    value, failure = box[0]
    if failure is not None:
        raise RankFailedError(f"rank {sender}: {failure}")
    return value


def _attempt(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `make` returns, and its error, which is sent to the other ranks: they wait for this one."""
    try:
        return make(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
