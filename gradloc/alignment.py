# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Alignment: do the log-probs of rollout, training and reference belong to the same tokens?

Two engines that score the same tokens agree on which of them are likely, however noisy or old their weights are. So if
a[t] is nearer to b[t + k] than to b[t], token for token, one of the two was taken at wrong positions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# The limits of the rules in docs/reference/verdict.md.
SHIFTS = (-1, 1, -2, 2, -3, 3)
LEAST_LOG_PROB = -10.0  # smaller log-probs count as this, so that a single broken one does not make a sum
FITS = 0.6  # the moved comparison's distances have at most this share of the others
EVIDENCE = 3.0  # in standard deviations of `_evidence`, were either comparison as likely to be nearer
LARGEST_LOG_RATIO = 2.5
LEAST_COUNT = 5.0  # of tokens that count, for the evidence of a ratio
LEAST_GAP = 0.005  # nats, in the mean; smaller distances are no mismatch
LEAST_ZERO = 0.01  # nats; an exact zero where the other column has less is no log-prob
MOSTLY = 1.5  # times as many tokens are nearer where the response is moved: a few large distances do not tell
LEAST_TOKENS = 4  # before the position from which on a response is moved; of a constant tail
TAIL_NATS = 2.0  # what a constant tail leaves out, in the sum
TAIL_USUAL = 0.05  # of the other tokens that differ from that value by as many nats, at most this share has it, too
ROW_TOKENS = 64  # of each response, compared with all others
ROW_LEAST = 16
ROW_FITS = 0.3
MOST_ROWS = 1024
LOST_TOKENS = 6  # from where on log-probs have no relation
LOST_TIMES = 5.0  # as far apart as before, at least
LOST_MOST = 0.7  # of the tokens, each
LOST_SPREAD = 0.7  # and so far apart, as a part of how far b is from its mean
POOLED_TOKENS = 32
POOLED_EVIDENCE = 6.0
UNRELATED_CORRELATION = 0.1
UNRELATED_TOKENS = 128
UNRELATED_SPREAD = (0.5, 2.0)
UNRELATED_NATS = 2.0
CLEAR_RESPONSES = 3
CLEAR_SHARE = 0.05

_PAIRS = ("rollout", "reference", "old")
_COMPARED = ("here", "there", "size", "square", "nearer", "farther")
_OF_SHIFT = ("whole", "inside", *_COMPARED)
_SUMS = (
    "responses",
    "aligned",
    *(f"{name} {shift}" for shift in SHIFTS for name in _OF_SHIFT),
    "start",
    "at_turn",
    "lost",
    "lost_start",
    "lost_at_turn",
    "other_row",
    "zero_tail",
    "constant_tail",
    "tail_of_b",
    "tokens",
    "first",
    "second",
    "first_square",
    "second_square",
    "product",
)
ALIGNMENT_SUMS = len(_PAIRS) * len(_SUMS)


class Alignment(NamedTuple):
    """How log-probs a and b of the same responses fit; tensors of shape (rows, 1), sums of shape (shifts,).

    Args:
        aligned (Tensor): bool: a[t] is clearly nearer to b[t] than to any neighbour.
        shift (Tensor): int64, k where a[t] fits b[t + k], from `start` on; 0 where it fits b[t], or nothing.
        start (Tensor): int64, the index in the response; 0 where the whole response is moved.
        lost (Tensor): int64, the index from which on a has no relation to b, although it has before; 0 where none.
        tail (Tensor): int64, how many tokens at the end have one and the same a (or b), which the other contradicts; 0
            where none.
        tail_value (Tensor): That value.
        tail_of_b (Tensor): bool: it is b that has one value there.
        here (Tensor): Σ |a[t] − b[t]| over the tokens that each shift compares.
        there (Tensor): Σ |a[t] − b[t + k]| over the same tokens.
        size (Tensor): Σ of the sizes of the differences of the two.
        square (Tensor): Σ of their squares.
        nearer (Tensor): How many of these tokens are nearer to the moved b.
        farther (Tensor): How many are nearer to their own.
    """

    aligned: Tensor
    shift: Tensor
    start: Tensor
    lost: Tensor
    tail: Tensor
    tail_value: Tensor
    tail_of_b: Tensor
    here: Tensor
    there: Tensor
    size: Tensor
    square: Tensor
    nearer: Tensor
    farther: Tensor


