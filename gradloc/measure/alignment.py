# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Alignment: do the log-probs of rollout, training and reference belong to the same tokens?

Two engines that score the same tokens agree on which of them are likely, however noisy or old their weights are. So if
a[t] is nearer to b[t + k] than to b[t], token for token, one of the two was taken at wrong positions.

Log-probs a and b and their mask (bool, the response's tokens) have the shape (rows, response length), as have the
`tokens` of a micro-batch: `response_mask`, `log_prob`, and if available `old_log_prob`, `ref_log_prob`,
`rollout_log_prob` and `after_eos`. Nothing here waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sums import (
    ALIGNMENT_SUMS,
    COMPARED,
    FITS,
    LARGEST_LOG_RATIO,
    LEAST_COUNT,
    LEAST_GAP,
    LOST_TIMES,
    MOSTLY,
    PAIR_SUMS,
    PAIRS,
    SHIFTS,
)

# The limits of the rules in docs/reference/verdict.md.
LEAST_LOG_PROB = -10.0  # smaller log-probs count as this, so that a single broken one does not make a sum
EVIDENCE = 3.0  # in standard deviations of `_evidence`, were either comparison as likely to be nearer
LEAST_ZERO = 0.01  # nats; an exact zero where the other column has less is no log-prob
LEAST_TOKENS = 4  # before the position from which on a response is moved; of a constant tail
TAIL_NATS = 2.0  # what a constant tail leaves out, in the sum
TAIL_USUAL = 0.05  # of the other tokens that differ from that value by as many nats, at most this share has it, too
ROW_TOKENS = 64  # of each response, compared with all others
ROW_LEAST = 8
ROW_FITS = 0.3
MOST_ROWS = 1024
LOST_TOKENS = 6  # from where on log-probs have no relation
LOST_MOST = 0.7  # of the tokens, each
LOST_SPREAD = 0.7  # and so far apart, as a part of how far b is from its mean
TURN_START = 3  # a mismatch from one of a turn's first tokens on begins with the turn: the first may agree by chance


class Alignment(NamedTuple):
    """How log-probs a and b of the same responses fit; tensors of shape (rows, 1) where not said."""

    aligned: Tensor  # bool: a[t] is clearly nearer to b[t] than to any neighbour
    shift: Tensor  # int64, k where a[t] fits b[t + k], from `start` on; 0 where it fits b[t], or nothing
    start: Tensor  # int64, the index in the response; 0 where the whole response is moved
    lost: Tensor  # int64, the index from which on a has no relation to b, although it has before; 0 where none
    # int64, how many tokens at the end have one and the same a (or b), which the other contradicts; 0 where none.
    tail: Tensor
    tail_value: Tensor  # that value
    tail_of_b: Tensor  # bool: it is b that has one value there
    # Float64 of shape (6, shifts), over the tokens that each shift compares: Σ |a[t] − b[t]|; Σ |a[t] − b[t + k]|; Σ of
    # the sizes of the differences of the two; Σ of their squares; how many tokens are nearer to the moved b, and how
    # many to their own.
    compared: Tensor


def align(first: Tensor, second: Tensor, mask: Tensor) -> Alignment:
    """Compares log-probs a and b at the same and at neighbouring positions.

    A response is moved by k from a token on if, over the tokens from there to its end, |a[t] − b[t + k]| adds up to at
    most `FITS` of |a[t] − b[t]|, with enough `EVIDENCE`. The token is the one from which on it is nearer by most.
    Noise, old weights or another temperature in either engine make both distances larger, and do not prefer a
    neighbour.
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
        *parts, count = (from_there_on(part) for part in (*parts, compared.float()))
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
    return Alignment(aligned, shift, start, lost, tail, value, of_b, torch.stack(sums, 1).double())


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
    after, count = from_there_on(torch.where(counted, distance, 0.0)), from_there_on(counted.float())
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


def _last(mask: Tensor) -> Tensor:
    """The index of each response's last token, int64 of shape (rows, 1); 0 without one."""
    return torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).amax(1, keepdim=True)


def from_there_on(values: Tensor) -> Tensor:
    """The sum from each position to the end."""
    return values.flip(1).cumsum(1).flip(1)


