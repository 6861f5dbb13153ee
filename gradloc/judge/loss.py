# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a loss has the scale, the signs and the importance weights that it should have, and what else it could be."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ..lines import RunWarning
from ..sums import LOSS_FIGURES, MODES
from .progress import SEE, as_warning

# The warnings' names: that of one factor, the same everywhere; and those of others.
LOSS_SCALE = "loss_scale"
LOSS_SIGN, IMPORTANCE_WEIGHTS, KL_SCALE = "loss_sign", "importance_weights", "kl_scale"
OF_LOSS = (LOSS_SCALE, LOSS_SIGN, IMPORTANCE_WEIGHTS, KL_SCALE)
# A factor from 1/CLEAR to CLEAR is called 1.
CLEAR = 1.25
# A loss that is so many times too large is a spike by itself: one mini-batch of it is enough for a warning.
AT_ONCE = 4.0
# How far a token's coefficient over its expected one may be from the factor, relative to it, for the middle 80% of the
# tokens. Coefficients of half precision have an error of 2^-9.
COEFFICIENT_SPREAD = 0.05
_LEAST_TOKENS = 16
# Importance weights that are so far from 1 in nats are not in a loss that fits without them up to so many: a geometric
# mean of many of them is near 1, too. They are inverted where so many of the tokens that tell, of so many at least, are
# corrected the wrong way.
_WITHOUT, _APART_NATS = 3e-4, 0.02
_WRONG_WAY, _TOLD_TOKENS = 0.95, 64
# Less of the KL loss's part than this is none; and the squared correlation with what there is beside the policy loss's
# part, from which on that is a multiple of it.
_GONE, _KL_ALONE = 0.01, 0.98
# How close to a number a factor must be for that number to be named.
_FITS = 0.01
_FITS_PADDING = 0.02  # a mean over micro-batches, which may count by their tokens

CHECK = (
    "Take one step with another number of ranks, and one with another number of micro-batches: `actor/grad_norm` "
    "should stay about the same."
)


def coefficient_factor(by_rank: Sequence[Sequence[float]]) -> float | None:
    """The factor by which the coefficients are larger than expected; None if they are not all so by the same factor.

    Args:
        by_rank (Sequence): The figures that `own_loss_figures` returned, of each rank.
    """
    quantiles = _quantiles(by_rank)
    if not quantiles:
        return None
    factor = statistics.median_low(quantiles[1::3])
    return factor if factor > 0 and _is_of_size(quantiles, factor) else None


