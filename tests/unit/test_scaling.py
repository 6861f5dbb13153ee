"""Losses that are scaled wrongly: which factor is found, and what it could be."""

from typing import Any

import pytest
import torch
from notation import cases
from torch import Tensor

from gradloc.judge.loss import CLEAR, COEFFICIENT_SPREAD, coefficient_factor, loss_scale_warning, loss_warning
from gradloc.measure.micro_batch import token_weights
from gradloc.measure.run_sums import own_loss_figures
from gradloc.sums import LOSS_FIGURES

RANKS, MICRO_BATCHES, ROWS, LENGTH = 3, 5, 4, 20
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def aggregate(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """A rank's mean over all of its rows, by hand."""
    if mode == "padded":  # a denominator that counts padding, too
        return (losses * mask).sum() / mask.numel()
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    sums = (losses * mask).sum(1)
    return (sums / mask.sum(1) if mode == "seq-mean-token-mean" else sums).mean()


def ranks(mode: str, of_loss: float = 1.0, of_weights: float = 1.0, **changes: Any) -> list[list[float]]:
    """The figures of ranks whose loss is PPO's, by autograd, times a factor after the weights, or in them."""
    torch.manual_seed(0)
    figures = []
    for _ in range(RANKS):
        shape = (MICRO_BATCHES * ROWS, LENGTH)
        mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (shape[0], 1))).float()
        weight = token_weights(lambda x, m=mask: of_weights * aggregate(x, m, mode), torch.zeros(shape))
        log_prob = (-torch.rand(shape)).requires_grad_()
        off = changes.get("off", 0.3)
        tokens = {
            "response_mask": mask,
            "weight": weight,
            "old_log_prob": log_prob.detach() + off * torch.randn(shape) * (torch.rand(shape) < 0.5),
            "advantage": torch.randn(shape[0], 1).expand(shape).clone(),
            "log_prob": log_prob,
            "rollout_is_weight": torch.rand(shape) + 0.5,
            "ref_log_prob": log_prob.detach() + torch.randn(shape),
        }
        tokens["rollout_log_prob"] = tokens["old_log_prob"] - tokens["rollout_is_weight"].log()
        if "inverted" in changes:
            tokens["rollout_is_weight"] = 1 / tokens["rollout_is_weight"]
        kl = 0.5 * (log_prob - tokens["ref_log_prob"]).square()
        (tokens["kl_coefficient"],) = torch.autograd.grad((weight * kl).sum(), log_prob)
        ratio = (log_prob - tokens["old_log_prob"]).exp()
        a = changes.get("advantages", torch.Tensor.clone)(tokens["advantage"])
        each = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        each = each if "uncorrected" in changes else each * tokens["rollout_is_weight"]
        (gradient,) = torch.autograd.grad(of_loss * (weight * each).sum(), log_prob)
        tokens["coefficient"] = (gradient + changes.get("kl", 1.0) * tokens["kl_coefficient"]) * changes.get(
            "scale", 1.0
        )
        tokens["log_prob"] = log_prob.detach()
        if "noise" in changes:
            tokens["coefficient"] = tokens["coefficient"] * (1 + changes["noise"] * torch.randn(shape))
        tokens = {name: value for name, value in tokens.items() if name not in changes.get("without", ())}
        micro_batches = [
            {name: value[start : start + ROWS] for name, value in tokens.items()} for start in range(0, shape[0], ROWS)
        ]
        figures.append(own_loss_figures(micro_batches, changes.get("scale", 1.0), changes.get("of_config", mode)))
    return torch.stack(figures).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"off": 0.0}, {"scale": 1024.0}, {"without": ["old_log_prob"], "off": 0.0}])
def test_a_loss_as_it_should_be_gives_no_warning(mode: str, changes: dict[str, Any]) -> None:
    by_rank = ranks(mode, **changes)
    assert coefficient_factor(by_rank) == pytest.approx(1, abs=1e-5)
    assert loss_warning(by_rank) is None


