# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A training pass whose backward signals are watched: where they are, how they are cut, and what is told of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..fsdp import collectives
from ..threshold import largest_first

# The boundary after the last layer: a position's signal there is |∂L/∂log p| of its own token.
LOG_PROBS = "log_probs"


@dataclass(frozen=True)
class Positions:
    """The sequences of a micro-batch, and how its hidden states hold them: padded, or with the padding removed."""

    mask: Tensor  # where the padded sequences have a token, bool of shape (rows, length)
    response_starts: Sequence[int]  # the column in `mask` of each response's first token
    # With Ulysses sequence parallelism, this rank's index in its group: which part of the positions it has.
    part: int = 0

    def select(self, rows: Sequence[int], response_length: int) -> "Positions":
        """The positions of a forward of some rows, with responses truncated to that length."""
        starts = [self.response_starts[row] for row in rows]
        ends = torch.tensor(starts, device=self.mask.device).unsqueeze(1) + response_length
        columns = torch.arange(self.mask.shape[1], device=self.mask.device)
        return replace(self, mask=self.mask[list(rows)] & (columns < ends), response_starts=starts)

    def places(self, shape: Sequence[int], whole: bool = False) -> tuple[Tensor, Tensor] | None:
        """Where the position is that predicts each token of the sequences; no host sync.

        Args:
            shape (Sequence[int]): Of hidden states without the hidden size, or of log-probs: (rows, any length) if they
                are padded; (1, positions), or (positions,) for log-probs, if the padding is removed. More positions may
                follow, of no token.
            whole (bool): Whether these are the positions of the whole group, not this rank's part; so are log-probs, of
                shape (rows, response length) if they are padded.

        Returns:
            tuple[Tensor, Tensor] | None: Its flat index in that shape, int64 of shape (rows, length + 1), by the
                token's column; and whether there is one, bool. None if the shape is not that of these sequences.
        """
        (rows, length), device = self.mask.shape, self.mask.device
        # A single row without its padding is shorter than with it.
        if len(shape) == 2 and shape[0] == rows and (rows > 1 or whole or shape[1] >= length):
            starts = torch.tensor(self.response_starts).to(device, non_blocking=True).unsqueeze(1)
            at = torch.arange(length + 1, device=device) - (starts if whole else torch.ones_like(starts))
            known, row = (at >= 0) & (at < shape[1]), torch.arange(rows, device=device).unsqueeze(1)
            return at.clamp(0, shape[1] - 1) + row * shape[1], known
        if tuple(shape[:-1]) not in ((1,), ()) or (len(shape) == 1 and not whole):
            return None
        # Those with a token, in order. Each rank's part is as long as the others'.
        packed = self.mask.flatten().cumsum(0).view(rows, length) - 1 - (0 if whole else self.part * shape[-1])
        known = self.mask & (packed >= 0) & (packed < shape[-1])
        return pad(packed.clamp(0, shape[-1] - 1), (1, 0)), pad(known, (1, 0))


def is_over(signal: Tensor, bound: Tensor | float, scaled: bool) -> Tensor:
    """Where a signal is over its bound, bool. NaN is, unless the loss is scaled: that is left to the scaler."""
    over = ~(signal <= bound)
    return over & signal.isfinite() if scaled else over


def cut(gradient: Tensor, signal: Tensor, bound: Tensor | float, over: Tensor, action: str) -> Tensor:
    """A gradient whose signals over their bound are cut; all arguments are broadcastable to its shape."""
    if action == "drop":
        return torch.where(over, 0.0, gradient)
    left = (2 - signal / bound).nan_to_num(nan=0.0).clamp(0, 1)
    return torch.where(over, torch.where(left == 0, 0.0, gradient * left.to(gradient.dtype)), gradient)