def align(first: Tensor, second: Tensor, mask: Tensor) -> Alignment:
    """Compares log-probs a and b at the same and at neighbouring positions. No host sync.

    A response is moved by k from a token on if, over the tokens from there to its end, |a[t] − b[t + k]| adds up to at
    most `FITS` of |a[t] − b[t]|, with enough `EVIDENCE`. The token is the one from which on it is nearer by most.
    Noise, old weights or another temperature in either engine make both distances larger, and do not prefer a
    neighbour.

    Args:
        first (Tensor): a, shape (rows, response length).
        second (Tensor): b, same shape.
        mask (Tensor): bool, same shape: the response's tokens.
    """
    counted = _both_known(first, second, mask)
    a, b = (torch.where(counted, each, 0.0).clamp(min=LEAST_LOG_PROB).float() for each in (first, second))
    distance = (a - b).abs()
    rows, device = len(mask), mask.device
    shift = torch.zeros((rows, 1), dtype=torch.int64, device=device)
    start, best = shift.clone(), torch.zeros((rows, 1), device=device)
    aligned = counted.any(1, keepdim=True)
    # What does not fit better than a constant, as log-probs of another model, is no fit.
    spread = _spread(b, counted)
    sums = []
    for k in SHIFTS:
        compared = counted & _moved(counted, k)
        here = torch.where(compared, distance, 0.0)
        there = torch.where(compared, (a - _moved(b, k)).abs(), 0.0)
        difference = here - there
        nearer, farther = ((sign * difference > LEAST_GAP).float() for sign in (1, -1))
        parts = [here, there, difference.abs(), difference.square(), nearer, farther]
        sums.append(torch.stack([part.sum() for part in parts]))
        *parts, count = (_from_there_on(part) for part in (*parts, compared.float()))
        gain, at = (parts[0] - parts[1]).masked_fill(~compared, -math.inf).max(1, keepdim=True)
        of_tail, tokens = [part.gather(1, at) for part in parts], count.gather(1, at)
        of_all = [part[:, :1] for part in parts]
        before = [whole - tail for whole, tail in zip(of_all, of_tail, strict=True)]
        fits = (gain > best) & (of_tail[1] <= FITS * of_tail[0]) & (_evidence(*of_tail[:4]) >= EVIDENCE)
        fits &= of_tail[4] >= MOSTLY * of_tail[5]
        fits &= (of_tail[0] > LEAST_GAP * tokens) & (of_tail[1] <= tokens * spread)
        inside = (count[:, :1] - tokens >= LEAST_TOKENS) & (before[0] <= FITS * before[1])
        shift, best = torch.where(fits, k, shift), torch.where(fits, gain, best)
        start = torch.where(fits, torch.where(inside, at, 0), start)
        aligned &= of_all[0] < FITS * of_all[1]
    tail, value = _constant_tail(first, second, mask)
    tail_b, value_b = _constant_tail(second, first, mask)
    of_b = (tail == 0) & (tail_b > 0)
    tail, value = torch.where(of_b, tail_b, tail), torch.where(of_b, value_b, value)
    tail = torch.where(_agrees_before(tail, distance, b, counted, mask), tail, 0)
    shift = torch.where(tail > 0, 0, shift)
    lost = torch.where((tail > 0) | (shift != 0), 0, _lost_from(distance, b, counted))
    aligned &= (shift == 0) & (lost == 0)
    return Alignment(aligned, shift, start, lost, tail, value, of_b, *torch.stack(sums, 1).double())


