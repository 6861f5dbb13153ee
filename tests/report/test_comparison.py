"""Two runs side by side: `report DIR_A DIR_B`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evidence import THRESHOLD, Event, culprit, drill, event, spike, warning, without_culprits, write_steps

from gradloc import record_events
from gradloc.evidence.writer import record_step
from gradloc.judge.identities import BY_NAME
from gradloc.report.command import main

TOKENS = ["<b>", " \x1b[31mred", " three", " four"]


def write(folder: Path, events: Sequence[Event], margins: Sequence[float | None]) -> str:
    record_events(str(folder), events)
    for step, margin in enumerate(margins, 1):
        record_step(str(folder), step, {"spike_margin": margin})
    return str(folder)


def found(position: int, factor: float, **changes: Any) -> Event:
    return culprit(position, TOKENS, factor * THRESHOLD, **changes)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Before: four spikes in 20 steps, two of them in one step, and a drill. After: one spike in 40 steps."""
    changed = {"context": "another context"}
    before = [
        drill(1, True),
        event(3, [found(0, 2), found(1, 9, prompt="A")], passes=4),
        event(3, [found(0, 4)], passes=4),
        event(8, [found(2, 3, prompt="B")], passes=4),
        without_culprits(9, "diffuse", passes=8),
    ]
    after = [
        found(0, 3, **changed),  # after the same prompt
        found(1, 5, prompt="C"),  # in the same context
        found(2, 6, prompt="C", **changed),  # in neither
        found(3, 7, prompt="B"),  # another token
    ]
    margins = [*[0.5] * 17, 0.7, 4.0, None]
    return [write(tmp_path / "a", before, margins), write(tmp_path / "b", [event(30, after)], [0.25] * 40)]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The comparison as figures, and as the terminal shows it."""
    monkeypatch.setenv("COLUMNS", "2000")

    def call(*arguments: str) -> tuple[dict[str, Any], str]:
        assert main([*arguments, "--json"]) == main([*arguments]) == 0
        figures, end = json.JSONDecoder().raw_decode(out := capsys.readouterr().out)
        return figures, " ".join(out[end:].split())

    return call


def test_the_figures_and_culprits_of_both(runs: list[str], compare: Any) -> None:
    comparison, printed = compare(*runs)
    before, after = comparison["runs"]
    assert (before["steps"], before["spikes"], before["steps_with_spikes"], before["culprits"]) == (20, 4, 3, 4)
    assert before["spikes_per_hundred_steps"] == 20.0 and after["spikes_per_hundred_steps"] == 2.5
    assert before["passes_per_spike"] == 5.0
    assert [before[f"margin_{name}"] for name in ("median", "p90", "max")] == [0.5, 0.7, 4.0]
    assert before["diagnoses"] == {"tokens": 3, "diffuse": 1} and after["diagnoses"] == {"tokens": 1}
    names = ("same", "token", "count", "times_threshold")
    assert comparison["shared_in_all"] == 2 and [[each[name] for name in names] for each in comparison["shared"]] == [
        ["context", TOKENS[1], [1, 1], [9.0, 5.0]],
        ["prompt", TOKENS[0], [2, 1], [4.0, 3.0]],
    ]
    for said in ("spikes per hundred steps", "2 culprits in both runs", "3 of 4", f"A: {runs[0]}", "<b>"):
        assert said in printed
    assert "\x1b" not in printed


def test_earlier_steps_can_be_left_out(runs: list[str], compare: Any) -> None:
    comparison, printed = compare(*runs, "--since", "25")
    assert [(run["steps"], run["spikes"]) for run in comparison["runs"]] == [(0, 0), (16, 1)]
    assert "A has no step from 25 on" in printed


def test_what_is_missing_is_said(tmp_path: Path, compare: Any) -> None:
    first = write(tmp_path / "a", [{**spike(3), "fault": "stale"}] * 20, [])
    second = write(tmp_path / "b", [], [0.5, None])
    (tmp_path / "b" / "spikes.jsonl").write_text("not JSON\n")
    comparison, printed = compare(first, second)
    assert [run["spikes_per_hundred_steps"] for run in comparison["runs"]] == [None, 0.0]
    for said in (
        "In B: 1 line skipped: malformed or unfinished.",
        "In A, faults were planted on purpose: stale.",
        "A has no steps.jsonl, so how frequent spikes are is not known.",
        "No culprit of A is in B, as the same token",
    ):
        assert said in printed


def test_two_runs_open_with_their_verdicts_and_identities(tmp_path: Path, compare: Any) -> None:
    first, second = write(tmp_path / "a", [spike(1, 1200.0, sequence_ratio=2.0)], []), str(tmp_path / "b")
    stale = warning("stale_weights", "rollout_log_probs", 2)
    write_steps(Path(first), 3, {2: [stale], 3: [stale]})
    write_steps(Path(second), 3)
    held = len(BY_NAME)
    assert compare(first, second)[1].startswith(
        f"A: {first}, 1 spike: the mean importance ratios of whole responses are far from 1 B: {second}, no spike "
        f"A: {held - 1} of {held} identities hold in step 3. Broken: rollout_log_probs. "
        "A: rollout_log_probs (stale_weights) is broken in steps 2 to 3: The run has stale_weights. Look. "
        f"B: All {held} identities hold in step 3."
    )