def _quantiles(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The three quantiles of coefficient over expected coefficient of each rank that knows one; none of few tokens."""
    known = [figures for figures in by_rank if figures[2] > 0]
    is_told = sum(figures[2] for figures in known) >= _LEAST_TOKENS
    return [quantile for figures in known for quantile in figures[3:6]] if is_told else []


def _is_of_size(values: Iterable[float], size: float) -> bool:
    return max(abs(value - size) for value in values) <= COEFFICIENT_SPREAD * size


def loss_scale_warning(by_rank: Sequence[Sequence[float]]) -> RunWarning | None:
    """A warning if a mini-batch's loss is scaled wrongly, from the figures of all ranks.

    Two things are compared: the weights of all tokens with what the aggregation mode promises, if all ranks have the
    same one: a sum of 1 in the mean over the ranks (over one token of each response for `seq-mean-token-sum`), and the
    coefficients with the weights.
    Responses that a correction rejects make the first sum smaller, so less than 1 counts only if a number fits: that of
    the ranks, of micro-batches if all ranks have as many, or the share of tokens in positions with padding.

    Args:
        by_rank (Sequence): The figures that `own_loss_figures` returned, of each rank.

    Returns:
        dict: `name`, `sentence`, `check` and `factor`; None if nothing is wrong, or nothing is known.
    """
    of = dict(zip(LOSS_FIGURES, zip(*by_rank, strict=True), strict=True))
    weights, modes, micro_batches, filled = (of[name] for name in ("weights", "mode", "micro_batches", "filled"))
    counts = {"ranks": len(by_rank), **({"micro-batches": micro_batches[0]} if len(set(micro_batches)) == 1 else {})}
    of_weights = sum(weights) / len(weights)
    if len(set(modes)) == 1 and math.isfinite(of_weights) and of_weights > 0:
        fitting = fitting_numbers(of_weights, counts)
        if abs(of_weights / (sum(filled) / sum(micro_batches)) - 1) <= _FITS_PADDING:
            fitting.append("the share of positions that are no padding")
        if of_weights > CLEAR or (of_weights < 1 / CLEAR and fitting):
            what = f"the weights of all tokens add up to {of_weights:.4g} instead of 1 ({MODES[int(modes[0])]})"
            return _warning(of_weights, what, fitting)
    of_coefficients = coefficient_factor(by_rank)
    if of_coefficients is not None and not is_one(of_coefficients):
        what = f"the loss's gradient is {of_coefficients:.4g} times what its weights, advantages and ratios give"
        return _warning(of_coefficients, what, fitting_numbers(of_coefficients, counts))
    return None


def loss_warning(by_rank: Sequence[Sequence[float]]) -> RunWarning | None:
    """The first of what is wrong with a mini-batch's loss: its scale, its signs, its importance weights, its KL loss.

    Args:
        by_rank (Sequence): The figures that `own_loss_figures` returned, of each rank.
    """
    found = loss_scale_warning(by_rank) or _sign_warning(by_rank)
    if found is not None:
        return found
    sums = {name: sum(column) for name, column in zip(LOSS_FIGURES, zip(*by_rank, strict=True), strict=True)}
    return _weights_warning(sums) or _kl_warning(sums)


def _sign_warning(by_rank: Sequence[Sequence[float]]) -> RunWarning | None:
    """Where coefficients are what they should be, but for the sign of some, or of all."""
    quantiles = _quantiles(by_rank)
    if min(quantiles, default=0.0) >= 0:
        return None
    size = statistics.median_low(map(abs, quantiles))
    if not _is_of_size(map(abs, quantiles), size):
        return None
    whole = max(quantiles) < 0
    what = "The loss's sign is turned" if whole else "The loss loses the sign of advantages, for part of the tokens"
    return as_warning(
        LOSS_SIGN,
        what,
        f": its gradient is {-size:.4g} times what weights, advantages and ratios give. Look at the sign of the "
        "policy loss, and at what takes the size of advantages, or of ratios (abs, square, clamp).",
        "Print the policy loss of each token, before the mean, and its advantage: where the ratio is 1, the loss "
        "is minus the advantage.",
    )


def _weights_warning(sums: Mapping[str, float]) -> RunWarning | None:
    """Where the rollout's importance weights are not in the loss, or correct the wrong way."""
    tokens = sums["corrected"]
    check = (
        "Print `rollout_is_weights`, `old_log_probs` and `rollout_log_probs` of one row, and the policy loss of its "
        "tokens before the mean: with rollout_is=token, the weight is exp(old − rollout), cut at the threshold."
    )
    if tokens >= _LEAST_TOKENS and sums["with"] > _APART_NATS * tokens and sums["without"] < _WITHOUT * tokens:
        what = "not in the loss"
        rest = (
            f"its gradient fits without them (they are {sums['with'] / tokens:.2g} nats from 1 in the mean). Look at "
            "whether the loss function takes `rollout_is_weights`."
        )
    elif sums["apart"] >= _TOLD_TOKENS and sums["along"] < (1 - _WRONG_WAY) * sums["apart"]:
        what = "inverted"
        rest = (
            "they are over 1 where the old policy is less likely to sample the token than the rollout was. Look at the "
            "sign of the difference of log-probs in them."
        )
    else:
        return None
    return as_warning(IMPORTANCE_WEIGHTS, f"The rollout's importance weights are {what}", f": {rest}", check)


def _kl_warning(sums: Mapping[str, float]) -> RunWarning | None:
    """Where the gradient has another multiple of the KL loss's part, and nothing else that it should not have."""
    kl, rest, product = (sums[name] for name in ("kl_square", "rest_square", "kl_rest"))
    if sums["kl_told"] < _LEAST_TOKENS or not 0 < kl < math.inf or not math.isfinite(rest):
        return None
    factor = product / kl
    is_gone = rest < _GONE**2 * kl
    if not is_gone and (product**2 < _KL_ALONE * kl * rest or (factor > 0 and is_one(factor))):
        return None
    what = "is not in the gradient" if is_gone else f"counts {factor:.4g} times in the gradient"
    look = "is detached" if is_gone else "has the wrong sign" if factor < 0 else "is scaled or counted twice"
    return as_warning(
        KL_SCALE,
        f"The KL loss {what}, by its coefficient and type",
        f": look at where it {look}.",
        "Take one step with kl_loss_coef=0: the gradient differs by that of the KL loss, which should bring the "
        "policy nearer to the reference.",
    )


def is_one(factor: float) -> bool:
    """Whether a factor is not clearly another than 1."""
    return 1 / CLEAR <= factor <= CLEAR


def fitting_numbers(factor: float, counts: Mapping[str, float], tolerance: float = _FITS) -> list[str]:
    """What a factor could be: one of some numbers, a product of two, one over these, or a power of two; in words.

    Args:
        factor (float): It, positive.
        counts (Mapping): Numbers by what they are, as "ranks"; those up to 1 are left out.
        tolerance (float): How far the factor may be from a number, relative to it.
    """
    found: list[str] = []
    given = {name: float(count) for name, count in counts.items() if 1 < count < math.inf}
    names = list(given)
    products = {name: given[name] for name in names} | {
        f"{one} × {other}": given[one] * given[other] for i, one in enumerate(names) for other in names[i + 1 :]
    }
    for name, number in products.items():
        for text, value in ((f"the number of {name}", number), (f"1 / the number of {name}", 1 / number)):
            if abs(factor / value - 1) <= tolerance:
                found.append(f"{text} ({number:g})")
    power = round(math.log2(factor))
    if power and abs(factor / 2.0**power - 1) <= tolerance:
        found.append(f"2^{power}")
    return found


def what_it_could_be(fitting: Sequence[str]) -> str:
    """A clause on `fitting_numbers`, or nothing."""
    if not fitting:
        return ""
    return f"; it could be {' or '.join([', '.join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)}"


def _warning(factor: float, what: str, fitting: Sequence[str]) -> RunWarning:
    return as_warning(
        LOSS_SCALE,
        "The loss is scaled wrongly",
        f": {what}{what_it_could_be(fitting)}.",
        f"{CHECK} {SEE.format('loss_scale')}",
        factor=factor,
    )
