# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often each rule holds for the ordinary tokens of a mini-batch, on all ranks."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..fsdp import collectives
from ..measure.micro_batch import MicroBatch
from ..measure.token_weights import movable
from .sources import (
    CONFIDENT,
    LARGE_ADVANTAGE,
    LARGE_WEIGHT,
    MISALIGNED_FRACTION,
    RULES,
    SEQUENCE_RATIO,
    TOKEN_RATIO,
    UNLIKELY,
    UNSAMPLED,
    Medians,
)
from .token_facts import find_mismatch, find_turns, off_the_rollout

Tokens = Mapping[str, Tensor]
# The name of the share of tokens whose log-probs of rollout and old policy differ by more than this, in nats.
APART = "apart"
APART_NATS = 0.1

# (index of the micro-batch in its rank's mini-batch, row in it, position in the response).
Place = tuple[int, int, int]


def ordinary_shares(
    micro_batches: Sequence[MicroBatch],
    culprits: Collection[Place],
    medians: Medians,
    scale: float = 1.0,
    sequence_parallel_size: int = 1,
) -> dict[str, float | None]:
    """The share of ordinary tokens for which each rule of `RULES` holds, the same on every rank. A collective call.

    Ordinary tokens are the response tokens that can move and are no culprits. Gradients of single tokens are known for
    those that the search measured only, which are not a fair sample. So two rules differ:

    - `nonfinite` counts the tokens whose log-prob or coefficient is not finite: a lower bound, because a NaN that only
      the backward pass makes is not seen.
    - `layer` is not known.

    Args:
        micro_batches (Sequence[MicroBatch]): This rank's.
        culprits (Collection): This rank's culprits.
        medians (Mapping): What `token_medians` returned; if it has `least_advantage`, `advantage` holds only where |A|
            is not under that.
        scale (float): The loss scale.
        sequence_parallel_size (int): How many neighbouring ranks have the same tokens.

    Returns:
        dict: By rule, and for `APART`; None where it is not known, or where no token is ordinary.
    """
    by_rank = collectives.exchange(lambda: _counts(micro_batches, culprits, medians, scale))
    total, *holding = torch.stack(by_rank[::sequence_parallel_size]).sum(0).tolist()
    found = {name: count / total if total else None for name, count in zip(HOLDS, holding, strict=True)}
    if not all({"rollout_log_prob", "old_log_prob"} <= each.tokens.keys() for each in micro_batches):
        found[APART] = None
    return {name: found.get(name) for name in (*(rule.name for rule in RULES), APART)}


def is_apart(rollout_log_prob: float | None, old_log_prob: float | None) -> bool | None:
    """Whether two log-probs of a token differ by more than `APART_NATS`, or by NaN; None if one is not known."""
    if rollout_log_prob is None or old_log_prob is None:
        return None
    return not abs(rollout_log_prob - old_log_prob) <= APART_NATS


def _counts(micro_batches: Sequence[MicroBatch], culprits: Collection[Place], medians: Medians, scale: float) -> Tensor:
    """The number of this rank's ordinary tokens, and of those for which each of `HOLDS` holds; int64, (1 + rules,)."""
    counts = torch.zeros(1 + len(HOLDS), dtype=torch.int64)
    for index, micro_batch in enumerate(micro_batches):
        # The numbers from which a culprit's facts are made.
        tokens = micro_batch.portable(scale, inputs=False).tokens
        ordinary = tokens["response_mask"].bool() & movable(tokens)
        for at, row, position in culprits:
            if at == index:
                ordinary[row, position] = False
        holding = [(ordinary & rule(tokens, medians)).sum() for rule in HOLDS.values()]
        counts += torch.stack([ordinary.sum(), *holding])
    return counts


def _nonfinite(tokens: Tokens, _: Medians) -> Tensor:
    return tokens["broken"].bool()


def _retokenized(tokens: Tokens, _: Medians) -> Tensor:
    first = find_mismatch(tokens)[1]
    return (first > 0) & (find_turns(tokens["response_mask"]) >= first)


def _misaligned(tokens: Tokens, _: Medians) -> Tensor:
    if "rollout_log_prob" not in tokens:
        return _nowhere(tokens)
    share = _mean(off_the_rollout(_log_ratio(tokens, "rollout_log_prob")).double(), tokens)
    return share > MISALIGNED_FRACTION