@dataclass
class WatchedPass:
    """A training pass, kept until the optimizer step."""

    positions: Positions  # where its tokens are
    rows: list[int]  # its rows in its rank's mini-batch
    recorded: bool = True  # whether its signals count
    # Whether its loss is scaled. If so, a signal that is no finite number is left for the gradient scaler, which has to
    # see an overflow to lower the scale.
    scaled: bool = False
    read_tokens: Callable[[], Mapping[str, Tensor]] = dict  # what `TokenClip.observe` was given
    # 1 / (a token's weight in the loss × loss scale) of each row, shape (rows,); None until it is known.
    scaling: Tensor | None = None
    # Values of its tokens, each of shape (rows, response length).
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    # By boundary, in the order of the backward, each position's signal divided by its token's weight in the loss;
    # float32. Emptied after the pass.
    signals: dict[str, Tensor] = field(default_factory=dict)
    # By boundary, whether too many were over the bound for any to be cut; shape ().
    refused: dict[str, Tensor] = field(default_factory=dict)
    boundaries: list[str] = field(default_factory=list)  # all, in the order of the backward
    # Kept of the signals after the pass, by the token that each position predicts; shape (rows, length + 1).
    first: Tensor = field(init=False)  # the index of the first of them at which one is over its bound, -1 for none
    multiple: Tensor = field(init=False)  # the signal there as a multiple of the bound; 0 for none
    cut: Tensor = field(init=False)  # whether a hidden state was cut at any of them, bool
    # The results of `scaling_of`; emptied after the pass, too.
    scaling_by_shape: dict[tuple[bool, torch.Size], Tensor | None] = field(default_factory=dict)

    def scaling_of(self, shape: torch.Size, at_log_probs: bool) -> Tensor | None:
        """`scaling` of each position, 0 without a token; None for hidden states that are not the text's. No host sync.

        The backward comes to the decoder layers before it comes to anything of another shape.
        """
        assert self.scaling is not None
        key = at_log_probs, shape
        found = self.scaling_by_shape
        if key not in found:
            known = any(each is not None for (of_log_probs, _), each in found.items() if not of_log_probs)
            places = None if known and not at_log_probs else self.positions.places(shape, whole=at_log_probs)
            found[key] = None
            if places is not None:
                index, has_one = places
                by_position = self.scaling.new_zeros(shape.numel() + 1)  # the last is for tokens without a position
                by_position[index.masked_fill(~has_one, shape.numel())] = self.scaling.unsqueeze(1)
                found[key] = by_position[:-1].view(shape)
        return found[key]

    def outliers(self, factor: float) -> Tensor:
        """How far the tokens that were left uncut are over their bounds.

        Only at the first boundary on the way back from the loss at which any is over: below it, an outlier's signal
        spreads to earlier positions through attention. `factor` is a bound as a multiple of the usual signal.

        Returns:
            Tensor: The multiple of the usual largest signal, 0 where a token is not over its bound; on the CPU, of the
                shape (rows, response length) of the weights.
        """
        over = self.first[self.first >= 0]
        boundary = int(over.min()) if len(over) else -1
        if boundary < 0 or not bool(self.refused.get(self.boundaries[boundary], True)):
            return torch.zeros(self.tokens["weight"].shape)
        return self._of_response(torch.where(self.first == boundary, factor * self.multiple, 0.0))

    def cut_tokens(self) -> Tensor:
        """The response tokens whose hidden states were cut; on the CPU, bool of the shape of the weights.

        What is cut at the log-probs is not among them: a token's coefficient tells what was left there.
        """
        return self._of_response(self.cut)

    def _of_response(self, values: Tensor) -> Tensor:
        """Those of the response's tokens, on the CPU, of the shape (rows, response length) of the weights."""
        columns = torch.arange(self.tokens["weight"].shape[1])
        at = torch.tensor(self.positions.response_starts).unsqueeze(1) + columns
        known = at < values.shape[1]
        return values.cpu().gather(1, at.clamp(max=values.shape[1] - 1)).masked_fill(~known, 0)


class Counts:
    """What is counted of a mini-batch on this rank, on the device: float64, each of shape (boundaries,).

    Attributes:
        largest (Tensor): The largest finite signal.
        over (Tensor): How many signals were over the bound.
        cut (Tensor): How many of these were cut.
        refused (Tensor): In how many passes none was cut because there were too many.
        tokens (Tensor): How many tokens have a weight in the loss, the same for all boundaries.
    """

    def __init__(self, boundaries: int, device: torch.device) -> None:
        self._counts = torch.zeros(5, boundaries, dtype=torch.float64, device=device)
        self.largest, self.over, self.cut, self.refused, self.tokens = self._counts.unbind()

    def gather(self) -> tuple[Tensor, ...]:
        """The five of every rank, stacked, on the CPU. A collective call."""
        return collectives.gather(self._counts).unbind(1)

    @torch.no_grad()
    def take_in(self, current: WatchedPass, boundaries: list[str], bounds_of: Tensor) -> None:
        """Counts a pass's signals, of which it keeps only where they are over their bounds. No host sync.

        Args:
            boundaries (list[str]): In the order of the forward; the log-probs are the last.
            bounds_of (Tensor): Their bounds, shape (boundaries,).
        """
        signals, current.signals, current.scaling_by_shape = current.signals, {}, {}
        if current.tokens:
            self.tokens += (current.tokens["weight"] != 0).sum()
        last, (rows, length) = len(boundaries) - 1, current.positions.mask.shape
        nowhere = torch.zeros(rows, length + 1, device=bounds_of.device)
        current.boundaries, current.multiple, current.cut = boundaries[::-1], nowhere, nowhere.bool()
        current.first = nowhere.to(torch.int16) - 1
        for here in (slice(0, last), slice(last, None)):  # what is over at the log-probs is first there
            names, at_log_probs = boundaries[here], here.stop is None
            seen = next((signals[name] for name in names if name in signals), None)
            if seen is None or not seen.numel():
                continue
            none, no = torch.zeros_like(seen), torch.zeros((), dtype=torch.bool, device=seen.device)
            uncut = torch.stack([current.refused.get(name, ~no) for name in names])
            by_boundary = torch.stack([signals.get(name, none) for name in names]).flatten(1)
            bounds = bounds_of[here].unsqueeze(1)
            over = is_over(by_boundary, bounds, current.scaled)
            self.over[here] += over.sum(1)
            largest = torch.where(by_boundary.isfinite(), by_boundary, 0.0).amax(1)
            self.largest[here] = torch.maximum(self.largest[here], largest)
            self.refused[here] += torch.stack([current.refused.get(name, no) for name in names])
            # The first on the way back from the loss is the last in the order of the forward.
            first = over.flip(0).to(torch.uint8).argmax(0, keepdim=True)
            multiple = (by_boundary / bounds).flip(0).gather(0, first)[0]
            places = current.positions.places(seen.shape, at_log_probs)
            assert places is not None  # else the signals were not seen
            index, known = places
            found = known & over.any(0)[index]
            before = 0 if at_log_probs else 1
            current.first = torch.where(found, (first[0] + before).to(torch.int16)[index], current.first)
            current.multiple = torch.where(found, multiple[index], current.multiple)
            if not at_log_probs:
                current.cut = known & (over & ~uncut.unsqueeze(1)).any(0)[index]


