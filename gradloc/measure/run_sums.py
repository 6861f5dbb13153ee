# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each rank sums up of a mini-batch for the checks of the run, which judge the sums of all ranks.

`micro_batches` are the tokens of each: tensors of shape (rows, response length). Nothing here waits for the device.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..sums import (
    APART_GAP,
    BOUNDED,
    COLUMN_SUMS,
    COLUMNS,
    CORRELATED_NATS,
    LARGEST,
    LEAST_LEVEL,
    MODES,
    ONE_SIDE_NATS,
    STALE_GAP,
    STALE_RATIO,
    SUMS,
)

# Tokens whose ratio is closer to 1 than this, in nats: for them all losses of policy gradients have the same slope.
_NEAR = 0.02
# At most about this many tokens of a rank are looked at.
_SAMPLE = 2**16


def own_sums(micro_batches: Sequence[Mapping[str, Tensor]], first: bool, bypass: bool = True) -> Tensor:
    """What one rank knows of a mini-batch's log-probs, for `RunChecks.take_in`.

    Only response tokens with a weight in the loss and finite log-probs count; an exact zero of the rollout is none, if
    the policy has less. The policy's log-probs are those before the update. Where there are none of their own (verl's
    bypass mode takes the rollout's for them), those of the update's first mini-batch are taken, which has changed no
    weight yet.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): With `response_mask`, `weight`, `log_prob`, `unsampled` (bool:
            the policy did not produce the token), and if available `old_log_prob`, `ref_log_prob`, `rollout_log_prob`.
        first (bool): Whether it is the update's first mini-batch.
        bypass (bool): Whether all earlier mini-batches of the update had the rollout's log-probs for the old ones.

    Returns:
        Tensor: float64 of shape (len(SUMS),), zeros without rollout log-probs.
    """
    total = torch.zeros(len(SUMS), dtype=torch.float64, device=micro_batches[0]["weight"].device)
    for tokens in micro_batches:
        if "rollout_log_prob" in tokens and ("old_log_prob" in tokens or first):
            total += _of_micro_batch(tokens, first, bypass)
    return total


def _of_micro_batch(tokens: Mapping[str, Tensor], first: bool, bypass: bool) -> Tensor:
    log_prob, rollout = tokens["log_prob"].double(), tokens["rollout_log_prob"].double()
    weighted = tokens["response_mask"].bool() & (tokens["weight"] != 0)
    unsampled = weighted & tokens["unsampled"]
    counted = weighted & ~unsampled & rollout.isfinite()
    differing = torch.zeros_like(counted)
    policy = log_prob
    if "old_log_prob" in tokens:
        old = tokens["old_log_prob"].double()
        differing = counted & (old != rollout)
        bypassed = ~differing.any()
        policy = torch.where(bypassed, log_prob, old) if first else old
        if bypass and not first:
            counted = counted & ~bypassed
    # An exact zero that the policy contradicts is no log-prob.
    counted = counted & policy.isfinite() & ~((rollout == 0) & (policy < -ONE_SIDE_NATS))
    if "ref_log_prob" in tokens:
        counted = counted & tokens["ref_log_prob"].isfinite()

    difference = torch.where(counted, (rollout - policy).clamp(-LARGEST, LARGEST), 0.0)
    gap = difference.abs()
    limited = difference.clamp(-CORRELATED_NATS, CORRELATED_NATS)
    level = torch.where(counted, ((rollout + policy) / 2).clamp(min=LEAST_LEVEL), 0.0)
    count = counted.sum(1)
    of_rows, bounded = gap.sum(1), gap.clamp(max=BOUNDED)
    mean_gap = of_rows / count  # NaN without a token, which is over nothing
    far = mean_gap > APART_GAP
    sums = {
        "weighted": weighted.sum(),
        "unsampled": unsampled.sum(),
        "differing": differing.sum(),
        "tokens": count.sum(),
        "gap": gap.sum(),
        "bounded": bounded.sum(),
        "larger": (difference > ONE_SIDE_NATS).sum(),
        "smaller": (difference < -ONE_SIDE_NATS).sum(),
        "difference": limited.sum(),
        "difference_square": limited.square().sum(),
        "level": level.sum(),
        "level_square": level.square().sum(),
        "product": (limited * level).sum(),
        "responses": (count > 0).sum(),
        "far": far.sum(),
        "far_tokens": torch.where(far, count, 0).sum(),
        "far_gap": torch.where(far, of_rows, 0.0).sum(),
        "positive": (counted & (rollout > ONE_SIDE_NATS)).sum(),
    }
    if "old_log_prob" in tokens:
        own = counted & ~bypassed & log_prob.isfinite()
        which = "own" if first else "step"
        sums[f"{which}_tokens"], columns = own.sum(), {f"{which}_gap": old - log_prob}
        if first:
            columns |= {"own_to_rollout": rollout - log_prob, "own_old_to_rollout": rollout - old}
        for name, each in columns.items():
            sums[name] = torch.where(own, each.clamp(-LARGEST, LARGEST).abs(), 0.0).sum()
    if "ref_log_prob" in tokens:
        reference = tokens["ref_log_prob"].double()
        distance = torch.where(counted, (rollout - reference).clamp(-LARGEST, LARGEST).abs(), 0.0)
        mean_distance = distance.sum(1) / count
        moved = torch.where(counted, (policy - reference).clamp(-LARGEST, LARGEST), 0.0)
        limited_move = moved.clamp(-CORRELATED_NATS, CORRELATED_NATS)
        stale = (mean_gap > STALE_GAP) & (mean_distance < STALE_RATIO * mean_gap)
        fresh = (mean_distance > STALE_GAP) & (mean_gap < STALE_RATIO * mean_distance)
        either = (mean_gap > STALE_GAP) | (mean_distance > STALE_GAP)
        of_stale = stale.unsqueeze(1)
        sums |= {
            "distance": distance.sum(),
            "moved": moved.abs().sum(),
            "moved_square": limited_move.square().sum(),
            "along": (limited * limited_move).sum(),
            "stale": stale.sum(),
            "fresh": fresh.sum(),
            "unclear": (either & ~stale & ~fresh).sum(),
            "stale_tokens": (counted & of_stale).sum(),
            "stale_gap": torch.where(of_stale, gap, 0.0).sum(),
            "stale_distance": torch.where(of_stale, distance, 0.0).sum(),
        }
    zero = torch.zeros((), dtype=torch.float64, device=log_prob.device)
    return torch.stack([sums[name].double() if name in sums else zero for name in SUMS])