def _constant_tail(first: Tensor, second: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens at the end of a response have one and the same log-prob, while the other's add up to something.

    A rollout that reports log-probs after top-p gives 0 for each token that is left alone, not at the end only: such a
    batch has no tails.
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    value = first.gather(1, _last(mask))
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
    before = counted & (torch.arange(mask.shape[1], device=mask.device) <= _last(mask) - tail)
    count = before.sum(1, keepdim=True)
    mean = torch.where(before, distance, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    return (count < LEAST_TOKENS) | (mean <= (LOST_SPREAD * _spread(b, before)).clamp(min=LOST_TIMES * LEAST_GAP))


def policy_before(tokens: Mapping[str, Tensor]) -> Tensor:
    """The policy's log-probs before the update: the old ones, but where verl's bypass mode made them the rollout's."""
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

    Returns:
        tuple[Tensor, Tensor]: bool; int64 of shape (rows, 1): by how many positions, 0 where by none, or
            where log-probs are missing at the end.
    """
    mask = _sampled(tokens)
    position = torch.arange(mask.shape[1], device=mask.device)
    found, shift = torch.zeros_like(mask), torch.zeros((len(mask), 1), dtype=torch.int64, device=mask.device)
    pairs = {"rollout_log_prob": policy_before(tokens), "ref_log_prob": tokens["log_prob"]}
    for name, other in pairs.items() if mask.shape[1] else ():
        if name in tokens:
            aligned = align(tokens[name], other, mask)
            found |= mask & (aligned.shift != 0) & (position >= aligned.start)
            if name == "rollout_log_prob":
                found |= mask & (aligned.lost > 0) & (position >= aligned.lost)
            found |= mask & (aligned.tail > 0) & (position > _last(mask) - aligned.tail)
            shift = torch.where(shift == 0, aligned.shift, shift)
    return found, shift


def fits_another_row(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Where a response's a fits the b of another response far better than its own, bool of shape (rows, 1)."""
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
    """What one rank knows of a mini-batch's alignment, for the judge; zeros where log-probs are missing.

    Returns:
        Tensor: float64 of shape (ALIGNMENT_SUMS,).
    """
    if not micro_batches:
        return torch.zeros(ALIGNMENT_SUMS, dtype=torch.float64)
    width = max(tokens["response_mask"].shape[1] for tokens in micro_batches)
    names = set.intersection(*(set(tokens) for tokens in micro_batches))
    wanted = names & {"response_mask", "log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob", "after_eos"}
    joined = {
        name: torch.cat([pad(tokens[name], (0, width - tokens["response_mask"].shape[1])) for tokens in micro_batches])
        for name in wanted
    }
    mask, now, policy = _sampled(joined), joined["log_prob"], policy_before(joined)
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    found = []
    # The pairs in the order of their sums.
    for name, other in (("rollout_log_prob", policy), ("ref_log_prob", now), ("old_log_prob", now)):
        sums: dict[str, Tensor] = {}
        if name in joined and width:
            a = policy if name == "old_log_prob" else joined[name]
            sums = _sums_of_pair(a, other, mask, find_turns(mask), lost=name == "rollout_log_prob")
        found += [sums.get(each, zero).double() for each in PAIR_SUMS]
    return torch.stack(found)


def misplaced_share(sums: Tensor) -> float | None:
    """The share of the responses whose log-probs belong to other tokens, in the pair with most of them.

    Args:
        sums (Tensor): What `own_alignment` returned, added up over ranks and mini-batches.

    Returns:
        float: Up to half of the responses, a lost relation may be chance, and does not count. None without a response.
    """
    shares = []
    for of_pair in sums.view(len(PAIRS), -1).tolist():
        named = dict(zip(PAIR_SUMS, of_pair, strict=True))
        moved = sum(named[f"{way} {k}"] for k in SHIFTS for way in ("whole", "inside"))
        lost = named["lost"] if 2 * named["lost"] > named["responses"] else 0.0
        # Of the others, too short or too sure responses cannot be told; single ones are moved by chance.
        told = moved + lost + named["aligned"] if moved + lost > 2 else named["responses"]
        rest = max(named[kind] for kind in ("other_row", "zero_tail", "constant_tail"))
        if named["responses"]:
            shares.append(max(max(moved, lost) / told, rest / named["responses"]))
    return max(shares, default=None)


def _sums_of_pair(a: Tensor, b: Tensor, mask: Tensor, turn: Tensor, lost: bool) -> dict[str, Tensor]:
    found, counted = align(a, b, mask), _both_known(a, b, mask)
    moved, inside = found.shift != 0, found.start > 0
    sums = {"responses": mask.any(1).sum(), "aligned": found.aligned.sum()}
    sums["moved_start"] = torch.where(moved & inside, found.start, 0).sum()
    for index, k in enumerate(SHIFTS):
        sums[f"whole {k}"] = ((found.shift == k) & ~inside).sum()
        sums[f"inside {k}"] = ((found.shift == k) & inside).sum()
        sums |= {f"{name} {k}": of_shifts[index] for name, of_shifts in zip(COMPARED, found.compared, strict=True)}
    sums["moved_at_turn"] = (moved & inside & starts_turn(turn, found.start)).sum()
    if lost:
        is_lost = found.lost > 0
        sums |= {"lost": is_lost.sum(), "lost_start": found.lost.sum()}
        distance, after = (a - b).abs(), torch.arange(mask.shape[1], device=mask.device) >= found.lost
        for part, where in (("lost", is_lost & after), ("kept", ~is_lost)):
            where = where & counted
            sums |= {f"{part}_tokens": where.sum(), f"{part}_distance": torch.where(where, distance, 0.0).sum()}
        sums["lost_at_turn"] = (is_lost & starts_turn(turn, found.lost)).sum()
    # The log-probs of a shorter response end in padding.
    other_row = fits_another_row(a, b, mask) & ~moved
    sums["other_row"] = other_row.sum()
    tail = (found.tail > 0) & ~moved & ~other_row
    sums["zero_tail"] = (tail & (found.tail_value == 0)).sum()
    sums["constant_tail"] = (tail & (found.tail_value != 0)).sum()
    sums["tail_of_b"] = (found.tail_of_b & tail).sum()
    a, b = (torch.where(counted, each, 0.0).double().clamp(min=LEAST_LOG_PROB) for each in (a, b))
    sums |= {"tokens": counted.sum(), "first": a.sum(), "second": b.sum(), "product": (a * b).sum()}
    return sums | {"first_square": a.square().sum(), "second_square": b.square().sum()}


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