# The maximum number of tokens that are described, those furthest over their bounds first.
MAX_TOKENS = 64
# Values of a token that the pass knows; None in the prompt.
VALUES = ("token_id", "weight", "advantage", "log_prob", "old_log_prob", "rollout_log_prob")


def own_tokens(passes: Sequence[WatchedPass], rank: int, part: int, factor: float) -> list[dict[str, Any]]:
    """A rank's tokens that are over a bound, each at the first such boundary on the way back from the loss.

    Each has `rank`, `micro_batch`, `row` (in its rank's mini-batch), `position` (in the response; negative in the
    prompt), `boundary`, `multiple` (its signal there over the usual one), `cut`, and the values that the pass has.
    Those furthest over their bounds, at most `MAX_TOKENS`.

    Args:
        part (int): The rank's index in its group with Ulysses, whose ranks have the same log-probs.
        factor (float): A bound as a multiple of the usual signal.
    """
    if not passes:
        return []
    # The group's first rank has the same log-probs.
    least, found = min(part, 1), []
    # One transfer for all: each would wait for the device.
    columns = torch.cat([_largest(index, each, least) for index, each in enumerate(passes)], 1).cpu()
    for index, first, multiple, cut, row, position, *values in columns.T.tolist():
        if first < least:
            continue
        each = passes[int(index)]
        token = {
            "rank": rank,
            "micro_batch": int(index),
            "row": each.rows[int(row)],
            "position": int(position),
            "boundary": each.boundaries[int(first)],
            "multiple": multiple * factor,
            "cut": bool(cut),
            **dict.fromkeys(VALUES),
        }
        for name, value in zip(VALUES, values, strict=True):
            if name in each.tokens and 0 <= position < each.tokens[name].shape[1]:
                token[name] = int(value) if name == "token_id" else value
        found.append(token)
    return largest_tokens(found)


def _largest(index: int, each: WatchedPass, least: int) -> Tensor:
    """The tokens of a pass furthest over their bounds at boundaries from `least` on; no host sync.

    Returns:
        Tensor: float64, shape (6 + values, at most `MAX_TOKENS`): what `own_tokens` reads. A token that is over no
            bound has an earlier boundary.
    """
    first, multiple = each.first.flatten(), each.multiple.flatten()
    size = torch.where(first >= least, multiple.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    where = size.topk(min(MAX_TOKENS, len(size))).indices
    first = first[where].long()
    no = torch.zeros((), dtype=torch.bool, device=first.device)
    cut = torch.stack([~each.refused[name] if name in each.refused else no for name in each.boundaries])
    starts = torch.tensor(each.positions.response_starts).to(first.device, non_blocking=True)
    rows, positions = where // each.first.shape[1], where % each.first.shape[1]
    positions = positions - starts[rows]
    length = each.tokens["weight"].shape[1] if "weight" in each.tokens else 0
    at = rows, positions.clamp(0, max(length - 1, 0))
    values = [each.tokens[name][at] if length and name in each.tokens else torch.zeros_like(rows) for name in VALUES]
    columns = [torch.full_like(rows, index), first, multiple[where], cut[first.clamp(min=0)], rows, positions, *values]
    return torch.stack([column.double() for column in columns])


def largest_tokens(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens furthest over their bounds, NaN first."""
    return sorted(tokens, key=lambda token: largest_first(token["multiple"]))[:MAX_TOKENS]
