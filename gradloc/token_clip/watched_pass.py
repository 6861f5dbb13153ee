# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A training pass whose backward signals are watched: what is kept, counted and told of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .hidden_states import Positions

# The boundary after the last layer: a position's signal there is |∂L/∂log p| of its own token.
LOG_PROBS = "log_probs"


class Places(NamedTuple):
    """Where the tokens of a pass are among its hidden states, or its log-probs."""

    scaling: Tensor  # `WatchedPass.scaling` of each position, 0 without a token; of the signals' shape
    position: Tensor  # of each token the flat index, as `Positions.places` returns it
    known: Tensor  # and whether there is one


@dataclass
class WatchedPass:
    """A training pass, kept until the optimizer step."""

    positions: Positions  # where its tokens are
    rows: list[int]  # its rows in its rank's mini-batch
    boundaries: Sequence[str] = ()  # all, in the order of the backward
    recorded: bool = True  # whether its signals count
    # Whether its loss is scaled. If so, a signal that is no finite number is left for the gradient scaler, which has to
    # see an overflow to lower the scale.
    scaled: bool = False
    read_tokens: Callable[[], Mapping[str, Tensor]] = dict  # what `TokenClip.observe` was given
    # 1 / (a token's weight in the loss × loss scale) of each row, shape (rows,); None until it is known.
    scaling: Tensor | None = None
    # Values of its tokens, each of shape (rows, response length).
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    # By boundary seen, whether none of the signals over the bound is cut, as too many are or none is to be; shape ().
    refused: dict[str, Tensor] = field(default_factory=dict)
    # By whether it is of log-probs, and the signals' shape; None for hidden states that are not the text's. Emptied
    # after the pass.
    places: dict[tuple[bool, torch.Size], Places | None] = field(default_factory=dict)
    # What is kept of the signals, by the token that each position predicts; shape (rows, length + 1).
    first: Tensor = field(init=False)  # the index of the first boundary at which one is over its bound, -1 for none
    multiple: Tensor = field(init=False)  # the signal there as a multiple of the bound; 0 for none
    cut: Tensor = field(init=False)  # whether a hidden state was cut at any of them, bool

    def __post_init__(self) -> None:
        rows, length = self.positions.mask.shape
        self.multiple = torch.zeros(rows, length + 1, device=self.positions.mask.device)
        self.cut, self.first = self.multiple.bool(), self.multiple.to(torch.int16) - 1

    def places_of(self, shape: torch.Size, at_log_probs: bool) -> Places | None:
        """Those of signals; None for hidden states that are not the text's. No host sync.

        The backward comes to the decoder layers before it comes to anything of another shape.
        """
        assert self.scaling is not None
        key = at_log_probs, shape
        if key not in self.places:
            self.places[key] = None
            if at_log_probs or not any(each for (of_log_probs, _), each in self.places.items() if not of_log_probs):
                found = self.positions.places(shape, whole=at_log_probs)
                if found is not None:
                    index, known = found
                    by_position = self.scaling.new_zeros(shape.numel() + 1)  # the last: for tokens without a position
                    by_position[index.masked_fill(~known, shape.numel())] = self.scaling.unsqueeze(1)
                    self.places[key] = Places(by_position[:-1].view(shape), index, known)
        return self.places[key]

    def mark(self, boundary: str, places: Places, multiple: Tensor, over: Tensor) -> None:
        """Keeps what is over the bound of a boundary, the signals given as multiples of it. No host sync."""
        over_here = places.known & over.flatten()[places.position]
        found = over_here & (self.first < 0)
        self.first = torch.where(found, self.boundaries.index(boundary), self.first)
        self.multiple = torch.where(found, multiple.flatten()[places.position], self.multiple)
        if boundary != LOG_PROBS:
            self.cut |= over_here & ~self.refused[boundary]

    def of_response(self, values: Tensor) -> Tensor:
        """Those of the response's tokens, on the CPU, of the shape (rows, response length) of the weights."""
        columns = torch.arange(self.tokens["weight"].shape[1])
        at = torch.tensor(self.positions.response_starts).unsqueeze(1) + columns
        known = at < values.shape[1]
        return values.cpu().gather(1, at.clamp(max=values.shape[1] - 1)).masked_fill(~known, 0)


# The maximum number of tokens that are described, those furthest over their bounds first.
MAX_TOKENS = 64
# What is known of a token where the pass has it; None in the prompt.
VALUES = ("token_id", "weight", "advantage", "log_prob", "old_log_prob", "rollout_log_prob")


