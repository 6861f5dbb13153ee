# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The sources: what looks wrong with a token, by what is known of it alone. What that means, the judge says.

No torch: the judge reads this, too.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Facts of a culprit, or of many tokens as tensors: see `token_facts`.
Facts = Mapping[str, Any]
# The mini-batch's `median_advantage` and `median_weight`.
Medians = Mapping[str, float | None]

# The name of the share of tokens whose log-probs of rollout and old policy differ by more than this, in nats.
APART = "apart"
APART_NATS = 0.1
# Shorter responses are not judged as a whole.
LEAST_RESPONSE = 6
# The limits of the sources.
MISALIGNED_FRACTION = 0.5
TOKEN_RATIO = 2.0
SEQUENCE_RATIO = 1.2
# Between the advantages of a group of four in which one response is rewarded unlike the others, there is a factor of 3.
LARGE_ADVANTAGE = 2.5
LARGE_WEIGHT = 5.0
# A token to which the rollout gave probability 1 and training one under this: the rollout did not sample it. After an
# end, the same of any probability and training's part of it: weights that are late make hardly any so small.
UNSAMPLED, UNSAMPLED_AFTER_END = 0.1, 1e-3
# A ratio that is larger makes infinite gradients of finite log-probs.
OVERFLOW_RATIO = 1e6
UNLIKELY = 0.05
CONFIDENT = 0.9
# A layer that has more of the squared norm carries it.
LAYER_FRACTION = 0.5
# The name if no rule holds.
OTHER = "other"


def is_apart(rollout_log_prob: Any, old_log_prob: Any, nats: float = APART_NATS) -> Any:
    """Whether two log-probs of a token differ by more than so many nats, or by NaN; None if one is not known."""
    if rollout_log_prob is None or old_log_prob is None:
        return None
    gap = abs(rollout_log_prob - old_log_prob)
    return (gap != gap) | (gap > nats)


def classify(culprit: Facts, medians: Medians) -> list[str]:
    """The names of all sources that hold for a culprit, most specific first; ["other"] if none does.

    Args:
        culprit (Mapping): A culprit of an event.
        medians (Mapping): `median_advantage` and `median_weight` of its mini-batch.
    """
    return [name for name, holds in HOLDS.items() if holds(culprit, medians)] or [OTHER]


# The rules take single values and tensors alike: so `|` and `&`, and no chained comparison. What is None, or missing,
# is not known. NaN is unlike itself.


def _is_nonfinite(of: Facts, _: Medians) -> Any:
    overflows = False
    for name in ("ratio", "rollout_ratio"):
        if (ratio := of.get(name)) is not None:
            overflows = overflows | (ratio > OVERFLOW_RATIO) & (of["log_prob"] == of["log_prob"])
    return is_broken(of["grad_norm"]) & (overflows ^ True)


def _is_retokenized(of: Facts, _: Medians) -> Any:
    first = of.get("mismatch_turn")
    return first is not None and (first > 0) & (of["turn"] >= first)


def _is_misaligned(of: Facts, _: Medians) -> Any:
    share = of.get("misaligned_share")
    by_nats = share is not None and (share > MISALIGNED_FRACTION) & _is_long(of)
    return by_nats | of["misplaced"]


def _is_long(of: Facts) -> Any:
    """Whether there are enough tokens to speak of the whole response."""
    return of["response_length"] >= LEAST_RESPONSE


def _is_unsampled(of: Facts, _: Medians) -> Any:
    rollout, after_eos = of.get("rollout_log_prob"), of.get("after_eos")
    after_eos = False if after_eos is None else after_eos
    if rollout is None:
        return after_eos
    # A log-prob other than 0 that training does not contradict shows that it was sampled, even after an end token.
    added = after_eos & ((rollout == 0) | (of["log_prob"] < rollout + math.log(UNSAMPLED_AFTER_END)))
    return is_broken(rollout) | added | ((rollout == 0) & (of["log_prob"] < math.log(UNSAMPLED)))


def has_large_advantage(of: Facts, medians: Medians) -> Any:
    """The rule `advantage`; with `least_advantage` in `medians`, only for those that are not under it."""
    advantage = of.get("advantage")
    found = _is_outlier(advantage, medians["median_advantage"], LARGE_ADVANTAGE)
    least = medians.get("least_advantage")
    return found if advantage is None or least is None else found & (abs(advantage) >= least)


def _is_due_to_kl(of: Facts, _: Medians) -> Any:
    kl = of.get("kl_coefficient")
    return kl is not None and abs(kl) > abs(of["coefficient"] - kl)


def entropy_share(of: Facts) -> Any:
    """The entropy bonus's share of what `suspicion` estimates: |∂L/∂H|·H of that and |∂L/∂log p|·(1 − p)."""
    entropy, coefficient = of.get("entropy"), of.get("entropy_coefficient")
    if entropy is None or coefficient is None:
        return 0.0
    of_bonus = abs(coefficient) * abs(entropy)
    rest = abs(of["coefficient"]) * abs(1 - math.e ** of["log_prob"])
    return of_bonus / (of_bonus + rest + sys.float_info.min)


def _is_punished(of: Facts, _: Medians) -> Any:
    advantage = of.get("advantage")
    is_confident = of["log_prob"] > math.log(CONFIDENT)
    return advantage is not None and (advantage < 0) & (of["coefficient"] > 0) & is_confident


def _has_a_layer(culprit: Facts, _: Medians) -> bool:
    shares = layer_shares(culprit["layer_norms"])
    return len(shares) > 1 and max(shares.values()) > LAYER_FRACTION


def is_broken(value: Any) -> Any:
    """Whether a value is NaN or infinite."""
    return (value != value) | (abs(value) == math.inf)


def _is_outlier(value: Any, median: float | None, factor: float) -> Any:
    return value is not None and median is not None and abs(value) > factor * median


def _is_far(of: Facts, name: str, factor: float) -> Any:
    """Whether a ratio is far from 1."""
    ratio = of.get(name)
    return ratio is not None and (ratio != ratio) | (ratio > factor) | (ratio < 1 / factor)


def layer_shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Each layer's share of the squared norm, from the layers' norms; none if their sum is 0 or not finite."""
    squares = {layer: norm * norm for layer, norm in norms.items()}
    total = math.fsum(squares.values())
    return {layer: square / total for layer, square in squares.items()} if 0 < total < math.inf else {}


# By name, whether a source holds for a culprit, or for which of many tokens, given their mini-batch's medians. The most
# specific first: broken numbers, then bugs, then what ordinary tokens rarely have.
HOLDS: Mapping[str, Callable[[Facts, Medians], Any]] = {
    "nonfinite": _is_nonfinite,
    "unsampled": _is_unsampled,
    "retokenized": _is_retokenized,
    "misaligned": _is_misaligned,
    "token": lambda of, _: _is_far(of, "ratio", TOKEN_RATIO) | _is_far(of, "rollout_ratio", TOKEN_RATIO),
    "sequence": lambda of, _: _is_far(of, "sequence_ratio", SEQUENCE_RATIO) & _is_long(of),
    "advantage": has_large_advantage,
    "weight": lambda of, medians: _is_outlier(of["weight"], medians["median_weight"], LARGE_WEIGHT),
    "kl": _is_due_to_kl,
    "entropy": lambda of, _: entropy_share(of) > 0.5,
    "unlikely": lambda of, _: of["log_prob"] < math.log(UNLIKELY),
    "punished": _is_punished,
    "layer": _has_a_layer,
}
