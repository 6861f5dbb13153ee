# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of a micro-batch's tokens that others are made of: turns, the policy before the update, moved log-probs.

Tensors are of shape (rows, response length), the responses' mask is bool. Nothing here waits for the device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..facts import SHIFTS
from ..levels import LEAST_LOG_PROB, LEAST_NATS, MOVED, ROW_TOKENS

# A mismatch from one of a turn's first tokens on begins with the turn: the first may agree by chance.
TURN_START = 3


def policy_before(tokens: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    """The policy's log-probs before the update, and whether verl's bypass mode took the rollout's for the old ones.

    The old ones; in bypass mode, those of the update's forward, which has the old weights in its first mini-batch.

    Returns:
        tuple[Tensor, Tensor]: The log-probs; bool of shape ().
    """
    now, rollout = tokens["log_prob"], tokens.get("rollout_log_prob")
    old = tokens.get("old_log_prob", now)
    if rollout is None or "old_log_prob" not in tokens:
        return old, mask.new_zeros(())
    bypassed = ~(mask & (old != rollout)).any()
    return torch.where(bypassed, now, old), bypassed


def misplaced(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Responses whose log-probs belong to other tokens: those of the rollout or the reference, against the policy's.

    Returns:
        tuple[Tensor, Tensor]: Of shape (rows, 1): bool; int64, by how many positions, or 0.
    """
    mask = tokens["response_mask"].bool()
    policy, _ = policy_before(tokens, mask)
    shift = torch.zeros((len(mask), 1), dtype=torch.int64, device=mask.device)
    for name in ("rollout_log_prob", "ref_log_prob"):
        if name in tokens:
            shift = torch.where(shift == 0, _shift(tokens[name], policy, mask), shift)
    return shift != 0, shift


def _shift(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """k of shape (rows, 1), where a[t] goes with b[t + k] much better than with b[t]; else 0."""
    known = mask & a.isfinite() & b.isfinite() & ~((a == 0) & (b < -LEAST_NATS))
    count = known.sum(1, keepdim=True)
    a, b = (torch.where(known, each, 0.0).clamp(min=LEAST_LOG_PROB).double() for each in (a, b))
    a, b = (torch.where(known, each - each.sum(1, keepdim=True) / count, 0.0) for each in (a, b))
    norm = (a.square().sum(1) * b.square().sum(1)).sqrt()
    moved = [a[:, :-k] * b[:, k:] if k > 0 else a[:, -k:] * b[:, :k] for k in SHIFTS]
    best, which = (torch.stack([each.sum(1) for each in moved], 1) / norm.unsqueeze(1)).max(1)
    is_moved = (count[:, 0] >= ROW_TOKENS) & (best > (a * b).sum(1) / norm + MOVED)
    shifts = sum((which == i) * k for i, k in enumerate(SHIFTS))
    return torch.where(is_moved, shifts, 0).unsqueeze(1)


def find_turns(response_mask: Tensor) -> Tensor:
    """The turn of each token, from 1, int64; 0 where response_mask is 0.

    A turn is a run of tokens with response_mask 1. Between turns, tool output or a user's message has response_mask 0.
    """
    mask = response_mask.bool()
    return torch.where(mask, turn_starts(mask).cumsum(1), 0)


def turn_starts(mask: Tensor) -> Tensor:
    """The first token of each turn, bool of the mask's shape."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def starts_turn(turn: Tensor, start: Tensor) -> Tensor:
    """Whether a position is one of the first tokens of a turn after the first, bool of start's shape (rows, 1)."""
    here = turn.gather(1, start)
    before = turn.gather(1, (start - TURN_START).clamp(min=0))
    return (here > 1) & (before != here)


def from_there_on(values: Tensor) -> Tensor:
    """The sum from each position to the end."""
    return values.flip(1).cumsum(1).flip(1)
