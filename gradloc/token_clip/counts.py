# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is counted of a mini-batch's backward signals."""

import torch
from torch import Tensor

from ..fsdp import collectives
from .watched_pass import Over, WatchedPass


class Counts:
    """What is counted of a mini-batch on this rank, on the device; float64 of shape (boundaries,) where not said.

    Attributes:
        largest (Tensor): The largest finite signal.
        over (Tensor): How many signals were over the bound.
        cut (Tensor): How many of these were cut.
        refused (Tensor): In how many passes none was cut because there were too many.
        tokens (Tensor): How many tokens have a weight in the loss, shape (1,).
    """

    def __init__(self, boundaries: int, device: torch.device) -> None:
        zeros = torch.zeros(4, boundaries, dtype=torch.float64, device=device)
        self.largest, self.over, self.cut, self.refused = zeros.unbind()
        self.tokens = torch.zeros(1, dtype=torch.float64, device=device)

    def gather(self) -> tuple[Tensor, ...]:
        """The five of every rank, stacked, on the CPU. A collective call."""
        own = (self.largest, self.over, self.cut, self.refused, self.tokens)
        gathered = torch.stack(collectives.gather(torch.cat(own)))
        return gathered.split([len(values) for values in own], dim=1)

    @torch.no_grad()
    def take_in(self, current: WatchedPass, boundaries: list[str], bounds_of: Tensor) -> None:
        """Counts a pass's signals, of which it keeps only where they are over their bounds. No host sync.

        Args:
            current (WatchedPass): The pass, after its backward.
            boundaries (list[str]): In the order of the forward; the log-probs are the last.
            bounds_of (Tensor): Their bounds, shape (boundaries,).
        """
        signals = current.signals
        current.forget()
        if current.tokens:
            self.tokens += (current.tokens["weight"] != 0).sum()
        last = len(boundaries) - 1
        for here in (slice(last, None), slice(0, last)):
            names = boundaries[here]
            seen = next((signals[name] for name in names if name in signals), None)
            if seen is None or not seen.numel():
                continue
            none, no = torch.zeros_like(seen), torch.zeros((), dtype=torch.bool, device=seen.device)
            uncut = torch.stack([current.refused.get(name, ~no) for name in names])
            by_boundary = torch.stack([signals.get(name, none) for name in names]).flatten(1)
            bounds = bounds_of[here].unsqueeze(1)
            over = current.is_over(by_boundary, bounds)
            self.over[here] += over.sum(1)
            largest = torch.where(by_boundary.isfinite(), by_boundary, 0.0).amax(1)
            self.largest[here] = torch.maximum(self.largest[here], largest)
            self.refused[here] += torch.stack([current.refused.get(name, no) for name in names])
            # The first on the way back from the loss is the last in the order of the forward.
            first = over.flip(0).to(torch.uint8).argmax(0, keepdim=True)
            multiple = (by_boundary / bounds).flip(0).gather(0, first)[0]
            first = torch.where(over.any(0), first[0], -1).to(torch.int16)
            cut = (over & ~uncut.unsqueeze(1)).any(0)
            current.over.append(Over(names[::-1], *(values.view(seen.shape) for values in (first, multiple, cut))))
