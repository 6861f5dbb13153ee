"""grad_norm_threshold=auto: alone, in actors with checkpoints, and on real gradients."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import auto_threshold_cases
import pytest
from actor_cases import Case
from cluster import Cluster
from test_actor import Launch, launch
from valid_events import valid_events

from gradloc.auto_threshold import WARMUP, WINDOW, AutoThreshold

__all__ = ["launch"]
ROOT = Path(__file__).parents[2]


def normal(source: random.Random) -> float:
    return source.gauss(0, 0.5)


def laplace(source: random.Random) -> float:
    return 0.3 * source.expovariate(1) * source.choice([-1, 1])


def gumbel(source: random.Random) -> float:
    return -0.3 * math.log(-math.log(source.random()))


@pytest.mark.parametrize("noise", [normal, laplace, gumbel])
def test_false_alarms_stay_under_one_in_a_thousand(noise: Callable[[random.Random], float]) -> None:
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


def test_a_warm_up_comes_first_and_takes_no_zeros_or_infinities() -> None:
    auto = AutoThreshold()
    for _ in range(WARMUP - 1):
        auto.take_in(2.0)
        auto.take_in(0.0)
        auto.take_in(math.inf)
        auto.take_in(math.nan)
    assert auto.value is None
    auto.take_in(2.0)
    # No spread at all: the least deviation, widened for a sample this small.
    assert auto.value == pytest.approx(2 * math.exp(6 * 0.1 * (1 + 16 / WARMUP)))


def test_spikes_hardly_move_it_and_a_lasting_shift_is_followed_within_half_a_window() -> None:
    source = random.Random(2)
    auto, spiked = AutoThreshold(), AutoThreshold()
    for step in range(WINDOW):
        norm = math.exp(normal(source))
        auto.take_in(norm)
        spiked.take_in(1e4 * norm if step % 10 == 0 else norm)
    assert 1 <= spiked.value / auto.value < 2
    before = auto.value
    for _ in range(WINDOW // 2 + 1):
        auto.take_in(100 * math.exp(normal(source)))
    assert auto.value > 50 * before


def test_what_it_has_learned_can_be_taken_along() -> None:
    auto, other = AutoThreshold(), AutoThreshold()
    for step in range(2 * WINDOW):
        auto.take_in(1.0 + step % 7)
    norms = json.loads(json.dumps(auto.norms()))
    assert len(norms) == WINDOW
    other.restart_from(norms)
    assert other.value == pytest.approx(auto.value, rel=1e-12)


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_a_resumed_run_has_the_same_thresholds_and_finds_the_spike(launch: Launch, tmp_path: Path, wrap: str) -> None:
    case = Case(wrap, rows=8, mini_batch=2, planted=((1, 3, 6),))
    results = launch(2, auto_threshold_cases.resume, case, str(tmp_path))
    for straight, resumed, anew, events in results:
        assert None not in straight
        assert resumed == pytest.approx(straight, rel=1e-12)
        assert anew == [None, None, None]  # 12 mini-batches are no warm-up
        assert events == results[0][-1]
        (event,) = valid_events(events)
        assert [(c["rank"], c["micro_batch"], c["position"]) for c in event["culprits"]] == [(1, 0, 6)]
        assert event["trigger"]["threshold"] < event["trigger"]["norm"]


def test_in_the_warm_up_only_nan_is_a_spike(launch: Launch) -> None:
    case = Case("fsdp2", planted=((1, 3, 6),), nan=((0, 2, 7),))
    for run in launch(2, auto_threshold_cases.warm_up, case):
        first, second = (valid_events(events) for events in run.events)
        (event,) = first
        assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} >= {(0, 2, 7)}
        assert second == [] and "actor/gradloc/threshold" not in run.metrics[0]


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (1, Case("none", rows=4, mini_batch=4, micro_batch=4, nan=((0, 2, 7),))),
        (2, Case("fsdp2", model="tiled", rows=4, mini_batch=4, nan=((0, 2, 7),))),
    ],
)
def test_without_any_finite_norm_only_nan_is_a_culprit(launch: Launch, world: int, case: Case) -> None:
    """One micro-batch in all, and the reduced meter: a NaN leaves nothing to tell ordinary norms from."""
    for run in launch(world, auto_threshold_cases.warm_up, case):
        first, second = (valid_events(events) for events in run.events)
        (event,) = first
        assert event["complete"] and second == []
        assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} == {(0, 2, 7)}


def test_on_the_embedded_model_clean_updates_are_silent_and_a_planted_token_is_found(tmp_path: Path) -> None:
    prepare = [sys.executable, str(ROOT / "embedded/prepare.py"), str(tmp_path)]
    subprocess.run(prepare, check=True, capture_output=True, timeout=300)
    cluster = Cluster(1)
    try:
        (found,) = cluster.run(
            auto_threshold_cases.real_gradients, str(tmp_path / "model"), str(tmp_path / "train.parquet"), timeout=300
        )
    finally:
        cluster.stop()
    assert found["clean"] == []
    assert found["token_norm_max"] < found["threshold"] < 20 * found["token_norm_max"]
    (event,) = found["planted"]
    assert event["complete"] and event["culprits"][0]["position"] == 2