def own_tokens(passes: Sequence[WatchedPass], rank: int, part: int, factor: float) -> list[dict[str, Any]]:
    """A rank's tokens that are over a bound, each at the first such boundary on the way back from the loss.

    Each has `rank`, `micro_batch`, `row` (in its rank's mini-batch), `position` (in the response; negative in the
    prompt), `boundary`, `multiple` (its signal there over the usual one), `cut`, and the values that the pass has. Of
    each micro-batch, those furthest over their bounds, at most `MAX_TOKENS`.

    Args:
        part (int): The rank's index in its group with Ulysses, whose ranks have the same log-probs.
        factor (float): A bound as a multiple of the usual signal.
    """
    if not passes:
        return []
    # Of the log-probs, the first rank of the group has the same.
    columns = [_largest(each, least=min(part, 1)) for each in passes]
    found = []
    # One transfer for all: each would wait for the device.
    of_passes = torch.cat(columns, 1).cpu().split([each.shape[1] for each in columns], 1)
    for index, (each, of_pass) in enumerate(zip(passes, of_passes, strict=True)):
        for counts, first, multiple, cut, row, position, inside, *values in of_pass.T.tolist():
            if not counts:
                continue
            token = {
                "rank": rank,
                "micro_batch": index,
                "row": each.rows[int(row)],
                "position": int(position),
                "boundary": each.boundaries[int(first)],
                "multiple": multiple * factor,
                "cut": bool(cut),
                **dict.fromkeys(VALUES),
            }
            if inside:
                known = {name: value for name, value in zip(VALUES, values, strict=True) if name in each.tokens}
                token |= known if "token_id" not in known else {**known, "token_id": int(known["token_id"])}
            found.append(token)
    return found


def _largest(each: WatchedPass, least: int) -> Tensor:
    """The tokens furthest over their bounds, as columns; no host sync.

    Args:
        least (int): The index of the first boundary that counts.

    Returns:
        Tensor: float64, shape (7 + values, at most `MAX_TOKENS`): whether a token is over a bound, the index of the
            boundary, the multiple of the bound, whether it was cut, the row, the position in the response, whether the
            response has that position, and the token's values.
    """
    first, multiple = each.first.flatten(), each.multiple.flatten()
    size = torch.where(first >= least, multiple.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    where = size.topk(min(MAX_TOKENS, len(size))).indices
    first = first[where].long()
    no = torch.zeros((), dtype=torch.bool, device=first.device)
    cut = torch.stack([~each.refused.get(name, ~no) for name in each.boundaries])
    starts = torch.tensor(each.positions.response_starts).to(first.device, non_blocking=True)
    rows, positions = where // each.first.shape[1], where % each.first.shape[1]
    positions = positions - starts[rows]
    length = each.tokens["weight"].shape[1] if "weight" in each.tokens else 0
    inside = (positions >= 0) & (positions < length)
    at = rows, positions.clamp(0, max(length - 1, 0))
    values = [each.tokens[name][at] if length and name in each.tokens else torch.zeros_like(rows) for name in VALUES]
    columns = [first >= least, first, multiple[where], cut[first.clamp(min=0)], rows, positions, inside, *values]
    return torch.stack([column.double() for column in columns])


def outliers(each: WatchedPass, factor: float) -> Tensor:
    """How far the tokens of a pass that were left uncut are over their bounds.

    Only at the first boundary on the way back from the loss at which any is over: below it, an outlier's signal spreads
    to earlier positions through attention. `factor` is a bound as a multiple of the usual signal.

    Returns:
        Tensor: The multiple of the usual largest signal, 0 where a token is not over its bound; on the CPU, of the
            shape (rows, response length) of the weights.
    """
    over = each.first[each.first >= 0]
    boundary = int(over.min()) if len(over) else -1
    if boundary < 0 or not each.refused[each.boundaries[boundary]]:
        return torch.zeros(each.tokens["weight"].shape)
    return each.of_response(torch.where(each.first == boundary, factor * each.multiple, 0.0))


def cut_tokens(each: WatchedPass) -> Tensor:
    """The response tokens of a pass whose hidden states were cut; on the CPU, bool of the shape of the weights.

    What is cut at the log-probs is not among them: a token's coefficient tells what was left there.
    """
    return each.of_response(each.cut)


def largest_tokens(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens furthest over their bounds, NaN first."""
    finite = {id(token): token["multiple"] for token in tokens if math.isfinite(token["multiple"])}
    return sorted(tokens, key=lambda token: -finite.get(id(token), math.inf))[:MAX_TOKENS]
