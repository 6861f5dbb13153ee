# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Usual values of a mini-batch, on all ranks: medians over its tokens, and how often rules hold for ordinary ones."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..fsdp import collectives
from ..measure.micro_batch import MicroBatch, MicroBatchName, movable
from ..sources import APART, HOLDS, Facts, Medians, is_apart
from .token_facts import token_facts

_CPU = torch.device("cpu")
_WITH_MEDIANS = ("advantage", "weight")
# The sources that are known of many tokens: norms by layer are not.
_OF_MANY: Mapping[str, Callable[[Facts, Medians], Any]] = {
    **{name: holds for name, holds in HOLDS.items() if name != "layer"},
    APART: lambda facts, _: is_apart(facts.get("rollout_log_prob"), facts.get("old_log_prob")),
}
# Rules that hold for all tokens of a response or none.
_OF_RESPONSES = ("advantage", "sequence", "misaligned")
# (index of the micro-batch in its rank's mini-batch, row in it, position in the response).
Place = tuple[int, int, int]


def ordinary_counts(
    micro_batches: Sequence[MicroBatch], culprits: Collection[Place], medians: Medians, scale: float = 1.0
) -> Tensor:
    """For how many of this rank's ordinary tokens each rule holds, for `ordinary_shares`.

    Ordinary tokens are the response tokens that can move, have an advantage, and are no culprits. Of a token without
    one, the KL loss or the entropy bonus makes all of the gradient. What a whole response has is compared with other
    responses.

    Args:
        culprits (Collection): This rank's, too.
        medians (Mapping): What `token_medians` returned, with or without `least_advantage`.
        scale (float): The loss scale.

    Returns:
        Tensor: float64, (2, rules): how many are compared, and for how many each of `_OF_MANY` does; NaN where unknown.
    """
    counts, unknown = torch.zeros(2, len(_OF_MANY), dtype=torch.float64), torch.tensor(math.nan, dtype=torch.float64)
    for index, micro_batch in enumerate(micro_batches):
        # The numbers from which a culprit's facts are made.
        tokens = micro_batch.portable(scale, inputs=False).tokens
        ordinary = tokens["response_mask"].bool() & movable(tokens)
        if "advantage" in tokens:
            ordinary &= tokens["advantage"] != 0
        others = ordinary.clone()
        for at, row, position in culprits:
            if at == index:
                ordinary[row, position], others[row] = False, False
        facts = {**token_facts(tokens), "grad_norm": torch.where(tokens["broken"].bool(), math.nan, 1.0)}
        for i, (name, holds) in enumerate(_OF_MANY.items()):
            compared, holding = others if name in _OF_RESPONSES else ordinary, holds(facts, medians)
            counts[0, i] += compared.sum()
            counts[1, i] += unknown if holding is None else (compared & holding).sum()
    return counts


def ordinary_shares(by_rank: Sequence[Tensor]) -> dict[str, float | None]:
    """The share of ordinary tokens for which each of `HOLDS` does, by the `ordinary_counts` of all ranks' data.

    Gradients of single tokens are known for those that the search measured only, which are not a fair sample. So two
    rules differ:

    - `nonfinite` counts the tokens whose log-prob or coefficient is not finite: a lower bound, because a NaN that only
      the backward pass makes is not seen.
    - `layer` is not known.

    Returns:
        dict: By rule, and for `APART`; None where it is not known, or where no token is ordinary.
    """
    known = zip(_OF_MANY, *torch.stack([*by_rank]).sum(0).tolist(), strict=True)
    found = {name: count / total for name, total, count in known if total and not math.isnan(count)}
    return {name: found.get(name) for name in (*HOLDS, APART)}


def largest_tokens(values: Mapping[MicroBatchName, Tensor], most: int) -> list[tuple[MicroBatchName, int, int]]:
    """The micro-batch, row and position of the tokens with the largest values, largest first.

    Args:
        values (Mapping): Of shape (rows, response length). NaN counts as infinite, and −Inf is that of no token.
    """
    found: list[tuple[float, MicroBatchName, int, int]] = []
    for name, of_tokens in values.items():
        sizes = of_tokens.double().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).flatten()
        largest = zip(*(each.tolist() for each in sizes.topk(min(most, len(sizes)))), strict=True)
        found += [(size, name, *divmod(place, of_tokens.shape[1])) for size, place in largest]
    found.sort(key=lambda each: -each[0])
    return [(name, row, position) for size, name, row, position in found[:most] if size > -math.inf]


def token_medians(
    micro_batches: Sequence[MicroBatch],
    device: torch.device = _CPU,
    sequence_parallel_size: int = 1,
) -> dict[str, float | None]:
    """Medians over the response tokens of a mini-batch, the same on every rank. A collective call.

    They are exact, and no rank sends its values: of these, the ranks count the bytes, from the highest one on, among
    those that begin as the median does. Zeros, and values that are not finite, are left out.

    Args:
        micro_batches (Sequence[MicroBatch]): This rank's.
        device (torch.device): For the collective calls.
        sequence_parallel_size (int): How many neighbouring ranks have the same tokens.

    Returns:
        dict: `median_advantage`, of |A|, and `median_weight`, of |w|; None without such tokens.

    Raises:
        RankFailedError: A rank could not count its tokens.
    """
    # The bits of positive floats are in the order of the floats.
    bits: list[Tensor] = []
    with collectives.raised_on_all_ranks(device):
        is_counted = collectives.rank() % sequence_parallel_size == 0
        bits += [_values(micro_batches if is_counted else (), name).view(torch.int64) for name in _WITH_MEDIANS]
    # For each, the lower and the upper of the two in the middle: the highest bytes, and its place among the values
    # that begin with them.
    begun = torch.zeros(len(bits), 2, dtype=torch.int64)
    place: Tensor | None = None
    for shift in range(56, -1, -8):
        counts = collectives.sum_counts(partial(_next_bytes, bits, begun, shift), device)
        reached = counts.cumsum(-1)
        if place is None:
            totals = reached[:, 0, -1].tolist()
            place = torch.tensor([[max(total - 1, 0) // 2, total // 2] for total in totals])
        byte = torch.searchsorted(reached, place.unsqueeze(-1), right=True).clamp(max=255)
        place = place - (reached - counts).gather(-1, byte)[..., 0]
        begun = begun * 256 + byte[..., 0]
    medians = begun.view(torch.float64).mean(1).tolist()
    return {
        f"median_{name}": median if total else None
        for name, median, total in zip(_WITH_MEDIANS, medians, totals, strict=True)
    }


def _values(micro_batches: Sequence[MicroBatch], name: str) -> Tensor:
    """The absolute values, without zeros and those that are not finite, float64."""
    found = [
        micro_batch.tokens[name][micro_batch.tokens["response_mask"].bool()].abs()
        for micro_batch in micro_batches
        if name in micro_batch.tokens
    ]
    values = torch.cat(found).double().cpu() if found else torch.zeros(0, dtype=torch.float64)
    return values[values.isfinite() & (values != 0)]


def _next_bytes(bits: Sequence[Tensor], begun: Tensor, shift: int) -> Tensor:
    """How often each byte is the next one of values that begin with `begun`, of shape (*begun.shape, 256)."""
    tops = [each >> shift for each in bits]
    return torch.stack(
        [
            torch.stack([(top[top >> 8 == start] & 255).bincount(minlength=256) for start in starts])
            for top, starts in zip(tops, begun, strict=True)
        ]
    )
