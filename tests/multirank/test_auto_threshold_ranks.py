"""grad_norm_threshold=auto: in actors with checkpoints, and on real gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import auto_threshold_cases
import pytest
from actors import Case
from cluster import Cluster
from test_actor import Launch
from valid_events import valid_events

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("wrap", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.target(version="0.9.1"))])
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


@pytest.mark.slow
def test_on_the_embedded_model_clean_updates_are_silent_and_a_planted_token_is_found(tmp_path: Path) -> None:
    prepare = [sys.executable, str(ROOT / "embedded/prepare.py"), str(tmp_path)]
    subprocess.run(prepare, check=True, capture_output=True)
    cluster = Cluster(1)
    try:
        (found,) = cluster.run(
            auto_threshold_cases.real_gradients, str(tmp_path / "model"), str(tmp_path / "train.parquet")
        )
    finally:
        cluster.stop()
    assert found["clean"] == []
    assert found["token_norm_max"] < found["threshold"] < 20 * found["token_norm_max"]
    (event,) = found["planted"]
    assert event["complete"] and event["culprits"][0]["position"] == 2