def _unsampled(tokens: Tokens, _: Medians) -> Tensor:
    after_eos = tokens["after_eos"].bool() if "after_eos" in tokens else _nowhere(tokens)
    if "rollout_log_prob" not in tokens:
        return after_eos
    rollout = tokens["rollout_log_prob"]
    impossible = tokens["log_prob"].double() < math.log(UNSAMPLED)
    return torch.where(rollout != 0, ~rollout.isfinite(), after_eos | impossible)


def _token(tokens: Tokens, _: Medians) -> Tensor:
    found = _nowhere(tokens)
    for name in ("old_log_prob", "rollout_log_prob"):
        if name in tokens:
            found = found | _far_from_one(_log_ratio(tokens, name).exp(), TOKEN_RATIO)
    return found


def _sequence(tokens: Tokens, _: Medians) -> Tensor:
    name = "rollout_log_prob" if "rollout_log_prob" in tokens else "old_log_prob"
    if name not in tokens:
        return _nowhere(tokens)
    return _far_from_one(_mean(_log_ratio(tokens, name), tokens).exp(), SEQUENCE_RATIO)


def _advantage(tokens: Tokens, medians: Medians) -> Tensor:
    found = _outlying(tokens, "advantage", medians["median_advantage"], LARGE_ADVANTAGE)
    least = medians.get("least_advantage")
    return found if least is None else found & (tokens["advantage"].double().abs() >= least)


def _weight(tokens: Tokens, medians: Medians) -> Tensor:
    return _outlying(tokens, "weight", medians["median_weight"], LARGE_WEIGHT)


def _kl(tokens: Tokens, _: Medians) -> Tensor:
    if "kl_coefficient" not in tokens:
        return _nowhere(tokens)
    kl = tokens["kl_coefficient"].double()
    return kl.abs() > (tokens["coefficient"].double() - kl).abs()


def _apart(tokens: Tokens, _: Medians) -> Tensor:
    if not ("rollout_log_prob" in tokens and "old_log_prob" in tokens):
        return _nowhere(tokens)
    return ~((tokens["rollout_log_prob"].double() - tokens["old_log_prob"].double()).abs() <= APART_NATS)


def _unlikely(tokens: Tokens, _: Medians) -> Tensor:
    return tokens["log_prob"].double() < math.log(UNLIKELY)


def _punished(tokens: Tokens, _: Medians) -> Tensor:
    if "advantage" not in tokens:
        return _nowhere(tokens)
    is_pushed_down = (tokens["advantage"] < 0) & (tokens["coefficient"] > 0)
    return is_pushed_down & (tokens["log_prob"].double() > math.log(CONFIDENT))


# By rule, and for `APART`, where it holds: bool of shape (rows, response length), or (rows, 1) for a rule on whole
# responses. They are the rules of sources.py for many tokens at once. `layer` is missing: see `ordinary_shares`.
HOLDS: Mapping[str, Callable[[Tokens, Medians], Tensor]] = {
    "nonfinite": _nonfinite,
    "retokenized": _retokenized,
    "misaligned": _misaligned,
    "unsampled": _unsampled,
    "token": _token,
    "sequence": _sequence,
    "advantage": _advantage,
    "weight": _weight,
    "kl": _kl,
    "unlikely": _unlikely,
    "punished": _punished,
    APART: _apart,
}


def _nowhere(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens["log_prob"], dtype=torch.bool)


def _log_ratio(tokens: Tokens, name: str) -> Tensor:
    """log p − log q, float64."""
    return tokens["log_prob"].double() - tokens[name].double()


def _mean(values: Tensor, tokens: Tokens) -> Tensor:
    """The mean over each response's tokens, shape (rows, 1); NaN for a response without any."""
    mask = tokens["response_mask"].bool()
    # Not a product: the padding may be NaN.
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def _far_from_one(ratio: Tensor, factor: float) -> Tensor:
    """Whether a ratio is over the factor, under its reciprocal or NaN."""
    return ~((ratio >= 1 / factor) & (ratio <= factor))


def _outlying(tokens: Tokens, name: str, median: float | None, factor: float) -> Tensor:
    if name not in tokens or median is None:
        return _nowhere(tokens)
    return tokens[name].double().abs() > factor * median