def _both_known(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """The tokens with two log-probs: an exact zero that the other column contradicts is none."""
    contradicted = ((a == 0) & (b < -LEAST_ZERO)) | ((b == 0) & (a < -LEAST_ZERO))
    return mask & a.isfinite() & b.isfinite() & ~contradicted


def _evidence(here: Tensor, there: Tensor, size: Tensor, square: Tensor) -> Tensor:
    """By how many standard deviations the moved comparison is nearer, were either as likely to be for each token.

    The larger of two: of the sum of the differences, with random signs; and of the logarithm of the distances' ratio,
    for as many tokens as count (the differences' participation ratio). The second tells an exact fit in a few tokens.
    """
    tiny = torch.finfo(here.dtype).tiny
    by_sum = (here - there) / square.sqrt().clamp(min=tiny)
    count = size.square() / square.clamp(min=tiny)
    by_ratio = (count / 2).sqrt() * (here.clamp(min=tiny) / there.clamp(min=tiny)).log().clamp(max=LARGEST_LOG_RATIO)
    return torch.maximum(by_sum, torch.where(count >= LEAST_COUNT, by_ratio, 0.0))


def _lost_from(distance: Tensor, b: Tensor, counted: Tensor) -> Tensor:
    """The token from which on |a − b| is largest against what it is before, if b says nothing of a from there on.

    So it is where tokens were decoded and encoded again, and ever more of them are others than were sampled.
    """
    if not counted.shape[1]:
        return counted.new_zeros((len(counted), 1), dtype=torch.int64)
    after, count = _from_there_on(torch.where(counted, distance, 0.0)), _from_there_on(counted.float())
    mean = after / count.clamp(min=1)
    before = (after[:, :1] - after) / (count[:, :1] - count).clamp(min=1)
    possible = counted & (count >= LOST_TOKENS) & (count[:, :1] - count >= LEAST_TOKENS)
    # Where the first tokens of all responses are as far apart, nothing begins inside them.
    first = counted & (count[:, :1] - count < LEAST_TOKENS)
    usual = torch.where(first, distance, 0.0).sum() / first.sum().clamp(min=1)
    apart = possible & (mean >= LOST_TIMES * before.clamp(min=usual)) & (mean > LOST_TIMES * LEAST_GAP)
    _, at = torch.where(apart, (mean - before) * count.sqrt(), -math.inf).max(1, keepdim=True)
    here = counted & (torch.arange(counted.shape[1], device=b.device) >= at)
    most = (here & (distance > LOST_TIMES * (before.gather(1, at) + LEAST_GAP))).sum(1, keepdim=True)
    spread, of_all = _spread(b, here), _spread(b, counted)
    found = apart.any(1, keepdim=True) & (most >= LOST_MOST * here.sum(1, keepdim=True))
    # Where all tokens are about as likely, no relation can be lost.
    found &= (mean.gather(1, at) >= LOST_SPREAD * spread) & (spread >= LOST_SPREAD * of_all)
    return torch.where(found, at, 0)


def _spread(values: Tensor, where: Tensor) -> Tensor:
    """The mean distance from the mean, shape (rows, 1)."""
    count = where.sum(1, keepdim=True).clamp(min=1)
    middle = torch.where(where, values, 0.0).sum(1, keepdim=True) / count
    return torch.where(where, (values - middle).abs(), 0.0).sum(1, keepdim=True) / count


def _moved(values: Tensor, k: int) -> Tensor:
    """values[t + k] at t; zero where there is none."""
    width = values.shape[1]
    k = min(max(k, -width), width)
    return pad(values[:, k:] if k > 0 else values[:, :k], (0, k) if k > 0 else (-k, 0))


def _from_there_on(values: Tensor) -> Tensor:
    """The sum from each position to the end."""
    return values.flip(1).cumsum(1).flip(1)


def _constant_tail(first: Tensor, second: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens at the end of a response have one and the same log-prob, while the other's add up to something.

    A rollout that reports log-probs after top-p gives 0 for each token that is left alone, not at the end only: such a
    batch has no tails.
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, 0).amax(1, keepdim=True)
    value = first.gather(1, last)
    other = mask & (first != value)
    # From the token after the last other one on.
    begin = torch.where(other, position + 1, 0).amax(1, keepdim=True)
    tail = mask & (position >= begin)
    apart = torch.where(second.isfinite(), (second.clamp(min=LEAST_LOG_PROB) - value).abs(), 0.0)
    missing = torch.where(tail, apart, 0.0).sum(1, keepdim=True)
    count = tail.sum(1, keepdim=True)
    before = mask & ~tail & (apart > TAIL_USUAL)
    usual = (before & (first == value)).sum() > TAIL_USUAL * before.sum()
    return torch.where((count >= LEAST_TOKENS) & (missing >= TAIL_NATS) & ~usual, count, 0), value


def _agrees_before(tail: Tensor, distance: Tensor, b: Tensor, counted: Tensor, mask: Tensor) -> Tensor:
    """Whether a fits b before the tail; bool of shape (rows, 1). Those of another, shorter response end in padding."""
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, 0).amax(1, keepdim=True)
    before = counted & (position <= last - tail)
    count = before.sum(1, keepdim=True)
    mean = torch.where(before, distance, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    return (count < LEAST_TOKENS) | (mean <= (LOST_SPREAD * _spread(b, before)).clamp(min=LOST_TIMES * LEAST_GAP))


def policy_before(tokens: Mapping[str, Tensor]) -> Tensor:
    """The policy's log-probs before the update: the old ones, unless they are the rollout's, as in verl's bypass mode.

    Args:
        tokens (Mapping[str, Tensor]): `response_mask`, `log_prob`, and if available `old_log_prob` and
            `rollout_log_prob`, of shape (rows, response length).
    """
    if "old_log_prob" not in tokens or "rollout_log_prob" not in tokens:
        return tokens.get("old_log_prob", tokens["log_prob"])
    old, rollout = tokens["old_log_prob"], tokens["rollout_log_prob"]
    bypassed = ~(tokens["response_mask"].bool() & (old != rollout)).any(1, keepdim=True)
    return torch.where(bypassed, tokens["log_prob"], old)


def _sampled(tokens: Mapping[str, Tensor]) -> Tensor:
    """The response's tokens, bool, but for those that were added after its end: the rollout has no log-prob of them."""
    mask = tokens["response_mask"].bool()
    if "after_eos" not in tokens or "rollout_log_prob" not in tokens:
        return mask
    return mask & ~(tokens["after_eos"].bool() & (tokens["rollout_log_prob"] == 0))


def misplaced(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens whose log-probs belong to others: of the rollout or the reference, compared with the policy's.

    Args:
        tokens (Mapping[str, Tensor]): `response_mask`, `log_prob`, and if available `old_log_prob`, `ref_log_prob` and
            `rollout_log_prob`, of shape (rows, response length).

    Returns:
        tuple[Tensor, Tensor]: bool of that shape; int64 of shape (rows, 1): by how many positions, 0 where by none, or
            where log-probs are missing at the end.
    """
    mask = _sampled(tokens)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (
        torch.where(mask, position, -1).amax(1, keepdim=True) if mask.shape[1] else mask.new_zeros(len(mask), 1).long()
    )
    found, shift = torch.zeros_like(mask), torch.zeros((len(mask), 1), dtype=torch.int64, device=mask.device)
    pairs = {"rollout_log_prob": policy_before(tokens), "ref_log_prob": tokens["log_prob"]}
    for name, other in pairs.items() if mask.shape[1] else ():
        if name in tokens:
            aligned = align(tokens[name], other, mask)
            found = found | (mask & (aligned.shift != 0) & (position >= aligned.start))
            if name == "rollout_log_prob":
                found = found | (mask & (aligned.lost > 0) & (position >= aligned.lost))
            found = found | (mask & (aligned.tail > 0) & (position > last - aligned.tail))
            shift = torch.where(shift == 0, aligned.shift, shift)
    return found, shift


def fits_another_row(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Where a response's a fits the b of another response far better than its own, bool (rows, 1). No host sync.

    Args:
        first (Tensor): a, shape (rows, response length).
        second (Tensor): b, same shape.
        mask (Tensor): bool, same shape.
    """
    if not len(mask):
        return mask.new_zeros((0, 1))
    mask = mask & first.isfinite() & second.isfinite()
    a, b = (torch.where(mask, each, 0.0).clamp(min=LEAST_LOG_PROB).float()[:, :ROW_TOKENS] for each in (first, second))
    a, b, count = a[:MOST_ROWS], b[:MOST_ROWS], mask[:MOST_ROWS, :ROW_TOKENS].sum(1)
    distance = torch.cdist(a, b, p=1.0)
    own = distance.diagonal()
    others = distance + torch.diag(torch.full_like(own, math.inf))
    # Sure tokens all have log-probs near 0: a fit is one only if it is better than that of a constant.
    mean = a.sum(1, keepdim=True) / count.unsqueeze(1)
    spread = torch.where(mask[:MOST_ROWS, :ROW_TOKENS], (a - mean).abs(), 0.0).sum(1)
    found = (others.amin(1) < ROW_FITS * torch.minimum(own, spread)) & (count >= ROW_LEAST) & (own > LEAST_GAP * count)
    return pad(found, (0, len(mask) - len(found))).unsqueeze(1)


def own_alignment(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What one rank knows of a mini-batch's alignment, for `find_off`. No host sync.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): Each micro-batch's tensors of shape (rows, response length):
            `response_mask`, `log_prob`, and if available `old_log_prob`, `ref_log_prob`, `rollout_log_prob`.

    Returns:
        Tensor: float64 of shape (ALIGNMENT_SUMS,); zeros where log-probs are missing.
    """
    width = max(tokens["response_mask"].shape[1] for tokens in micro_batches)
    names = set.intersection(*(set(tokens) for tokens in micro_batches))
    wanted = names & {"response_mask", "log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob", "after_eos"}
    joined = {
        name: torch.cat([pad(tokens[name], (0, width - tokens[name].shape[1])) for tokens in micro_batches])
        for name in wanted
    }
    mask, now = _sampled(joined), joined["log_prob"]
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    policy = policy_before(joined)
    if "old_log_prob" in joined:
        joined["old_log_prob"] = policy
    columns = {
        "rollout": ("rollout_log_prob", policy),
        "reference": ("ref_log_prob", now),
        "old": ("old_log_prob", now),
    }
    found = []
    for pair, (name, other) in columns.items():
        sums: dict[str, Tensor] = {}
        if name in joined and width:
            sums = _sums_of_pair(joined[name], other, mask, find_turns(mask), lost=pair == "rollout")
        found += [sums.get(each, zero).double() for each in _SUMS]
    return torch.stack(found)


def _sums_of_pair(a: Tensor, b: Tensor, mask: Tensor, turn: Tensor, lost: bool) -> dict[str, Tensor]:
    found = align(a, b, mask)
    moved, inside = found.shift != 0, found.start > 0
    sums = {"responses": mask.any(1).sum(), "aligned": found.aligned.sum()}
    sums["start"] = torch.where(moved & inside, found.start, 0).sum()
    for index, k in enumerate(SHIFTS):
        sums[f"whole {k}"] = ((found.shift == k) & ~inside).sum()
        sums[f"inside {k}"] = ((found.shift == k) & inside).sum()
        for name in _COMPARED:
            sums[f"{name} {k}"] = getattr(found, name)[index]
    sums["at_turn"] = (moved & inside & starts_turn(turn, found.start)).sum()
    if lost:
        sums |= {"lost": (found.lost > 0).sum(), "lost_start": found.lost.sum()}
        sums["lost_at_turn"] = ((found.lost > 0) & starts_turn(turn, found.lost)).sum()
    # The log-probs of a shorter response end in padding.
    other_row = fits_another_row(a, b, mask) & ~moved
    sums["other_row"] = other_row.sum()
    tail = (found.tail > 0) & ~moved & ~other_row
    sums["zero_tail"] = (tail & (found.tail_value == 0)).sum()
    sums["constant_tail"] = (tail & (found.tail_value != 0)).sum()
    sums["tail_of_b"] = (found.tail_of_b & tail).sum()
    counted = _both_known(a, b, mask)
    a, b = (torch.where(counted, each, 0.0).double().clamp(min=LEAST_LOG_PROB) for each in (a, b))
    sums |= {"tokens": counted.sum(), "first": a.sum(), "second": b.sum(), "product": (a * b).sum()}
    return sums | {"first_square": a.square().sum(), "second_square": b.square().sum()}


def find_turns(response_mask: Tensor) -> Tensor:
    """The turn of each token, from 1; 0 where response_mask is 0. No host sync.

    A turn is a run of tokens with response_mask 1. Between turns, tool output or a user's message has response_mask 0.

    Args:
        response_mask (Tensor): Shape (rows, response length).

    Returns:
        Tensor: int64, same shape.
    """
    mask = response_mask.bool()
    return torch.where(mask, turn_starts(mask).cumsum(1), 0)


def turn_starts(mask: Tensor) -> Tensor:
    """The first token of each turn, bool of the mask's shape."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def starts_turn(turn: Tensor, start: Tensor, within: int = 3) -> Tensor:
    """Whether a position is one of the first tokens of a turn after the first, bool of start's shape (rows, 1)."""
    here = turn.gather(1, start)
    before = turn.gather(1, (start - within).clamp(min=0))
    return (here > 1) & (before != here)


class Off(NamedTuple):
    """What is wrong between two columns of log-probs.

    Args:
        kind (str): "moved", "lost" (from a token on), "other_row", "zero_tail", "constant_tail" or "unrelated".
        share (float): In which share of the responses.
        clear (bool): Whether this update shows it for certain.
        shift (int): k, where a[t] fits b[t + k]; else 0.
        start (float): Where it begins inside most of these responses, the mean index from which on; else 0.
        at_turn (bool): Whether most of these begin with a turn.
        correlation (float): Between the two columns.
        of_b (bool): Whether a tail is in b, in most of these.
    """

    kind: str
    share: float
    clear: bool
    shift: int = 0
    start: float = 0.0
    at_turn: bool = False
    correlation: float = 0.0
    of_b: bool = False


def find_off(sums: Sequence[float], judge_correlation: bool) -> dict[str, Off | None]:
    """By pair ("rollout" with the policy, "reference" and "old" with the current one) what is wrong; None if nothing.

    A pair that cannot be judged is missing.

    Args:
        sums (Sequence[float]): What `own_alignment` returned, added up over ranks and mini-batches.
        judge_correlation (bool): Whether log-probs without any relation are a fault: an engine that has drifted away
            over the steps of a run is none.
    """
    found: dict[str, Off | None] = {}
    for number, pair in enumerate(_PAIRS):
        of_pair = dict(zip(_SUMS, sums[number * len(_SUMS) : (number + 1) * len(_SUMS)], strict=True))
        if of_pair["tokens"] >= POOLED_TOKENS:
            found[pair] = _off(of_pair, judge_correlation)
    return found


def correlation(sums: Sequence[float], pair: str = "rollout") -> float | None:
    """Between the log-probs of a pair; None where they are too few or all the same."""
    at = _PAIRS.index(pair) * len(_SUMS)
    return _correlation(dict(zip(_SUMS, sums[at : at + len(_SUMS)], strict=True)))


def _correlation(sums: Mapping[str, float]) -> float | None:
    count = sums["tokens"]
    if count < UNRELATED_TOKENS:
        return None
    first, second = _variance(sums, "first"), _variance(sums, "second")
    if min(first, second) < LEAST_GAP**2:
        return None
    return (sums["product"] - sums["first"] * sums["second"] / count) / count / math.sqrt(first * second)


def _variance(sums: Mapping[str, float], name: str) -> float:
    return sums[f"{name}_square"] / sums["tokens"] - (sums[name] / sums["tokens"]) ** 2


def _off(sums: Mapping[str, float], judge_correlation: bool) -> Off | None:
    moved = {k: sums[f"whole {k}"] + sums[f"inside {k}"] for k in SHIFTS}
    inside = sum(sums[f"inside {k}"] for k in SHIFTS)
    counts = {
        "moved": sum(moved.values()),
        **{name: sums[name] for name in ("lost", "other_row", "zero_tail", "constant_tail")},
    }
    kind = max(counts, key=counts.__getitem__)
    if kind in _TAILS and counts["other_row"] >= max(CLEAR_RESPONSES, CLEAR_SHARE * sums["responses"]):
        kind = "other_row"  # of which only those of shorter responses can be told
    count = counts[kind]
    # Some responses are too short, or their tokens too sure, to tell.
    known = max(count + sums["aligned"] if kind in ("moved", "lost") else sums["responses"], 1.0)
    found = Off(kind, count / known, count >= max(CLEAR_RESPONSES, CLEAR_SHARE * known))
    if kind == "moved" and count:
        mostly_inside = 2 * inside > count
        found = found._replace(
            shift=max(moved, key=moved.__getitem__),
            start=sums["start"] / inside if mostly_inside else 0.0,
            at_turn=mostly_inside and 2 * sums["at_turn"] > inside,
        )
    if kind in _TAILS:
        found = found._replace(of_b=2 * sums["tail_of_b"] > sums["zero_tail"] + sums["constant_tail"])
    if kind == "lost" and count:
        found = found._replace(start=sums["lost_start"] / count, at_turn=2 * sums["lost_at_turn"] > count)
    if found.clear and kind != "other_row":
        return found
    # Responses too short, or engines too far apart, to tell one by one.
    for k in SHIFTS:
        *parts, nearer, farther = (sums[f"{name} {k}"] for name in _COMPARED)
        evidence = float(_evidence(*torch.tensor(parts, dtype=torch.float64)))
        is_nearer = parts[1] <= (1 + FITS) / 2 * parts[0] and parts[0] > LEAST_GAP * sums["tokens"]
        is_nearer &= parts[1] <= sums["tokens"] * math.sqrt(max(_variance(sums, "second"), 0.0))
        if is_nearer and nearer >= MOSTLY * farther and evidence >= POOLED_EVIDENCE:
            return Off("moved", 1.0, True, shift=k)
    if found.clear:
        return found
    # A few tokens with large distances hide a relation that most have.
    own = any(sums[f"farther {k}"] >= MOSTLY * sums[f"nearer {k}"] > 0 for k in SHIFTS)
    related = None if own else _correlation(sums)
    if judge_correlation and related is not None and related < UNRELATED_CORRELATION:
        spread = _variance(sums, "first") / _variance(sums, "second")
        apart = abs(sums["first"] - sums["second"]) / sums["tokens"]
        # Noise, too, hides a relation, but then one spreads far more than the other.
        if UNRELATED_SPREAD[0] <= spread <= UNRELATED_SPREAD[1] or apart > UNRELATED_NATS:
            return Off("unrelated", 1.0, True, correlation=related)
    return found if count else None


def alignment_warning(micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any] | None:
    """What `misaligned_warning` gives for some micro-batches alone, if it is clear; they are as for `own_alignment`."""
    if not micro_batches:
        return None
    off = find_off(own_alignment(micro_batches).tolist(), judge_correlation=True)
    return misaligned_warning({pair: each if each and each.clear else None for pair, each in off.items()})


_COLUMNS = {
    "rollout": ("The rollout's log-probs", "r"),
    "policy": ("Training's log-probs", "p"),
    "reference": ("The reference's log-probs", "ref"),
    "old": ("The old log-probs", "old"),
    "now": ("The log-probs of the update", "p"),
}
_OF_PAIR = {"rollout": ("rollout", "policy"), "reference": ("reference", "now"), "old": ("old", "now")}
_TAILS = ("zero_tail", "constant_tail")
_WHICH = "; a reference tells which of the two (use_kl_loss=True with kl_loss_coef=0)"


def misaligned_warning(off: Mapping[str, Off | None]) -> dict[str, Any] | None:
    """The warning, or None: `name` ("misaligned", or "retokenized"), `sentence`, `check` and `share`.

    Args:
        off (Mapping): What `find_off` returned, of what is clear.
    """
    wrong = {pair: each for pair, each in off.items() if each is not None}
    if not wrong:
        return None
    column, other, pair = _wrong_column(wrong, off)
    each = wrong[pair]
    if each.kind in _TAILS:
        column, other = _OF_PAIR[pair][:: -1 if each.of_b else 1]
    # r[t] fits p[t + k]: if it is p that was moved, p[t] fits r[t − k].
    shift = each.shift if column == pair else -each.shift
    subject, letter = _COLUMNS[column]
    unsure = column == "rollout" and "reference" not in off and each.kind in ("moved", "lost", "other_row", "unrelated")
    where = f"in {_share(each.share)} of the responses" if each.share < 0.995 else "in all responses"
    if each.kind == "moved":
        by = "one position" if abs(shift) == 1 else f"{abs(shift)} positions"
        way, back = ("late", "early") if shift < 0 else ("early", "late")
        fits = f"{letter}[t] fits {_COLUMNS[other][1]}[t{shift:+d}]"
        what = f"are {by} {way}"
        if unsure:
            what += f", or training's are {by} {back},"
        if each.start:
            where += f", from inside them on (on average from token {each.start:.0f})"
        sentence = f"{subject} {what} {where} ({fits})"
        advice = "look for where they are sliced, padded or gathered, and whether a list begins one token later"
        if each.start:
            advice = (
                "look for tokens that only one of the two lists has from there on: decoded and encoded again, or "
                "special tokens left out"
            )
    elif each.kind == "lost":
        sentence = (
            f"{subject} {where} agree with {_of(other)} at first, and have no relation to them from inside the "
            f"responses on (on average from token {each.start:.0f})"
        )
        advice = "look for tokens that were decoded and encoded again, or that only one of the two lists has"
    elif each.kind == "other_row":
        sentence = f"{subject} {where} are those of other responses of the batch"
        advice = "look for what reorders, pads or repeats rows in one of the columns alone"
    elif each.kind == "unrelated":
        sentence = f"{subject} have no relation to {_of(other)} (correlation {each.correlation:.2f})"
        advice = "they belong to other tokens, or to another model: print both beside the token ids"
    else:
        value = "exact zeros" if each.kind == "zero_tail" else "one repeated value"
        sentence = f"{subject} end in {value} {where}, where {_of(other)} are not"
        advice = "log-probs are missing there and were padded: take the engine's own, or set response_mask to 0"
    if each.at_turn:
        sentence += ", beginning with a turn"
    return {
        "name": "retokenized" if each.at_turn else "misaligned",
        "sentence": f"{sentence}: {advice}{_WHICH if unsure else ''}.",
        "check": "Print `responses`, `rollout_log_probs`, `old_log_probs` and `ref_log_prob` of one row of the batch "
        "side by side, and the engine's own list of tokens and log-probs: the same token should have about the same "
        "log-prob everywhere.",
        "share": each.share,
    }


def _wrong_column(wrong: Mapping[str, Off], off: Mapping[str, Off | None]) -> tuple[str, str, str]:
    """Which column is off, what it was compared with, and the pair that shows it: the one that fits no other."""
    if "old" in wrong and "rollout" in off and "rollout" not in wrong:
        return "now", "old", "old"
    if "old" in wrong:
        return "old", "now", "old"
    if "rollout" in wrong and "reference" in wrong:
        return "policy", "rollout", "rollout"
    if "rollout" in wrong:
        return "rollout", "policy", "rollout"
    return "reference", "now", "reference"


def _of(column: str) -> str:
    subject = _COLUMNS[column][0]
    return subject[0].lower() + subject[1:]


def _share(share: float) -> str:
    return "under 1%" if share < 0.01 else f"{share:.0%}"