def own_columns(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What one rank knows of the columns of a mini-batch, for `RunChecks.take_in`.

    Returns:
        Tensor: float64 of shape (COLUMN_SUMS,).
    """
    total = torch.zeros(COLUMN_SUMS, dtype=torch.float64, device=micro_batches[0]["log_prob"].device)
    for tokens in micro_batches:
        mask = tokens["response_mask"].bool()
        found = [mask.any(1).sum()]
        for name in COLUMNS:
            found.append((mask & ~tokens[name].isfinite()).any(1).sum() if name in tokens else mask.new_zeros(()))
        size = tokens.get("advantage", torch.zeros_like(mask)).double().abs()
        mean = torch.where(mask, size, 0.0).sum(1) / mask.sum(1)
        counted = mean.isfinite() & (mean > 0)
        log = torch.where(counted, mean.log(), 0.0)
        found += [log.sum(), log.square().sum(), counted.sum()]
        total += torch.stack([each.double() for each in found])
    return total


def own_loss_figures(
    micro_batches: Sequence[Mapping[str, Tensor]], scale: float | Tensor = 1.0, loss_agg_mode: str | None = None
) -> Tensor:
    """What one rank knows of the scale of a mini-batch's loss, for `loss_scale_warning`.

    The expected coefficient of a token whose ratio is near 1 is −w·A·ratio, the KL loss's part apart. Clipped tokens
    have none and do not count.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): With `response_mask`, `weight`, `log_prob`, `coefficient` and
            `advantage`, and if available `old_log_prob`, `kl_coefficient`, `rollout_is_weight`, and `policy_loss_mask`:
            a token that the policy loss rejects may have a weight in other terms, which adds to the 1 of the tokens
            that it keeps.
        scale (float | Tensor): The loss scale of fp16 that the coefficients contain.

    Returns:
        Tensor: float64 of shape (len(LOSS_FIGURES),): the sum of weights that should be 1 (NaN if the mode promises
            none, or is None), the mode by number, the number of tokens of which coefficient over expected coefficient
            is known, and its 10%, 50% and 90% quantiles (NaN without any), the number of micro-batches, the sum of the
            shares of their positions that are tokens, and sums of importance weights and of the KL loss.
    """
    mode = MODES.index(loss_agg_mode) if loss_agg_mode in MODES else -1
    total = micro_batches[0]["weight"].new_full((1,), math.nan if mode < 0 else 0.0, dtype=torch.float64)
    sums, ratios = total.new_zeros(9), []
    for tokens in micro_batches:
        weight = torch.where(_in_policy_loss(tokens), tokens["weight"].double(), 0.0)
        total += (weight.amax(1) if loss_agg_mode == "seq-mean-token-sum" else weight).sum()
        if "coefficient" in tokens and "advantage" in tokens:
            parts = _parts(tokens, scale)
            ratios.append(_coefficient_ratios(tokens, *parts))
            sums += torch.cat([_weight_sums(tokens, ratios[-1]), _kl_sums(tokens, *parts)])
    found = torch.cat([ratio.flatten() for ratio in ratios]) if ratios else total.new_full((1,), math.nan)
    found = found[:: max(len(found) // _SAMPLE, 1)]
    # One by one: a tensor of the three would be copied to the device, and the host would wait for it.
    quantiles = torch.stack([torch.nanquantile(found, share) for share in (0.1, 0.5, 0.9)])
    count = found.isfinite().sum().double().unsqueeze(0)
    filled = torch.stack([tokens["response_mask"].double().mean() for tokens in micro_batches]).sum().unsqueeze(0)
    mode_number, batches = (total.new_full((1,), number) for number in (mode, len(micro_batches)))
    return torch.cat([total, mode_number, count, quantiles, batches, filled, sums])


def _weight_sums(tokens: Mapping[str, Tensor], ratio: Tensor) -> Tensor:
    """Whether the rollout's importance weights are in the loss, and correct it; `ratio` is by `_coefficient_ratios`."""
    if not {"rollout_is_weight", "old_log_prob", "rollout_log_prob"} <= tokens.keys():
        return ratio.new_zeros(5)
    log_weight, log_ratio = tokens["rollout_is_weight"].double().log(), ratio.log()
    known = (log_ratio + log_weight).isfinite()
    parts = [torch.where(known, each.abs(), 0.0).sum() for each in (log_ratio, log_ratio + log_weight)]
    difference = tokens["old_log_prob"].double() - tokens["rollout_log_prob"].double()
    mask = tokens["response_mask"].bool()
    mean = torch.where(mask, log_weight, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    # A weight of the whole response says nothing of its tokens.
    apart = mask & (difference.abs() > _NEAR) & (log_weight.abs() > _NEAR) & ((log_weight - mean).abs() > _NEAR)
    along = apart & (difference.sign() == log_weight.sign())
    return torch.stack([known.sum().double(), *parts, apart.sum().double(), along.sum().double()])


def _kl_sums(tokens: Mapping[str, Tensor], coefficient: Tensor, expected: Tensor, near: Tensor) -> Tensor:
    """Whether the KL loss is in the loss as it should be."""
    if "kl_coefficient" not in tokens:
        return coefficient.new_zeros(4)
    kl = tokens["kl_coefficient"].double()
    # Clearly over what is rounded off the sum of the two.
    told = near & (kl.abs() > 8 * torch.finfo(tokens["coefficient"].dtype).eps * expected.abs())
    kl, rest = (torch.where(told, each, 0.0) for each in (kl, coefficient - expected))
    return torch.stack([told.sum().double(), kl.square().sum(), rest.square().sum(), (kl * rest).sum()])


def _in_policy_loss(tokens: Mapping[str, Tensor]) -> Tensor:
    mask = tokens["response_mask"].bool()
    return mask & tokens["policy_loss_mask"].bool() if "policy_loss_mask" in tokens else mask


def _parts(tokens: Mapping[str, Tensor], scale: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients, the policy loss's expected part of them, and where that is known: with a ratio near 1."""
    near = _in_policy_loss(tokens)
    expected = -tokens["weight"].double() * tokens["advantage"].double()
    if "old_log_prob" in tokens:
        log_ratio = tokens["log_prob"].double() - tokens["old_log_prob"].double()
        expected, near = expected * log_ratio.exp(), near & (log_ratio.abs() <= _NEAR)
    if "rollout_is_weight" in tokens:
        expected = expected * tokens["rollout_is_weight"].double()
    coefficient = tokens["coefficient"].double() / scale
    return coefficient, expected, near & coefficient.isfinite() & expected.isfinite()


def _coefficient_ratios(tokens: Mapping[str, Tensor], coefficient: Tensor, expected: Tensor, near: Tensor) -> Tensor:
    """Coefficient over expected coefficient, the KL loss's part apart; NaN where it is not known."""
    if "kl_coefficient" in tokens:
        coefficient = coefficient - tokens["kl_coefficient"].double()
    ratio = coefficient / expected
    return torch.where(near & (coefficient != 0) & ratio.isfinite(), ratio, math.nan)
