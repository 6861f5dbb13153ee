# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each rank sums up of a mini-batch for the judge: the sums that gradloc/facts.py names.

Columns are put together over the micro-batches and compared at once: few operations, in parts that bound the memory
(tests/unit/test_facts.py counts both). Tensors are of shape (rows, response length). Nothing here waits for the device.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..facts import BROKEN, LOSS, MODES, OF_PAIR, PAIRS, PRODUCTS_OF_LOSS, SAMPLED, SHIFTS
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
_POSITIONS = 2**16  # of a part: about 30 MB
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
    earlier = is_first or earlier_bypassed
    of_parts = [
        _of_part(_joined(part, has), has, epoch, is_first, (scale, rounding), loss_agg_mode, earlier)
        for part in _parts(micro_batches)
    ]
    found = of_parts[0] if len(of_parts) == 1 else torch.stack(of_parts).sum(0)
    rows = sum(len(tokens["weight"]) for tokens in micro_batches) if loss_agg_mode in MODES else math.inf
    filled = found[:1] / rows
    return torch.cat([found, filled, filled > 0, _of_entropy(micro_batches, scale)])


def _of_entropy(micro_batches: Sequence[Tokens], scale: float | Tensor) -> Tensor:
    """Σ c·e and Σ e² of the entropy bonus's coefficients; zeros without one."""
    names = ("entropy_coefficient", "entropy_expected")
    if not all(name in tokens for name in names for tokens in micro_batches):
        return torch.zeros(2, device=micro_batches[0]["weight"].device)
    c, e = (torch.cat([tokens[name].flatten() for tokens in micro_batches]).float() for name in names)
    return torch.stack([c / scale, e]) @ e


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


def _joined(micro_batches: Sequence[Tokens], has: Collection[str]) -> Tensor:
    """The columns of `_READ` in single precision, padded with zeros, which stand for those that are missing."""
    width = max(tokens["response_mask"].shape[1] for tokens in micro_batches)
    found = []
    for tokens in micro_batches:
        missing = tokens["log_prob"] if len(has) == len(_READ) else torch.zeros_like(tokens["log_prob"])
        columns = torch.stack([tokens[name] if name in has else missing for name in _READ])
        found.append(pad(columns, (0, width - columns.shape[2])) if columns.shape[2] < width else columns)
    return torch.cat(found, 1).float()


def _of_part(
    values: Tensor, has: Collection[str], epoch: int, is_first: bool, loss: Any, mode: str | None, earlier: bool
) -> Tensor:
    """The sums of some rows, but for the last two: float64. Of masks, a > b is a without b, in one operation."""
    columns, is_set = (dict(zip(_READ, each, strict=True)) for each in (values, values != 0))
    mask = is_set["response_mask"]
    none, nothing = mask & False, torch.zeros(OF_PAIR, dtype=torch.float64, device=mask.device)
    now, old, rollout = (columns[name] for name in ("log_prob", "old_log_prob", "rollout_log_prob"))
    broken = values[: len(BROKEN)] - values[: len(BROKEN)] != 0  # NaN is unlike itself, and so is Inf − Inf
    sound = mask > broken[:3].any(0)  # the log-probs of training
    # verl's bypass mode takes the rollout's log-probs for the old ones.
    bypassed = none[0, 0]
    if earlier and {"old_log_prob", "rollout_log_prob"} <= set(has):
        bypassed = ~(mask & (old != rollout)).any()
    flags: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    if epoch == 0:
        policy = torch.where(bypassed, now, old) if "old_log_prob" in has else now
        flags = _sampled(columns, is_set, policy, broken[-1] if "rollout_log_prob" in has else None)
        # A rollout's log-probs are compared with those of the weights that it had.
        differs = sound > bypassed
        told = sound if is_first else differs
        # What was added after the end was not sampled, and counts there.
        added = is_set["after_eos"] > is_set["rollout_log_prob"]
        pairs = {
            "rollout": (rollout, policy, told > (broken[-1] | added)),
            "reference": (columns["ref_log_prob"], policy, told),
            "old" if is_first else "step": (old, now, differs),
        }
        known = [name in has for name in ("rollout_log_prob", "ref_log_prob", "old_log_prob")]
        if any(known):
            sums = _of_pairs(dict(compress(pairs.items(), known)))
    elif {"advantage", "old_log_prob"} <= set(has):
        sums["gained"] = _gained(columns, sound)
    if {"coefficient", "advantage"} <= set(has):
        of_loss, sums["loss"] = _of_loss(columns, is_set, has, *loss)
        flags |= of_loss
    if mode in MODES:
        weights = columns["weight"] * columns["policy_loss_mask" if "policy_loss_mask" in has else "response_mask"]
        sums["weights"] = (weights.amax(1) if mode == MODES[-1] else weights).sum(dtype=torch.float64).view(1)
    planes = [mask, *(broken & mask), *(flags.get(name, none) for name in (*SAMPLED, *LOSS))]
    counts = torch.stack(planes).sum(2)
    counts *= counts[0] > 0  # of responses that are trained
    counts[: 1 + len(BROKEN) + 2].clamp_(max=1)  # those that count responses
    sizes = {"loss": len(PRODUCTS_OF_LOSS), **dict.fromkeys(PAIRS, OF_PAIR), "gained": 2, "weights": 1}
    found = [sums.get(name, nothing[:size]) for name, size in sizes.items()]
    return torch.cat([counts.sum(1), *found, pad(bypassed.view(1), (0, 1), value=1)])


