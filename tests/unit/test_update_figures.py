"""The figures of an update's tokens."""

import math

import pytest
import torch
from torch import Tensor

from gradloc.metrics import UpdateMetrics, own_figures

NAMES = ("ratio_max", "rollout_ratio_max", "unlikely_share", "spike_margin")


def tokens(log_prob: Tensor, **others: Tensor) -> dict[str, Tensor]:
    ones = torch.ones_like(log_prob)
    return {"response_mask": ones, "weight": ones, "log_prob": log_prob, **others}


def named(found: UpdateMetrics) -> dict[str, float]:
    metrics = found.metrics()
    return {name: metrics[f"actor/gradloc/{name}"] for name in NAMES if f"actor/gradloc/{name}" in metrics}


def figures(*ranks: list[dict[str, Tensor]]) -> dict[str, float]:
    """Of one mini-batch; with several ranks and mini-batches, test_actor.py (multirank) has them."""
    found = UpdateMetrics()
    found.take_in(torch.stack([own_figures(micro_batches) for micro_batches in ranks]))
    return named(found)


def test_small_ratios_count_to_the_rollout_only() -> None:
    log_prob = torch.tensor([[-8.0, -2.0, -2.0]], dtype=torch.float64)
    other = torch.tensor([[-1.0, -2.5, -2.0]], dtype=torch.float64)
    found = figures([tokens(log_prob, old_log_prob=other, rollout_log_prob=other)])
    expected = {"ratio_max": math.exp(0.5), "rollout_ratio_max": math.exp(7.0), "unlikely_share": 1 / 3}
    assert found == pytest.approx(expected)
    assert figures([tokens(other - 3, old_log_prob=other)])["ratio_max"] == pytest.approx(math.exp(-3))
    # Response tokens with a weight count.
    some = tokens(torch.tensor([[-9.0, -9.0, -1.0, -1.0]]), old_log_prob=torch.tensor([[-20.0, -20.0, -1.5, -1.0]]))
    some |= {"response_mask": torch.tensor([[0, 1, 1, 1]]), "weight": torch.tensor([[1.0, 0.0, 1.0, 1.0]])}
    assert figures([some]) == {"ratio_max": pytest.approx(math.exp(0.5)), "unlikely_share": 0.0}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_a_number_is_infinite(broken: float) -> None:
    log_prob = torch.full((2, 3), -1.0)
    log_prob[1, 2] = broken
    other = torch.full((2, 3), -1.0)
    ordinary = [tokens(other, old_log_prob=other, rollout_log_prob=other)]
    found = figures(ordinary, [tokens(log_prob, old_log_prob=other, rollout_log_prob=other)])
    assert found["ratio_max"] == found["rollout_ratio_max"] == math.inf
    assert found["unlikely_share"] == pytest.approx(math.isnan(broken) / 12)


def test_without_data_a_figure_is_missing() -> None:
    empty = tokens(torch.full((1, 2), -1.0), old_log_prob=torch.zeros(1, 2), rollout_log_prob=torch.zeros(1, 2))
    empty["response_mask"] = torch.zeros(1, 2)
    assert figures([empty]) == {}
    assert figures([tokens(torch.full((1, 2), -9.0))]) == {"unlikely_share": 1.0}


def test_the_margin_is_the_largest_of_an_update_but_in_a_warm_up() -> None:
    found = UpdateMetrics()
    for norm, threshold in ((50.0, None), (50.0, 100.0), (150.0, 100.0), (90.0, 300.0)):
        found.take_in_level(norm, threshold)
    assert named(found) == {"spike_margin": 1.5}
