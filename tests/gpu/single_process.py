"""The process group of one process, and computing that can be repeated bit for bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from verl.utils import torch_functional

DEVICE = torch.device(os.environ.get("GRADLOC_TEST_DEVICE", "cpu"))


@contextlib.contextmanager
def group(repeatable: bool = True) -> Iterator[None]:
    """The group that verl's worker makes.

    Args:
        repeatable (bool): Without kernels that add up in an order that changes from run to run. No two runs could be
            compared bit for bit with them.
    """
    if repeatable:
        # Of the operations without such a kernel, cumsum for one adds up whole numbers here.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # as in training
        # Its backward overwrites what a second backward through the same graph needs, and brute force runs many.
        torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False
    backend = "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
