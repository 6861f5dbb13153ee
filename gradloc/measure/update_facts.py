# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each rank sums up of a mini-batch for the judge: the sums that gradloc/facts.py names.

Columns are put together over the micro-batches and compared at once: few operations, in parts that bound the memory
(tests/unit/test_facts.py counts both). Tensors are of shape (rows, response length). Nothing here waits for the device.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..facts import BROKEN, COLUMNS_OF_PAIR, LOSS, MODES, OF_PAIR, PAIRS, SAMPLED, SHIFTS
from ..levels import (
    FACTOR,
    FAR_NATS,
    LEAST_LOG_PROB,
    LEAST_NATS,
    LEVEL,
    MOVED,
    NEAR_NATS,
    ROW_TOKENS,
    UNRELATED,
    UNSAMPLED_NATS,
)

Tokens = Mapping[str, Tensor]
# The values that are read, in the order of a part's columns: first those that may not be finite.
_READ = (
    *BROKEN,
    *("response_mask", "weight", "coefficient", "kl_coefficient", "rollout_is_weight", "after_eos", "policy_loss_mask"),
)
_POSITIONS = 2**16  # of a part: about 20 MB
_ROUNDING = 1e-5  # nats by which the same weights differ in float32
# A log-ratio that dual clip, with verl's clip_ratio_c of 3, leaves.
_DUAL_CLIP_NATS = 1.0
# How much less likely training finds a token after the end than the rollout, if that did not sample it.
_OTHER_TOKEN = 3 * UNSAMPLED_NATS


def own_facts(
    micro_batches: Sequence[Tokens],
    epoch: int = 0,
    is_first: bool = True,
    scale: float | Tensor = 1.0,
    loss_agg_mode: str | None = None,
    earlier_bypassed: bool = True,
) -> Tensor:
    """What one rank knows of a mini-batch.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): The tokens of each: `response_mask`, `weight`, `log_prob`, and
            what else there is of `_READ`.
        epoch (int): The PPO epoch: later ones have the same responses again.
        is_first (bool): Whether it is the update's first mini-batch: its forward has the weights of the old log-probs.
        scale (float | Tensor): The loss scale of fp16 that the coefficients contain.
        loss_agg_mode (str, optional): verl's name for how the loss is aggregated, if it is known and all have the same.
        earlier_bypassed (bool): Whether earlier mini-batches of the update had the rollout's log-probs for the old.

    Returns:
        Tensor: float64 of shape (len(NAMES),).
    """
    has = frozenset(name for name in _READ if all(name in tokens for tokens in micro_batches))
    # A smaller part of a coefficient may be rounded off.
    rounding = 8 * torch.finfo(micro_batches[0]["coefficient"].dtype).eps if "coefficient" in has else 0.0
    of_parts = []
    for part in _parts(micro_batches):
        columns = dict(zip(_READ, torch.stack(_joined(part, has)), strict=True))
        of_parts.append(_of_part(columns, has, epoch, is_first, (scale, rounding), earlier_bypassed))
    found = of_parts[0] if len(of_parts) == 1 else torch.stack(of_parts).sum(0)
    return torch.cat([found, _of_weights(micro_batches, has, loss_agg_mode)])


