# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens over TokenClip's bounds, as plain values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..fsdp import collectives
from .watched_pass import LOG_PROBS, WatchedPass

# The maximum number of tokens that are described, those furthest over their bounds first.
MAX_TOKENS = 64


def own_tokens(passes: Sequence[WatchedPass], rank: int, part: int, factor: float) -> list[dict[str, Any]]:
    """A rank's tokens that are over a bound, each at the first such boundary on the way back from the loss.

    Each has `rank`, `micro_batch`, `row` (in its rank's mini-batch), `position` (in the response; negative in the
    prompt), `boundary`, `multiple` (its signal there over the usual one), `cut`, and the values that the pass has.

    Args:
        passes (Sequence[WatchedPass]): Those of a mini-batch.
        rank (int): The data-parallel rank.
        part (int): The rank's index in its group with Ulysses, whose ranks have the same log-probs.
        factor (float): A bound as a multiple of the usual signal.

    Returns:
        list[dict]: Of each micro-batch at most 2 × `MAX_TOKENS`, those furthest over their bounds.
    """
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for index, each in enumerate(passes):
        for over in each.over:
            at_log_probs = over.boundaries == [LOG_PROBS]
            if at_log_probs and part:
                continue  # the first rank of the group has the same
            first, multiple = over.first.flatten(), over.multiple.flatten()
            size = torch.where(first >= 0, multiple.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
            where = size.topk(min(MAX_TOKENS, len(size))).indices
            where = where[first[where] >= 0]
            rows, positions = each.positions.tokens_of(over.first.shape, at_log_probs)
            rows, positions = rows[where.cpu()], positions[where.cpu()]
            boundaries = [over.boundaries[i] for i in first[where].tolist()]
            values = _values(each.tokens, rows, positions)
            for row, position, boundary, times, of_token in zip(
                rows.tolist(), positions.tolist(), boundaries, multiple[where].tolist(), values, strict=True
            ):
                found.setdefault(
                    (index, row, position),
                    {
                        "rank": rank,
                        "micro_batch": index,
                        "row": each.rows[row],
                        "position": position,
                        "boundary": boundary,
                        "multiple": times * factor,
                        "cut": boundary in each.refused and not each.refused[boundary],
                        **of_token,
                    },
                )
        each.positions.forget()
    return list(found.values())


def outliers(each: WatchedPass, factor: float) -> Tensor:
    """How far the tokens of a pass that were left uncut are over their bounds.

    Only at the first boundary on the way back from the loss at which any is over: below it, an outlier's signal spreads
    to earlier positions through attention.

    Args:
        each (WatchedPass): The pass, after it.
        factor (float): A bound as a multiple of the usual signal.

    Returns:
        Tensor: The multiple of the usual largest signal, 0 where a token is not over its bound; on the CPU, of the
            shape (rows, response length) of the weights.
    """
    multiples = torch.zeros(each.tokens["weight"].shape)
    for over in each.over:
        first, values = over.first.flatten().cpu(), over.multiple.flatten().cpu()
        if not (first >= 0).any():
            continue
        boundary = int(first[first >= 0].min())
        if bool(each.refused.get(over.boundaries[boundary], True)):
            rows, positions = each.positions.tokens_of(over.first.shape, over.boundaries == [LOG_PROBS])
            found = (first == boundary) & (positions >= 0) & (positions < multiples.shape[1])
            multiples[rows[found], positions[found]] = factor * values[found]
        break
    return multiples


def cut_tokens(each: WatchedPass) -> Tensor:
    """The response tokens of a pass whose hidden states were cut.

    What is cut at the log-probs is not among them: a token's coefficient tells what was left there.

    Args:
        each (WatchedPass): The pass, after it.

    Returns:
        Tensor: On the CPU, bool of the shape (rows, response length) of the weights.
    """
    found = torch.zeros(each.tokens["weight"].shape, dtype=torch.bool)
    for over in each.over:
        if over.boundaries != [LOG_PROBS] and bool(over.cut.any()):
            rows, positions = each.positions.tokens_of(over.cut.shape)
            cut = over.cut.flatten().cpu() & (positions >= 0) & (positions < found.shape[1])
            found[rows[cut], positions[cut]] = True
    return found


def marks(passes: Sequence[WatchedPass], factor: float, first: int, size: int) -> list[dict[str, Tensor]]:
    """What a search is to know of the tokens of this rank's passes. A collective call.

    Args:
        passes (Sequence[WatchedPass]): Those of a mini-batch.
        factor (float): A bound as a multiple of the usual signal.
        first (int): The first rank of this rank's group with Ulysses, each of which has a part of the positions.
        size (int): The size of such a group.

    Returns:
        list[dict[str, Tensor]]: For each pass `outlier`, see `outliers`, and `cut`, see `cut_tokens`.
    """
    own: list[dict[str, Tensor]] = []

    def find() -> list[Tensor]:
        own.extend({"outlier": outliers(each, factor), "cut": cut_tokens(each)} for each in passes)
        return [each["cut"].nonzero() for each in own] if size > 1 else []

    for of_part in collectives.exchange(find)[first : first + size]:
        for each, places in zip(own, of_part, strict=False):
            each["cut"][tuple(places.T)] = True
    return own


def largest_tokens(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens furthest over their bounds, NaN first."""
    finite = {id(token): token["multiple"] for token in tokens if math.isfinite(token["multiple"])}
    return sorted(tokens, key=lambda token: -finite.get(id(token), math.inf))[:MAX_TOKENS]


def _values(tokens: Mapping[str, Tensor], rows: Tensor, positions: Tensor) -> list[dict[str, Any]]:
    """Each token's values by name; None where there is no data, as in the prompt."""
    names = ("token_id", "weight", "advantage", "log_prob", "old_log_prob", "rollout_log_prob")
    length = tokens["weight"].shape[1] if "weight" in tokens else 0
    inside = (positions >= 0) & (positions < length)
    columns: dict[str, list[Any]] = {}
    for name in names:
        column: list[Any] = [None] * len(rows)
        if name in tokens and inside.any():
            device = tokens[name].device
            known = tokens[name][rows[inside].to(device), positions[inside].to(device)].tolist()
            for i, value in zip(inside.nonzero().flatten().tolist(), known, strict=True):
                column[i] = value
        columns[name] = column
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
