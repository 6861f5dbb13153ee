"""The rule of grad_norm_threshold=auto, without a model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest

from gradloc.threshold import WARMUP, WINDOW, AutoThreshold

Noise = Callable[[random.Random], float]


def normal(source: random.Random) -> float:
    return source.gauss(0, 0.5)


def laplace(source: random.Random) -> float:
    return 0.3 * source.expovariate(1) * source.choice([-1, 1])


def gumbel(source: random.Random) -> float:
    return -0.3 * math.log(-math.log(source.random()))


def nearly_solved(source: random.Random) -> float:
    """Most mini-batches hold hardly a wrong answer, so their norms are small, by factors of up to 1,000."""
    return source.gauss(0, 0.5) if source.random() < 0.3 else source.gauss(-4, 1.5)


@pytest.mark.parametrize("noise", [normal, laplace, gumbel, nearly_solved])
def test_false_alarms_stay_under_one_in_a_thousand(noise: Noise) -> None:
    source = random.Random(1)
    alarms = checked = 0
    for _ in range(10):
        auto = AutoThreshold()
        for _ in range(WARMUP + 1500):
            norm = 35 * math.exp(noise(source))
            if auto.value is not None:
                checked += 1
                alarms += norm > auto.value
            auto.take_in(norm)
    assert checked == 15_000 and alarms <= checked / 1000


@pytest.mark.parametrize("noise", [normal, laplace, gumbel, nearly_solved])
def test_a_spike_need_not_be_far_over_the_largest_ordinary_norms(noise: Noise) -> None:
    source = random.Random(3)
    auto = AutoThreshold()
    norms = [35 * math.exp(noise(source)) for _ in range(WINDOW)]
    for norm in norms:
        auto.take_in(norm)
    assert auto.value is not None and auto.value < 5 * max(norms)


def test_a_warm_up_comes_first_and_takes_no_zeros_or_infinities() -> None:
    auto = AutoThreshold()
    for _ in range(WARMUP - 1):
        auto.take_in(2.0)
        auto.take_in(0.0)
        auto.take_in(math.inf)
        auto.take_in(math.nan)
    assert auto.value is None
    auto.take_in(2.0)
    assert auto.value == 10.0


def test_the_threshold_is_five_times_the_90th_percentile() -> None:
    auto = AutoThreshold()
    norms = [float(norm) for norm in range(1, 101)]
    random.Random(4).shuffle(norms)
    for norm in norms:
        auto.take_in(norm)
    assert auto.value == 5 * 90


@pytest.mark.parametrize("count", [WARMUP, 100, WINDOW, 2 * WINDOW])
def test_the_threshold_hardly_moves_while_fewer_than_a_tenth_spike(count: int) -> None:
    source = random.Random(2)
    auto, spiked = AutoThreshold(), AutoThreshold()
    for step in range(count):
        norm = math.exp(normal(source))
        auto.take_in(norm)
        spiked.take_in(1e4 * norm if step % 11 == 0 else norm)
    assert auto.value is not None and spiked.value is not None
    assert 1 <= spiked.value / auto.value < 5


def test_a_lasting_shift_is_followed() -> None:
    source = random.Random(2)
    auto = AutoThreshold()

    def take_in(count: int, level: float) -> float:
        for _ in range(count):
            auto.take_in(level * math.exp(normal(source)))
        assert auto.value is not None
        return auto.value

    low = take_in(WINDOW, 1.0)
    assert take_in(WINDOW // 10 - 1, 100.0) < 10 * low
    assert take_in(2, 100.0) > 10 * low
    take_in(WINDOW, 100.0)
    assert take_in(9 * WINDOW // 10 + 2, 1.0) < 10 * low


def test_the_window_is_saved_and_loaded() -> None:
    auto = AutoThreshold()
    for step in range(2 * WINDOW):
        auto.take_in(1.0 + step % 7)
    norms = json.loads(json.dumps([*auto.norms]))
    assert len(norms) == WINDOW
    other = AutoThreshold(norms)
    assert other.value == auto.value