def _parts(micro_batches: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    """The micro-batches, and parts of large ones, in lists of at most about `_POSITIONS` positions."""
    part: list[Tokens] = []
    width = max(tokens["response_mask"].shape[1] for tokens in micro_batches)
    rows, most = 0, max(_POSITIONS // width, 1)
    for tokens in micro_batches:
        count = len(tokens["response_mask"])
        for start in range(0, count, most):
            size = min(count - start, most)
            if rows + size > most and part:
                yield part
                part, rows = [], 0
            whole = size == count
            part.append(tokens if whole else {name: of[start : start + size] for name, of in tokens.items()})
            rows += size
    yield part


def _joined(micro_batches: Sequence[Tokens], has: Collection[str]) -> list[Tensor]:
    """The columns of `_READ` in single precision, padded with zeros, which stand for those that are missing."""
    width = max(tokens["response_mask"].shape[1] for tokens in micro_batches)
    found = {}
    for name in has:
        columns = [tokens[name] for tokens in micro_batches]
        found[name] = torch.cat([pad(x, (0, width - x.shape[1])) if x.shape[1] < width else x for x in columns]).float()
    missing = torch.zeros_like(found["log_prob"])
    return [found.get(name, missing) for name in _READ]


def _of_part(columns: Tokens, has: Collection[str], epoch: int, is_first: bool, loss: Any, earlier: bool) -> Tensor:
    """The sums of some rows, but for those of `_of_weights`: float64."""
    mask = columns["response_mask"] != 0
    values = torch.stack([columns[name] for name in BROKEN])
    broken = mask & (values - values != 0)  # NaN is unlike itself, and so is Inf − Inf
    sound = mask & ~broken[:3].any(0)  # the log-probs of training
    now, old = columns["log_prob"], columns["old_log_prob"]
    # verl's bypass mode takes the rollout's log-probs for the old ones.
    bypassed = mask[0, 0] & False
    if {"old_log_prob", "rollout_log_prob"} <= set(has):
        bypassed = ~(mask & (old != columns["rollout_log_prob"])).any() & (is_first or earlier)
    found = [torch.cat([mask.unsqueeze(0), broken]).any(2).sum(1)]
    if epoch == 0:
        policy = torch.where(bypassed, now, old) if "old_log_prob" in has else now
        # A rollout's log-probs are compared with those of the weights that it had.
        told = sound & (~bypassed | is_first)
        found += [_of_pairs(columns, has, policy, told & ~broken[4], told, bypassed, is_first)]
        found += [_sampled(columns, has, policy, mask), _nothing(2, mask)]
    else:
        found += [_nothing(len(PAIRS) * OF_PAIR + len(SAMPLED), mask), _gained(columns, has, sound)]
    found += [_of_loss(columns, has, mask, *loss), torch.stack([bypassed, torch.ones_like(bypassed)])]
    return torch.cat(found)


def _nothing(count: int, like: Tensor) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=like.device)


def _of_pairs(
    columns: Tokens,
    has: Collection[str],
    policy: Tensor,
    of_rollout: Tensor,
    sound: Tensor,
    bypassed: Tensor,
    is_first: bool,
) -> Tensor:
    """The sums of all pairs. Moments are made for each response, by one product, and then added up."""
    rollout, reference, old = (columns[name] for name in ("rollout_log_prob", "ref_log_prob", "old_log_prob"))
    if "after_eos" in has:  # what was added after the end was not sampled, and counts there
        of_rollout = of_rollout & ~((columns["after_eos"] != 0) & (rollout == 0))
    known = [("rollout_log_prob" in has, of_rollout), ("ref_log_prob" in has, sound)]
    known.append(("old_log_prob" in has, sound & ~bypassed))
    masks = [mask if is_known else torch.zeros_like(mask) for is_known, mask in known]
    a, b = torch.cat([rollout, reference, old]), torch.cat([policy, policy, columns["log_prob"]])
    mask = torch.cat(masks)
    zero = mask & (a == 0) & (b < -LEAST_NATS)
    mask = mask & ~zero
    planes = torch.zeros(len(mask), len(COLUMNS_OF_PAIR), mask.shape[1], device=mask.device)
    d, of_b, size, place, g, distance = planes.unbind(1)
    of_b.copy_(b).clamp_(min=LEAST_LOG_PROB).masked_fill_(~mask, 0.0)  # not a product: outside may be NaN
    a.clamp_(min=LEAST_LOG_PROB).masked_fill_(~mask, 0.0)
    torch.sub(a, of_b, out=d)
    torch.abs(d, out=size)
    count = mask.cumsum(1)
    length = count[:, -1:]
    torch.div((2 * count - length - 1) * mask, length.clamp(min=1), out=place)
    if "ref_log_prob" in has:
        moved = policy.clamp(min=LEAST_LOG_PROB) - reference.clamp(min=LEAST_LOG_PROB)  # as d
        g[: len(policy)] = moved.masked_fill_(~mask[: len(policy)], 0.0)
        torch.abs(d + g, out=distance)
    totals, products = planes.sum(2).double(), torch.bmm(planes, planes.transpose(1, 2)).double()
    unsure = mask & (of_b < -LEAST_NATS)
    told = a > LEAST_LOG_PROB  # all smaller ones are the same here
    repeated = told & pad((a.diff() == 0) & (of_b.diff().abs() > FAR_NATS), (1, 0))
    flags = [mask, d > LEAST_NATS, d < -LEAST_NATS, zero, unsure, unsure & told & (size < _ROUNDING), repeated]
    flags_of_rows = torch.stack(flags, 1).sum(2)
    centred = planes[:, :2] - (totals[:, :2] / length.clamp(min=1)).float().unsqueeze(2)
    torch.mul(centred, mask.unsqueeze(1), out=centred)
    variances = torch.bmm(centred, centred.transpose(1, 2)).double()
    of_rows = [totals, products.flatten(1), flags_of_rows]
    of_rows += _of_rows(length, totals, variances, _crossed(centred.bfloat16()))
    rollout_sums, reference_sums, old_sums = torch.cat(of_rows, 1).view(3, len(policy), OF_PAIR).sum(1)
    others = torch.zeros_like(old_sums)
    return torch.cat([rollout_sums, reference_sums, *((old_sums, others) if is_first else (others, old_sums))])


def _crossed(centred: Tensor) -> Tensor:
    """Σ d[t]·b[t + k] and Σ b[t]·b[t + k] of each response, for each of `SHIFTS`: float64, (rows, 2, shifts)."""
    most, width = SHIFTS[-1], centred.shape[2]
    moved = pad(centred[:, 1], (most, most)).unfold(1, width, 1)  # (rows, 2·most + 1, width)
    found = torch.bmm(centred, moved.transpose(1, 2)).double()
    return torch.cat([found[:, :, :most], found[:, :, most + 1 :]], 2)


def _of_rows(count: Tensor, totals: Tensor, variances: Tensor, crossed: Tensor) -> list[Tensor]:
    """The sums of `ROWS_OF_PAIR` of each response: float64, each of shape (rows, some sums)."""
    size, distance, n = totals[:, 2], totals[:, 5], count[:, 0]
    dd, db, _, bb = variances.flatten(1).unbind(1)
    ab = bb + db
    aa = ab + db + dd
    norm = (aa * bb).clamp(min=0).sqrt()
    told = (n >= ROW_TOKENS) & (torch.minimum(aa, bb) > LEAST_NATS * n)
    best, which = (crossed.sum(1) / norm.unsqueeze(1)).max(1)
    moved = torch.where(told & (best > ab / norm + MOVED), which, -1)
    far = size > FAR_NATS * n
    nearer = (distance < size / LEVEL) & (size > LEAST_NATS * n)
    sums = torch.stack([n > 0, far, far * n, far * size, nearer, told, told & (ab < UNRELATED * norm), aa, ab, bb], 1)
    shifts = torch.arange(len(SHIFTS), device=n.device)
    return [sums.double(), moved.unsqueeze(1) == shifts, crossed.flatten(1)]


def _sampled(columns: Tokens, has: Collection[str], policy: Tensor, mask: Tensor) -> Tensor:
    """`SAMPLED`: whether the tokens that are trained are those that the rollout sampled."""
    trained = mask & (columns["weight"] != 0)
    after = trained & (columns["after_eos"] != 0)
    if "rollout_log_prob" not in has:
        return pad(torch.stack([trained, trained & False, after]).sum((1, 2)), (0, 4))
    rollout = columns["rollout_log_prob"]
    is_zero = rollout == 0
    unlogged = trained & is_zero & (policy < UNSAMPLED_NATS)
    # A log-prob that training does not contradict shows that a token was sampled, even after an end.
    after = after & (is_zero | (policy < rollout + _OTHER_TOKEN))
    remaining = mask.flip(1).cumsum(1).flip(1)
    is_trained = remaining[:, :1] > 0
    logged = is_trained & ~is_zero & (rollout - rollout == 0)
    lost = (logged & (remaining == 0)).any(1, keepdim=True)
    tokens = torch.stack([trained, unlogged & ~after, after, logged, logged & mask]).sum((1, 2))
    return torch.cat([tokens, torch.cat([is_trained, lost], 1).sum(0)])


def _gained(columns: Tokens, has: Collection[str], sound: Tensor) -> Tensor:
    """What later PPO epochs have gained: Σ w·A·(log-prob now − old), and Σ |…|."""
    if not {"advantage", "old_log_prob"} <= set(has):
        return _nothing(2, sound)
    moved = (columns["log_prob"] - columns["old_log_prob"]).clamp_(-1, 1)
    gained = torch.where(sound, moved * columns["weight"] * columns["advantage"], 0.0).nan_to_num_(
        posinf=0.0, neginf=0.0
    )
    return torch.stack([gained, gained.abs()]).sum((1, 2), dtype=torch.float64)


def _of_loss(columns: Tokens, has: Collection[str], mask: Tensor, scale: float | Tensor, rounding: float) -> Tensor:
    """`LOSS`: whether coefficients are −w·A·ratio beside the KL loss's, where all losses of policy gradients agree."""
    if not {"coefficient", "advantage"} <= set(has):
        return _nothing(len(LOSS), mask)
    near = mask & (columns["policy_loss_mask"] != 0) if "policy_loss_mask" in has else mask
    coefficient, kl = columns["coefficient"] / scale, columns["kl_coefficient"]
    unweighted = columns["weight"] * -columns["advantage"]
    none = mask & False
    clipped = right = corrected = along = none
    if "old_log_prob" in has:
        log_ratio = torch.where(mask, columns["log_prob"] - columns["old_log_prob"], 0.0)
        # Some losses take the ratio of the whole response.
        of_row = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        # Dual clip takes larger ratios on either side.
        is_told = (log_ratio * of_row > 0) & (log_ratio.abs() > FAR_NATS) & (log_ratio <= _DUAL_CLIP_NATS)
        clipped = near & (coefficient == 0) & (unweighted != 0) & is_told
        right = clipped & (log_ratio * unweighted < 0)
        near = near & (torch.maximum(log_ratio.abs(), of_row.abs()) <= NEAR_NATS)
        unweighted = unweighted * log_ratio.exp()
    expected = unweighted
    if "rollout_is_weight" in has:
        expected = unweighted * columns["rollout_is_weight"]
        if {"old_log_prob", "rollout_log_prob"} <= set(has):
            corrected, along = _importance(columns, mask)
    planes = torch.stack([coefficient, expected, kl, unweighted])
    sums = planes.sum(0)
    near = near & (coefficient != 0) & (sums - sums == 0)
    planes.masked_fill_(~near, 0.0)
    planes[2].mul_(planes[2].abs() > rounding * planes[1].abs())
    flat = planes.flatten(1)
    expected, kl, rest = planes[1], planes[2], planes[0] - planes[2]
    told = expected != 0
    # Rounding of the KL loss's part does not count.
    unfit = told & ((rest - expected).abs() > (FACTOR + rounding) * expected.abs() + LEAST_NATS * kl.abs())
    counts = torch.stack([told, unfit, unfit & (rest * expected < 0), clipped, right, corrected, along])
    return torch.cat([(flat @ flat.T).flatten().double(), counts.sum((1, 2))])


def _importance(columns: Tokens, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where importance weights tell in which direction they correct, and where that is the right one."""
    log_weight = torch.where(mask, columns["rollout_is_weight"], 1.0).log()
    difference = columns["old_log_prob"] - columns["rollout_log_prob"]
    # A weight of the whole response says nothing of its tokens.
    own = log_weight - log_weight.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    told = mask & (torch.stack([difference, log_weight, own]).abs().amin(0) > NEAR_NATS)
    return told, told & (difference * log_weight > 0)


def _of_weights(micro_batches: Sequence[Tokens], has: Collection[str], mode: str | None) -> Tensor:
    """The sum of weights, the part of the responses that have a token, and whether the sum is known."""
    if mode not in MODES:
        return _nothing(3, micro_batches[0]["weight"])
    sums = []
    for tokens in micro_batches:
        mask = tokens["response_mask"]
        weight = tokens["weight"] * (tokens["policy_loss_mask"] if "policy_loss_mask" in has else mask)
        sums += [(weight.amax(1) if mode == MODES[-1] else weight).sum(), mask.any(1).sum()]
    of_weights, filled = torch.stack(sums).double().view(-1, 2).sum(0)
    rows = sum(len(tokens["weight"]) for tokens in micro_batches)
    return torch.stack([of_weights, filled / rows, filled > 0])
