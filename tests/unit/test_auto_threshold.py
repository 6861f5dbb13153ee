"""The rule of grad_norm_threshold=auto, without a model."""

import math
import random
from collections.abc import Callable

import pytest

from gradloc.threshold import WARMUP, WINDOW, Threshold

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
    for _ in range(4):
        auto, norms = Threshold("auto"), []
        for _ in range(WARMUP + 1500):
            norm = 35 * math.exp(noise(source))
            norms.append(norm)
            if auto.automatic is not None:
                checked += 1
                alarms += norm > auto.automatic
            auto.next(norm, 0.0)
        # A spike need not be far over the largest ordinary norms.
        assert auto.automatic is not None and auto.automatic < 5 * max(norms[-WINDOW:])
    assert checked == 6000 and alarms <= checked / 1000


def test_the_threshold_is_five_times_the_90th_percentile() -> None:
    auto = Threshold("auto")
    norms = [float(norm) for norm in range(1, 101)]
    random.Random(4).shuffle(norms)
    for norm in norms:
        auto.next(norm, 0.0)
    assert auto.automatic == 5 * 90
    # A warm-up comes first, and takes no zeros or infinities.
    auto = Threshold("auto")
    for _ in range(WARMUP - 1):
        auto.next(2.0, 0.0)
        auto.next(0.0, 0.0)
        auto.next(math.inf, 0.0)
        auto.next(math.nan, 0.0)
    assert auto.automatic is None
    auto.next(2.0, 0.0)
    assert auto.automatic == 10.0
    for step in range(2 * WINDOW):
        auto.next(1.0 + step % 7, 0.0)
    assert len(auto.state_dict()["token_norms"]) == WINDOW


@pytest.mark.parametrize("count", [WARMUP, 100, WINDOW, 2 * WINDOW])
def test_the_threshold_hardly_moves_while_under_a_tenth_spike(count: int) -> None:
    source = random.Random(2)
    auto, spiked = Threshold("auto"), Threshold("auto")
    for step in range(count):
        norm = math.exp(normal(source))
        auto.next(norm, 0.0)
        spiked.next(1e4 * norm if step % 11 == 0 else norm, 0.0)
    assert auto.automatic is not None and spiked.automatic is not None
    assert 1 <= spiked.automatic / auto.automatic < 5


def test_a_lasting_shift_is_followed() -> None:
    source = random.Random(2)
    auto = Threshold("auto")

    def take_in(count: int, level: float) -> float:
        for _ in range(count):
            auto.next(level * math.exp(normal(source)), 0.0)
        assert auto.automatic is not None
        return auto.automatic

    low = take_in(WINDOW, 1.0)
    assert take_in(WINDOW // 10 - 1, 100.0) < 10 * low
    assert take_in(2, 100.0) > 10 * low
    take_in(WINDOW, 100.0)
    assert take_in(9 * WINDOW // 10 + 2, 1.0) < 10 * low
