# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""One process as rank 0 of several: what a rank costs, where there is one GPU."""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gradloc.fsdp import collectives, failed_pass


@contextmanager
def rank_0_of(ranks: int) -> Iterator[None]:
    """Torch's `fake` process group, in which GradLoc takes itself for a single rank.

    Shards, streams, memory and computing are those of a real rank. Communication takes no time, and what the other
    ranks would send is a copy, so GradLoc must not ask them for anything.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for module in (collectives, failed_pass):
            stack.enter_context(mock.patch.object(module, "world_size", lambda: 1))
        own = torch.full((1,), math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it, too
            dist.reduce_scatter_tensor(own, torch.arange(float(ranks)))
        if own.isnan():  # before torch 2.13 it leaves the gradient what memory happens to hold
            stack.enter_context(mock.patch.object(dist, "reduce_scatter_tensor", _reduce_scatter))
        yield


def _reduce_scatter(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    """What rank 0 gets if the others have zeros."""
    output.copy_(input.view(-1)[: output.numel()].view_as(output))
