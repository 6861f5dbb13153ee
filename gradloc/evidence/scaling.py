# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a loss or a gradient is scaled wrongly: by one factor, the same everywhere, and what that could be."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# The warning's name.
LOSS_SCALE = "loss_scale"
# A factor from 1/CLEAR to CLEAR is called 1.
CLEAR = 1.25
# How far a token's coefficient over its expected one may be from the factor, relative to it, for the middle 80% of the
# tokens. Coefficients of half precision have an error of 2^-9.
COEFFICIENT_SPREAD = 0.05
# Tokens whose ratio is closer to 1 than this, in nats: for them all losses of policy gradients have the same slope.
_NEAR = 0.02
_LEAST_TOKENS = 16
# At most about this many tokens of a rank are looked at.
_SAMPLE = 2**16
# How many figures `own_scale_figures` gives.
SCALE_FIGURES = 7
# The aggregation modes that promise a sum of weights of 1: over all tokens, in the last over one of each response.
_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
# How close to a number a factor must be for that number to be named.
_FITS = 0.01

CHECK = (
    "Take one step with another number of ranks, and one with another number of micro-batches: `actor/grad_norm` "
    "should stay about the same."
)


def own_scale_figures(
    micro_batches: Sequence[Mapping[str, Tensor]], scale: float | Tensor = 1.0, loss_agg_mode: str | None = None
) -> Tensor:
    """What one rank knows of the scale of a mini-batch's loss, for `loss_scale_warning`. No host sync.

    The expected coefficient of a token whose ratio is near 1 is −w·A·ratio, the KL loss's part apart. Clipped tokens
    have none and do not count.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): Each micro-batch's tensors of shape (rows, response length):
            `response_mask`, `weight`, `log_prob`; `coefficient` and `advantage`, and if available `old_log_prob`,
            `kl_coefficient`, `rollout_is_weight`, and `policy_loss_mask`: a token that the policy loss rejects may have
            a weight in other terms, which adds to the 1 of the tokens that it keeps.
        scale (float | Tensor): The loss scale of fp16 that the coefficients contain.
        loss_agg_mode (str, optional): How the loss is aggregated.

    Returns:
        Tensor: float64 of shape (7,): the sum of weights that should be 1 (NaN if the mode promises none, or is None),
            the mode by number, the number of tokens of which coefficient over expected coefficient is known, and its
            10%, 50% and 90% quantiles (NaN without any), and the number of micro-batches.
    """
    mode = _MODES.index(loss_agg_mode) if loss_agg_mode in _MODES else -1
    total = torch.full(
        (1,), math.nan if mode < 0 else 0.0, dtype=torch.float64, device=micro_batches[0]["weight"].device
    )
    ratios = []
    for tokens in micro_batches:
        weight = torch.where(_in_policy_loss(tokens), tokens["weight"].double(), 0.0)
        total += (weight.amax(1) if loss_agg_mode == "seq-mean-token-sum" else weight).sum()
        if "coefficient" in tokens and "advantage" in tokens:
            ratios.append(_coefficient_ratios(tokens, scale))
    found = torch.cat(ratios) if ratios else total.new_full((1,), math.nan)
    found = found[:: max(len(found) // _SAMPLE, 1)]
    # One by one: a tensor of the three would be copied to the device, and the host would wait for it.
    quantiles = torch.stack([torch.nanquantile(found, share) for share in (0.1, 0.5, 0.9)])
    count = found.isfinite().sum().double().unsqueeze(0)
    return torch.cat([total, total.new_full((1,), mode), count, quantiles, total.new_full((1,), len(micro_batches))])


def coefficient_factor(by_rank: Tensor) -> float | None:
    """The factor by which the coefficients are larger than expected; None if they are not all so by the same factor.

    Args:
        by_rank (Tensor): What `own_scale_figures` returned on each rank, shape (ranks, 7), on the CPU.
    """
    known = by_rank[by_rank[:, 2] > 0]
    if float(known[:, 2].sum()) < _LEAST_TOKENS:
        return None
    factor = float(known[:, 4].median())
    if factor <= 0 or bool(((known[:, 3:6] - factor).abs() > COEFFICIENT_SPREAD * factor).any()):
        return None
    return factor


def loss_scale_warning(by_rank: Tensor) -> dict[str, str] | None:
    """A warning if a mini-batch's loss is scaled wrongly, from figures alone that all ranks have: they warn alike.

    Two things are compared: the weights of all tokens with what the aggregation mode promises, if all ranks have the
    same one: a sum of 1 in the mean over the ranks (over one token of each response for `seq-mean-token-sum`), and the
    coefficients with the weights.
    Responses that a correction rejects make the first sum smaller, so less than 1 counts only if a number fits: that of
    the ranks, or of micro-batches if all ranks have as many.

    Args:
        by_rank (Tensor): What `own_scale_figures` returned on each rank, shape (ranks, 7), on the CPU.

    Returns:
        dict: `name`, `sentence` and `check`; None if nothing is wrong, or nothing is known.
    """
    of_ranks = by_rank[:, 6].unique().tolist()
    counts = {"ranks": len(by_rank), **({"micro-batches": of_ranks[0]} if len(of_ranks) == 1 else {})}
    modes, of_weights = by_rank[:, 1].unique(), float(by_rank[:, 0].mean())
    if len(modes) == 1 and math.isfinite(of_weights) and of_weights > 0:
        fitting = fitting_numbers(of_weights, counts)
        if of_weights > CLEAR or (of_weights < 1 / CLEAR and fitting):
            what = f"the weights of all tokens add up to {of_weights:.4g} instead of 1 ({_MODES[int(modes[0])]})"
            return _warning(what, fitting)
    of_coefficients = coefficient_factor(by_rank)
    if of_coefficients is not None and not is_one(of_coefficients):
        what = f"the loss's gradient is {of_coefficients:.4g} times what its weights, advantages and ratios give"
        return _warning(what, fitting_numbers(of_coefficients, counts))
    return None


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


def _warning(what: str, fitting: Sequence[str]) -> dict[str, str]:
    return {
        "name": LOSS_SCALE,
        "sentence": f"The loss is scaled wrongly: {what}{what_it_could_be(fitting)}.",
        "check": f"{CHECK} In a checkout of GradLoc, `bash run_experiment.sh --embedded --fault loss_scale` plants "
        "this fault.",
    }


def _in_policy_loss(tokens: Mapping[str, Tensor]) -> Tensor:
    mask = tokens["response_mask"].bool()
    return mask & tokens["policy_loss_mask"].bool() if "policy_loss_mask" in tokens else mask


def _coefficient_ratios(tokens: Mapping[str, Tensor], scale: float | Tensor) -> Tensor:
    """Coefficient over expected coefficient, float64; NaN where it is not known."""
    coefficient = tokens["coefficient"].double() / scale
    if "kl_coefficient" in tokens:
        coefficient = coefficient - tokens["kl_coefficient"].double()
    expected = -tokens["weight"].double() * tokens["advantage"].double()
    counted = _in_policy_loss(tokens) & (coefficient != 0) & (expected != 0)
    if "old_log_prob" in tokens:
        log_ratio = tokens["log_prob"].double() - tokens["old_log_prob"].double()
        expected = expected * log_ratio.exp()
        counted = counted & (log_ratio.abs() <= _NEAR)
    if "rollout_is_weight" in tokens:
        expected = expected * tokens["rollout_is_weight"].double()
    ratio = coefficient / expected
    return torch.where(counted & ratio.isfinite(), ratio, math.nan).flatten()
