# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in single mini-batches of a training run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The highest exponent bit of a float32: 0 in every weight under 2, and flipping it multiplies the weight by 2^128.
EXPONENT_BIT = 1 << 30


@dataclass
class MiniBatch:
    """A mini-batch before its update; a fault changes its tensors in place. All have shape (rows, response width).

    Args:
        responses (Tensor): Token ids. The last column is empty: only a fault uses it.
        mask (Tensor): 1.0 for the tokens of the response.
        old_log_probs (Tensor): The rollout's.
        advantages (Tensor): 0 outside of the mask.
    """

    responses: Tensor
    mask: Tensor
    old_log_probs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class Policy:
    """What a fault may use of the policy.

    Args:
        model (nn.Module): In training.
        log_probs (Callable): The current log-probs of a mini-batch's responses, shape (rows, response width).
        stale_log_probs (Callable): The same by the weights of some steps before.
        end (int): The token that ends a response.
    """

    model: nn.Module
    log_probs: Callable[[], Tensor]
    stale_log_probs: Callable[[], Tensor]
    end: int


# Plants the fault, or returns None where the mini-batch has no place for it. Otherwise returns what it did in words,
# and what undoes it after the update.
Fault = Callable[[MiniBatch, Policy, random.Random], "tuple[str, Callable[[], None]] | None"]


def _nothing() -> None:
    pass


def _sequence(factor: float) -> Fault:
    def plant(batch: MiniBatch, _policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
        rows = batch.advantages.any(1).nonzero().flatten().tolist()
        if not rows:
            return None
        row = chance.choice(rows)
        batch.advantages[row] *= factor
        return f"row {row}", _nothing

    return plant


def _token(factor: float) -> Fault:
    def plant(batch: MiniBatch, _policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
        # A token that the policy is sure of has hardly a gradient, whatever its advantage.
        places = ((batch.advantages != 0) & (batch.old_log_probs < -0.7)).nonzero().tolist()
        if not places:
            return None
        row, position = chance.choice(places)
        batch.advantages[row, position] *= factor
        return f"row {row}, position {position}, p = {batch.old_log_probs[row, position].exp():.2g}", _nothing

    return plant


def _end(batch: MiniBatch, policy: Policy, _chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    cut = (batch.mask[:, -2] == 1) & (batch.responses[:, -2] != policy.end) & batch.advantages.any(1)
    if not cut.any():
        return None
    batch.responses[cut, -1] = policy.end
    batch.mask[cut, -1] = 1.0
    batch.advantages[cut, -1] = batch.advantages[cut, -2]
    batch.old_log_probs[cut, -1] = policy.log_probs()[cut, -1]
    likeliest = batch.old_log_probs[cut, -1].max().exp()
    return f"{int(cut.sum())} answers, p up to {likeliest:.2g}", _nothing


def _bit(batch: MiniBatch, policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    if not batch.advantages.any():
        return None
    matrices = [(n, p) for n, p in policy.model.named_parameters() if ".layers." in n and p.dim() == 2]
    name, parameter = chance.choice(matrices)
    weights = parameter.detach().view(-1)
    place = chance.randrange(len(weights))
    before = weights[place].clone()
    bits = weights[place : place + 1].view(torch.int32)
    bits ^= EXPONENT_BIT

    def undo() -> None:
        weights[place] = before

    return f"{name}[{place}], {float(before):.3g} to {float(weights[place]):.3g}", undo


def _nan(batch: MiniBatch, _policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    row, position = chance.choice(batch.mask.nonzero().tolist())
    batch.advantages[row, position] = torch.nan
    return f"row {row}, position {position}", _nothing


def _stale(batch: MiniBatch, policy: Policy, _chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    return _replace_log_probs(batch, policy.stale_log_probs())


def _shifted(batch: MiniBatch, _policy: Policy, _chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    return _replace_log_probs(batch, batch.old_log_probs.roll(1, 1))


def _replace_log_probs(batch: MiniBatch, log_probs: Tensor) -> tuple[str, Callable[[], None]] | None:
    if not batch.advantages.any():
        return None
    logarithms = (batch.old_log_probs - log_probs)[batch.mask.bool()]
    batch.old_log_probs[batch.mask.bool()] = log_probs[batch.mask.bool()]
    return f"ratios from {logarithms.min().exp():.2g} to {logarithms.max().exp():.2g}", _nothing


FAULTS: dict[str, Fault] = {
    "sequence ×10": _sequence(10),
    "sequence ×100": _sequence(100),
    "token ×100": _token(100),
    "token ×1000": _token(1000),
    "end": _end,
    "bit": _bit,
    "nan": _nan,
    "stale": _stale,
    "shifted": _shifted,
}


def schedule(first: int, last: int, of_each: int, seed: int) -> list[tuple[int, str]]:
    """Which fault comes in which mini-batch, evenly spaced: rounds of all faults, each in an order of its own."""
    chance = random.Random(seed)
    names = [name for _ in range(of_each) for name in chance.sample(sorted(FAULTS), len(FAULTS))]
    return [(first + (last - first) * i // len(names), name) for i, name in enumerate(names)]