@cases(
    "changes name said",
    ({"advantages": torch.abs}, "loss_sign", "loses the sign of advantages"),
    ({"of_loss": -2.0}, "loss_sign", "is turned: its gradient is -2 times"),
    ({"uncorrected": True}, "importance_weights", "are not in the loss"),
    ({"inverted": True}, "importance_weights", "are inverted"),
    (
        {"kl": -1.0},
        "kl_scale",
        "counts -1 times in the gradient, by its coefficient and type: look at where it has the",
    ),
    ({"kl": 3.0}, "kl_scale", "counts 3 times in the gradient"),
    ({"kl": 0.0}, "kl_scale", "is not in the gradient, by its coefficient and type: look at where it is detached"),
)
def test_signs_and_importance_weights_of_a_loss_are_told(changes: dict[str, Any], name: str, said: str) -> None:
    found = loss_warning(ranks("token-mean", **changes))
    assert found is not None and found["name"] == name and said in found["sentence"]


@pytest.mark.parametrize("mode", MODES)
@cases(
    "factor what",
    (15.0, "the number of ranks × micro-batches (15)"),
    (8.0, "2^3"),
    (0.2, "1 / the number of micro-batches (5)"),
    (65536.0, "2^16"),
)
def test_a_wrong_factor_is_found_wherever_it_comes_in(mode: str, factor: float, what: str) -> None:
    found = loss_scale_warning(ranks(mode, of_weights=factor))
    assert found is not None and found["name"] == "loss_scale"
    assert f"add up to {factor:.4g} instead of 1 ({mode}); it could be {what}." in found["sentence"]
    found = loss_scale_warning(ranks(mode, of_loss=factor))
    assert found is not None and what in found["sentence"]
    assert f"gradient is {factor:.4g} times what its weights, advantages and ratios give" in found["sentence"]


def test_a_denominator_that_counts_padding_is_told() -> None:
    found = loss_scale_warning(ranks("padded", of_config="token-mean"))
    assert found is not None and "it could be the share of positions that are no padding." in found["sentence"]
    # What is near one is called one.
    for factor in (CLEAR - 0.01, 1 / CLEAR + 0.01):
        assert loss_scale_warning(ranks("token-mean", of_loss=factor, of_weights=factor)) is None
    # A smaller sum of weights is no fault where no number fits, as where a correction rejects responses.
    assert loss_scale_warning(ranks("token-mean", of_weights=0.7)) is None
    assert loss_scale_warning(ranks("token-mean", of_weights=1.4)) is not None


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_the_policy_loss_rejects_do_not_count(mode: str) -> None:
    """Their weight is that of the KL loss, a mean over all tokens; those that are left have a mean of their own."""
    shape = (8, LENGTH)
    mask, kept = torch.ones(shape), (torch.arange(8) >= 4).float().unsqueeze(1).expand(shape)
    weight = token_weights(lambda x: aggregate(x[4:], kept[4:], mode), torch.zeros(shape))
    whole = token_weights(lambda x: aggregate(x, mask, mode), torch.zeros(shape))
    kl_coefficient = torch.rand(shape) * whole
    tokens = {
        "response_mask": mask,
        "weight": torch.where(kept.bool(), weight, whole),
        "log_prob": torch.zeros(shape),
        "advantage": torch.ones(shape),
        "kl_coefficient": kl_coefficient,
        "coefficient": kl_coefficient * (1 + 1e-7) - weight,  # with an error of rounding
    }
    assert loss_scale_warning(own_loss_figures([tokens], loss_agg_mode=mode).unsqueeze(0).tolist()) is not None
    kept_alone = {**tokens, "policy_loss_mask": kept.bool()}
    by_rank = own_loss_figures([kept_alone], loss_agg_mode=mode).unsqueeze(0).tolist()
    assert loss_scale_warning(by_rank) is None
    assert by_rank[0][2] == kept.sum() and coefficient_factor(by_rank) == pytest.approx(1, abs=1e-5)


def test_modes_without_a_promise_and_other_slopes_do_not_warn() -> None:
    assert loss_scale_warning(ranks("token-mean", of_weights=9.0, of_config="seq-mean-token-sum-norm")) is None
    assert coefficient_factor(ranks("token-mean", of_loss=9.0, noise=2 * COEFFICIENT_SPREAD)) is None
    by_rank = ranks("token-mean")
    by_rank[1][3:] = [2 * figure for figure in by_rank[1][3:]]  # one rank alone
    assert coefficient_factor(by_rank) is None
    # Ranks with other numbers of micro-batches have no number that fits.
    by_rank = ranks("token-mean", of_weights=1 / MICRO_BATCHES)
    assert loss_scale_warning(by_rank) is not None
    by_rank[1][LOSS_FIGURES.index("micro_batches")] += 1
    assert loss_scale_warning(by_rank) is None
