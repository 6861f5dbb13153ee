"""The early-warning figures of a mini-batch, against plain sorting."""

import math

import pytest
import torch
from torch import Tensor

from gradloc.early_warning import EarlyWarning, own_figures

PREFIX = "actor/gradloc/"


def tokens(log_prob: Tensor, **others: Tensor) -> dict[str, Tensor]:
    ones = torch.ones_like(log_prob)
    return {"response_mask": ones, "weight": ones, "log_prob": log_prob, **others}


def figures(*ranks: list[dict[str, Tensor]]) -> dict[str, float]:
    """Of one mini-batch."""
    early = EarlyWarning()
    early.take_in(torch.stack([own_figures(micro_batches) for micro_batches in ranks]))
    return {name.removeprefix(PREFIX): value for name, value in early.metrics().items()}


@pytest.mark.parametrize("spread", [1e-3, 0.05, 1.0, 3.0])
def test_the_percentile_is_at_most_six_percent_too_large_in_its_logarithm(spread: float) -> None:
    random = torch.Generator().manual_seed(1)
    early, log_ratios = EarlyWarning(), []
    for _ in range(3):
        ranks = []
        for _ in range(2):
            log_ratio = spread * torch.randn(4, 700, generator=random, dtype=torch.float64)
            log_ratios.append(log_ratio.flatten())
            old = torch.full_like(log_ratio, -3.0)
            ranks.append(own_figures([tokens(old + log_ratio, old_log_prob=old)]))
        early.take_in(torch.stack(ranks))
    ordered = torch.cat(log_ratios).sort().values
    exact = float(ordered[math.ceil(0.999 * len(ordered)) - 1])
    found = early.metrics()
    assert exact - 1e-9 <= math.log(found[f"{PREFIX}ratio_p999"]) <= 1.06 * exact
    assert found[f"{PREFIX}ratio_max"] == pytest.approx(math.exp(float(ordered[-1])), rel=1e-9)


def test_the_percentile_of_few_tokens_is_the_largest() -> None:
    old = torch.zeros(1, 999, dtype=torch.float64)
    log_ratio = old.clone()
    log_ratio[0, 5] = 0.7
    assert figures([tokens(log_ratio, old_log_prob=old)])["ratio_p999"] == pytest.approx(math.exp(0.7))
    one_more = torch.zeros(1, 1000, dtype=torch.float64)
    log_ratio = one_more.clone()
    log_ratio[0, 5] = 0.7
    assert figures([tokens(log_ratio, old_log_prob=one_more)])["ratio_p999"] == 1.0


def test_small_ratios_count_to_the_rollout_only() -> None:
    log_prob = torch.tensor([[-8.0, -2.0, -2.0]], dtype=torch.float64)
    other = torch.tensor([[-1.0, -2.5, -2.0]], dtype=torch.float64)
    found = figures([tokens(log_prob, old_log_prob=other, rollout_log_prob=other)])
    assert found["ratio_max"] == pytest.approx(math.exp(0.5))
    assert found["rollout_ratio_max"] == pytest.approx(math.exp(7.0))
    assert found["unlikely_share"] == pytest.approx(1 / 3)
    smaller = figures([tokens(other - 3, old_log_prob=other)])
    assert smaller["ratio_max"] == pytest.approx(math.exp(-3)) and smaller["ratio_p999"] == 1.0


def test_only_response_tokens_with_a_weight_count() -> None:
    log_prob = torch.tensor([[-9.0, -9.0, -1.0, -1.0]])
    found = tokens(log_prob, old_log_prob=torch.tensor([[-20.0, -20.0, -1.5, -1.0]]))
    found["response_mask"] = torch.tensor([[0, 1, 1, 1]])
    found["weight"] = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    assert figures([found]) == {
        "ratio_max": pytest.approx(math.exp(0.5)),
        "ratio_p999": pytest.approx(math.exp(0.5)),
        "unlikely_share": 0.0,
    }


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_a_number_is_infinite(broken: float) -> None:
    log_prob = torch.full((2, 3), -1.0)
    log_prob[1, 2] = broken
    other = torch.full((2, 3), -1.0)
    ordinary = [tokens(other, old_log_prob=other, rollout_log_prob=other)]
    found = figures(ordinary, [tokens(log_prob, old_log_prob=other, rollout_log_prob=other)])
    assert found["ratio_max"] == found["ratio_p999"] == found["rollout_ratio_max"] == math.inf
    assert found["unlikely_share"] == pytest.approx(math.isnan(broken) / 12)


def test_a_probability_of_zero_is_unlikely_and_far_from_the_rollout() -> None:
    log_prob, other = torch.tensor([[-math.inf, -1.0]]), torch.tensor([[-1.0, -1.0]])
    found = figures([tokens(log_prob, old_log_prob=other, rollout_log_prob=other)])
    assert found == {"ratio_max": 1.0, "ratio_p999": 1.0, "rollout_ratio_max": math.inf, "unlikely_share": 0.5}


def test_without_data_a_figure_is_missing() -> None:
    empty = tokens(torch.full((1, 2), -1.0), old_log_prob=torch.zeros(1, 2), rollout_log_prob=torch.zeros(1, 2))
    empty["response_mask"] = torch.zeros(1, 2)
    assert figures([empty]) == {}
    assert figures([tokens(torch.full((1, 2), -9.0))]) == {"unlikely_share": 1.0}
    full = [tokens(torch.full((1, 2), -1.0), old_log_prob=torch.full((1, 2), -2.0))]
    assert figures([empty], full)["ratio_max"] == pytest.approx(math.e)


def test_the_margin_is_the_largest_of_the_update_and_missing_in_a_warm_up() -> None:
    early = EarlyWarning()
    early.take_in_margin(50.0, None)
    assert early.metrics() == {}
    for norm, threshold in ((50.0, 100.0), (150.0, 100.0), (90.0, 300.0)):
        early.take_in_margin(norm, threshold)
    assert early.metrics() == {f"{PREFIX}spike_margin": 1.5}
    early.take_in_margin(math.inf, 300.0)
    assert early.metrics() == {f"{PREFIX}spike_margin": math.inf}
    early.start_update()
    assert early.metrics() == {}


def test_a_percentile_beyond_the_histogram_is_the_largest_ratio() -> None:
    log_ratio = torch.linspace(11, 20, 100, dtype=torch.float64).unsqueeze(0)
    found = figures([tokens(log_ratio - 30, old_log_prob=torch.full_like(log_ratio, -30.0))])
    assert found["ratio_p999"] == found["ratio_max"] == pytest.approx(math.exp(20))
