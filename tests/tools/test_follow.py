"""What is shown of a run in progress: the time left, and the sentence at its end."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _script() -> ModuleType:
    """The script alone: its package changes torch and verl for a machine without a GPU."""
    spec = importlib.util.spec_from_file_location("follow", Path(__file__).parents[2] / "embedded/follow.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


follow = _script()


def clock(*ended: float, steps: int | None = 4, usual: bool = True) -> Any:
    """A clock whose phases and steps ended at these seconds."""
    made = follow.Clock(steps, usual)
    for now in ended:
        made.ends(now)
    return made


STARTS = [seconds for _, _, seconds in follow.PHASES]
STARTED = [STARTS[0], sum(STARTS)]


def test_before_the_first_step_the_usual_seconds_are_left() -> None:
    whole = sum(STARTS) + 4 * follow.STEP_SECONDS
    assert clock().left(0.0) == pytest.approx(whole)
    assert clock(*STARTED).left(STARTED[1]) == pytest.approx(4 * follow.STEP_SECONDS)
    assert clock().slowness(0.0) == 1.0


def test_a_slow_machine_is_said_and_counted_with() -> None:
    late = clock(2 * STARTED[0], 2 * STARTED[1])
    assert late.slowness(2 * STARTED[1]) == pytest.approx(2.0)
    assert late.left(2 * STARTED[1]) == pytest.approx(8 * follow.STEP_SECONDS)
    # A phase that has not ended, but should have long ago.
    assert clock().slowness(5 * STARTS[0]) == pytest.approx(5.0)


def test_measured_steps_replace_the_usual_seconds() -> None:
    two_steps = clock(10.0, 30.0, 130.0, 230.0)
    assert two_steps.left(230.0) == pytest.approx(200.0)
    assert two_steps.left(280.0) == pytest.approx(150.0)
    # The step takes longer than the others: what is left is the last one.
    assert two_steps.left(400.0) == pytest.approx(100.0)
    assert (two_steps.doing, clock().doing) == ("step 3 of 4", "starting Ray")


@pytest.mark.parametrize("unknown", [clock(steps=None), clock(usual=False), clock(*STARTED, 60.0, 70.0, 80.0, 90.0)])
def test_where_nothing_is_known_no_time_is_told(unknown: Any) -> None:
    assert unknown.left(100.0) is None


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({}, "No step was completed."),
        ({1: {follow.TOKEN_NORM: 0.0}}, "No spike in 1 step: all answers to each prompt got the same reward"),
        (
            {1: {follow.TOKEN_NORM: 40.0, "actor/gradloc/threshold": 160.0}, 2: {follow.TOKEN_NORM: 8.0}},
            "No spike in 2 steps. The largest micro-batch norm per token was 40, in step 1, 25% of the threshold.",
        ),
        ({1: {follow.TOKEN_NORM: 40.0, "actor/gradloc/triggered": 1.0}, 2: {}}, "1 of 2 steps spiked."),
    ],
)
def test_the_sentence_at_the_end(metrics: dict[int, dict[str, float]], sentence: str) -> None:
    assert follow.summary(metrics).startswith(sentence)


def test_a_step_in_which_token_clip_found_tokens() -> None:
    metrics = {"critic/score/mean": 0.5, "actor/token_clip/over": 3.0, "actor/token_clip/cut": 2.0}
    assert follow.step_line(7, metrics) == "step 7  reward 0.5  TokenClip: 2 of 3 outlying signals cut"
    assert "TokenClip" not in follow.step_line(7, {"actor/token_clip/over": 0.0, "actor/token_clip/cut": 0.0})


def test_the_time_of_a_step_goes_on() -> None:
    """Also where no time is known that is left, as in a step of a run with a fault."""
    assert clock(*STARTED, usual=False).waiting(STARTED[1] + 300.0) == "step 1 of 4 for 5 min"
    assert clock(*STARTED).waiting(STARTED[1] + 20.0) == "step 1 of 4 for 20 s, about 2 min left in all"


def test_without_a_terminal_lines_tell_how_long_a_step_has_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "EVERY", 0.0)
    looks = iter([True, True, False])
    monkeypatch.setattr(follow, "alive", lambda pid: next(looks))
    log = tmp_path / "train.log"
    log.write_text("".join(f"{mark}\n" for _, mark, _ in follow.PHASES))
    follow.follow(log, 1, follow.Clock(2, False))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" for ")[0] for line in lines if line.startswith("  ")] == ["  step 1 of 2"] * 2