def _sampled(columns: Tokens, is_set: Tokens, policy: Tensor, broken: Tensor | None) -> dict[str, Tensor]:
    """`SAMPLED`: whether the tokens that are trained are those that the rollout sampled.

    Args:
        broken (Tensor, optional): Where the rollout's log-probs are not finite; None if there are none.
    """
    mask, said, rollout = is_set["response_mask"], is_set["rollout_log_prob"], columns["rollout_log_prob"]
    trained = mask & is_set["weight"]
    after = trained & is_set["after_eos"]
    if broken is None:
        return {"trained": trained, "after_end": after}
    # A log-prob that training does not contradict shows that a token was sampled, even after an end.
    after = after & (said <= (policy < rollout + _OTHER_TOKEN))
    unlogged = (trained > said) & (policy < UNSAMPLED_NATS)
    logged = said > broken
    count = mask.cumsum(1)
    lost = (logged > mask) & (count == count[:, -1:])
    return {
        **{"trained_rows": mask, "last_lost": lost, "trained": trained, "unlogged": unlogged > after},
        **{"after_end": after, "logged": logged, "both": logged & mask},
    }


def _of_pairs(pairs: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
    """The sums of all pairs. Those of each response are made first, and then added up.

    Args:
        pairs (Mapping): By name, a, b and a mask: first the rollout's, then the reference's, if they are known.
    """
    of_a, of_b, masks = zip(*pairs.values(), strict=True)
    rows, width = masks[0].shape
    mask = torch.cat(masks)
    a, b = both = torch.cat([*of_a, *of_b]).clamp_(min=LEAST_LOG_PROB).view(2, len(mask), width)
    zero = mask & (a == 0) & (b < -LEAST_NATS)
    mask = mask > zero
    both.masked_fill_(~mask, 0.0)  # not a product: outside may be NaN
    if {"rollout", "reference"} <= set(pairs):
        way = (both[:, :rows] - a[rows : 2 * rows]) * mask[:rows]
        r, g = pad(way, (0, 0, 0, len(mask) - rows))
    else:
        r, g = torch.zeros_like(both)
    d = a - b
    size = d.abs()
    unsure, told = b < -LEAST_NATS, a > LEAST_LOG_PROB  # all smaller ones are the same here
    step_a, step_b = both.diff()
    repeated = told & pad((step_a == 0) & (step_b.abs() > FAR_NATS), (1, 0))
    flags = [d > LEAST_NATS, d < -LEAST_NATS, zero, unsure, unsure & told & (size < _ROUNDING), repeated]
    planes = torch.stack([a, mask.cumsum(1), mask, size, d, b, g, r.abs(), *flags], 1)
    return dict(zip(pairs, _of_planes(planes).view(len(pairs), rows, OF_PAIR).sum(1, dtype=torch.float64), strict=True))


def _of_planes(planes: Tensor) -> Tensor:
    """The sums of a pair, for each response.

    Args:
        planes (Tensor): a, the number of tokens so far, the mask, |d|, d, b, g, |r|, and flags, of shape (rows, planes,
            response length). Outside of the mask, all but the second are 0.

    Returns:
        Tensor: float32 of shape (rows, OF_PAIR).
    """
    most, width = SHIFTS[-1], planes.shape[2]
    totals, products = planes.sum(2), torch.bmm(planes[:, 4:7], planes[:, 4:7].mT)
    n, size, distance = totals[:, 2].clamp(min=1), totals[:, 3], totals[:, 7]
    means = totals[:, :6] / n.unsqueeze(1)
    centred = torch.addcmul(planes[:, :6], planes[:, 2:3], means.unsqueeze(2), value=-1)
    moments = torch.bmm(centred, centred.mT)
    aa, ab, bb = moments[:, 0, 0], moments[:, 0, 5], moments[:, 5, 5]
    norm, least = (aa * bb).sqrt(), LEAST_NATS * n
    told = (n >= ROW_TOKENS) & (torch.minimum(aa, bb) > least)
    far = means[:, 3] > FAR_NATS
    nearer = (LEVEL * distance < size) & (size > least)
    later = 2 * moments[:, 1, 3] / n  # centred |d| adds up to 0, so that the mean of the other does not matter
    sums = torch.stack([means[:, 2], far, nearer, told, told & (ab < UNRELATED * norm), aa, ab, bb, later], 1)
    neighbours = torch.bmm(centred[:, 4:], pad(centred[:, 5], (most, most)).unfold(1, width, 1).mT)
    shifted = neighbours.sum(1)  # a[t]·b[t + k]
    shifted[:, most].add_(norm, alpha=MOVED)  # which others must exceed
    moved = told.unsqueeze(1) & (shifted.argmax(1, keepdim=True) == torch.arange(2 * most + 1, device=n.device))
    of_shifts = [part for each in (moved, *neighbours.unbind(1)) for part in (each[:, :most], each[:, most + 1 :])]
    return torch.cat([totals[:, 2:], products.flatten(1), sums, far.unsqueeze(1) * totals[:, 2:4], *of_shifts], 1)


def _gained(columns: Tokens, sound: Tensor) -> Tensor:
    """What later PPO epochs have gained: Σ w·A·(log-prob now − old), and Σ |…|."""
    moved = (columns["log_prob"] - columns["old_log_prob"]).clamp_(-1, 1)
    gained = torch.where(sound, moved * columns["weight"] * columns["advantage"], 0.0).nan_to_num_(
        posinf=0.0, neginf=0.0
    )
    return torch.stack([gained, gained.abs()]).sum((1, 2), dtype=torch.float64)


def _of_loss(
    columns: Tokens, is_set: Tokens, has: Collection[str], scale: float | Tensor, rounding: float
) -> tuple[dict[str, Tensor], Tensor]:
    """`LOSS`: whether coefficients are −w·A·ratio beside the KL loss's, where all losses of policy gradients agree."""
    mask, moves = is_set["response_mask"], is_set["coefficient"]
    old, importance, rollout = (columns[name] for name in ("old_log_prob", "rollout_is_weight", "rollout_log_prob"))
    now = columns["log_prob"] if "old_log_prob" in has else old
    logs = torch.stack([now - old, importance.log()]).masked_fill_(~mask, 0.0)
    (log_ratio, log_weight), (of_row, of_weights) = logs, logs.sum(2, keepdim=True) / mask.sum(1, keepdim=True)
    apart = old - rollout
    sizes = torch.stack([log_ratio, of_row.expand_as(apart), apart, log_weight, log_weight - of_weights]).abs()
    near = mask & is_set["policy_loss_mask"] if "policy_loss_mask" in has else mask
    z = columns["weight"] * -columns["advantage"]
    # Some losses take the ratio of the whole response, and dual clip takes larger ratios on either side.
    is_told = [log_ratio * of_row.sign() > FAR_NATS, log_ratio <= _DUAL_CLIP_NATS]
    clipped = torch.stack([near > moves, z != 0, *is_told]).all(0)
    flags = {"clipped": clipped, "clipped_right": clipped & (log_ratio * z < 0)}
    if {"old_log_prob", "rollout_log_prob", "rollout_is_weight"} <= set(has):
        # A weight of the whole response says nothing of its tokens.
        corrected = mask & (sizes[2:] > NEAR_NATS).all(0)
        flags |= {"corrected": corrected, "along": corrected & (apart * log_weight > 0)}
    z = z * log_ratio.exp()
    e = z * importance if "rollout_is_weight" in has else z
    planes = torch.stack([columns["coefficient"] / scale, e, columns["kl_coefficient"], z])
    fits = [near, moves, *(sizes[:2] <= NEAR_NATS)]
    sizes = planes.abs()
    planes.masked_fill_(~torch.stack([*fits, sizes.sum(0) < math.inf]).all(0), 0.0)
    c, e, k, _ = planes
    rounded = sizes[2] <= rounding * sizes[1]
    for kl in (k, sizes[2]):
        kl.masked_fill_(rounded, 0.0)
    told, rest = e != 0, c - k
    # Rounding of the KL loss's part does not count.
    most = torch.add((FACTOR + rounding) * sizes[1], sizes[2], alpha=LEAST_NATS)
    unfit = told & ((rest - e).abs() > most)
    flags |= {"told": told, "unfit": unfit, "opposite": unfit & (rest * e < 0)}
    return flags, (planes.flatten(1) @ planes.flatten(1).T).flatten()
