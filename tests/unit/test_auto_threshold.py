"""The rule of grad_norm_threshold=auto, without a model."""

import math
import random
from collections.abc import Callable

import pytest

from gradloc.threshold import WARMUP, WINDOW, Threshold

NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda source: source.gauss(0, 0.5),
    "laplace": lambda source: 0.3 * source.expovariate(1) * source.choice([-1, 1]),
    "gumbel": lambda source: -0.3 * math.log(-math.log(source.random())),
    # Most mini-batches hold hardly a wrong answer, so their norms are small, by factors of up to 1,000.
    "nearly solved": lambda source: source.gauss(0, 0.5) if source.random() < 0.3 else source.gauss(-4, 1.5),
}


@pytest.mark.parametrize("noise", NOISES)
def test_false_alarms_stay_under_one_in_a_thousand(noise: str) -> None:
    source = random.Random(1)
    alarms = checked = 0
    for _ in range(4):
        auto, norms = Threshold("auto"), []
        for _ in range(WARMUP + 1500):
            norm = 35 * math.exp(NOISES[noise](source))
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
        for norm in (2.0, 0.0, math.inf, math.nan):
            auto.next(norm, 0.0)
    assert auto.automatic is None
    auto.next(2.0, 0.0)
    assert auto.automatic == 10.0
    for step in range(2 * WINDOW):
        auto.next(1.0 + step % 7, 0.0)
    # The last ones alone count, so that a lasting change is followed.
    assert auto.state_dict()["token_norms"] == [1.0 + step % 7 for step in range(WINDOW, 2 * WINDOW)]
    assert auto.automatic == 5 * 7
