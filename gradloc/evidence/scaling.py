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
SCALE_FIGURES = 6
# How close to a number a factor must be for that number to be named.
_FITS = 0.01

CHECK = (
    "Take one step with another number of ranks, and one with another number of micro-batches: `actor/grad_norm` "
    "should stay about the same."
)


def own_scale_figures(micro_batches: Sequence[Mapping[str, Tensor]], scale: float | Tensor = 1.0) -> Tensor:
    """What one rank knows of the scale of a mini-batch's loss, for `loss_scale_warning`. No host sync.

    The expected coefficient of a token whose ratio is near 1 is −w·A·ratio, the KL loss's part apart. Clipped tokens
    have none and do not count.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): Each micro-batch's tensors of shape (rows, response length):
            `response_mask`, `weight`, `log_prob`; `coefficient` and `advantage`, and if available `old_log_prob`,
            `kl_coefficient` and `rollout_is_weight`.
        scale (float | Tensor): The loss scale of fp16 that the coefficients contain.

    Returns:
        Tensor: float64 of shape (6,): Σ w over the tokens, Σ over the rows of one token's w, the number of tokens of
            which coefficient over expected coefficient is known, and its 10%, 50% and 90% quantiles (NaN without any).
    """
    device = micro_batches[0]["weight"].device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    ratios = []
    for tokens in micro_batches:
        weight = torch.where(tokens["response_mask"].bool(), tokens["weight"].double(), 0.0)
        sums += torch.stack([weight.sum(), weight.amax(1).sum()])
        if "coefficient" in tokens and "advantage" in tokens:
            ratios.append(_coefficient_ratios(tokens, scale))
    found = torch.cat(ratios) if ratios else sums.new_full((1,), math.nan)
    found = found[:: max(len(found) // _SAMPLE, 1)]
    quantiles = torch.nanquantile(found, found.new_tensor([0.1, 0.5, 0.9]))
    return torch.cat([sums, found.isfinite().sum().double().unsqueeze(0), quantiles])


def coefficient_factor(by_rank: Tensor) -> float | None:
    """The factor by which the coefficients are larger than expected; None if they are not all so by the same factor.

    Args:
        by_rank (Tensor): What `own_scale_figures` returned on each rank, shape (ranks, 6), on the CPU.
    """
    known = by_rank[by_rank[:, 2] > 0]
    if float(known[:, 2].sum()) < _LEAST_TOKENS:
        return None
    factor = float(known[:, 4].median())
    if factor <= 0 or bool(((known[:, 3:] - factor).abs() > COEFFICIENT_SPREAD * factor).any()):
        return None
    return factor


def loss_scale_warning(
    by_rank: Tensor, loss_agg_mode: str | None, counts: Mapping[str, float] | None = None
) -> dict[str, str] | None:
    """A warning if a mini-batch's loss is scaled wrongly.

    Two things are compared: the weights of all tokens with what the aggregation mode promises, a sum of 1 in the mean
    over the ranks (over one token of each response for `seq-mean-token-sum`), and the coefficients with the weights.
    Responses that a correction rejects make the first sum smaller, so less than 1 counts only if a number fits.

    Args:
        by_rank (Tensor): What `own_scale_figures` returned on each rank, shape (ranks, 6), on the CPU.
        loss_agg_mode (str, optional): How the loss is aggregated; of modes that promise no sum, and of None, only the
            coefficients are compared.
        counts (Mapping, optional): Numbers that a factor could be, by what they are, besides the number of ranks.

    Returns:
        dict: `name`, `sentence` and `check`; None if nothing is wrong, or nothing is known.
    """
    counts = {"ranks": float(len(by_rank)), **(counts or {})}
    column = {"token-mean": 0, "seq-mean-token-mean": 0, "seq-mean-token-sum": 1}.get(loss_agg_mode or "")
    of_weights = None if column is None else float(by_rank[:, column].mean())
    if of_weights is not None and math.isfinite(of_weights) and of_weights > 0:
        fitting = fitting_numbers(of_weights, counts)
        if of_weights > CLEAR or (of_weights < 1 / CLEAR and fitting):
            what = f"the weights of all tokens add up to {of_weights:.4g} instead of 1 ({loss_agg_mode})"
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
        "check": f"{CHECK} `bash run_experiment.sh --embedded --fault loss_scale` shows this.",
    }


def _coefficient_ratios(tokens: Mapping[str, Tensor], scale: float | Tensor) -> Tensor:
    """Coefficient over expected coefficient, float64; NaN where it is not known."""
    coefficient = tokens["coefficient"].double() / scale
    if "kl_coefficient" in tokens:
        coefficient = coefficient - tokens["kl_coefficient"].double()
    expected = -tokens["weight"].double() * tokens["advantage"].double()
    counted = tokens["response_mask"].bool() & (coefficient != 0) & (expected != 0)
    if "old_log_prob" in tokens:
        log_ratio = tokens["log_prob"].double() - tokens["old_log_prob"].double()
        expected = expected * log_ratio.exp()
        counted = counted & (log_ratio.abs() <= _NEAR)
    if "rollout_is_weight" in tokens:
        expected = expected * tokens["rollout_is_weight"].double()
    ratio = coefficient / expected
    return torch.where(counted & ratio.isfinite(), ratio, math.nan).flatten()
