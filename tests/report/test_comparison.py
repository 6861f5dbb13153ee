"""Two runs side by side: `report DIR_A DIR_B`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from evidence_samples import THRESHOLD, culprit, drill, event, without_culprits
from gradloc import record_events
from gradloc.evidence.writer import STEP_FIGURES, record_step
from gradloc_tools.report.command import main

TOKENS = ["<b>", " \x1b[31mred", " three", " four"]


def write(folder: Path, events: list[dict[str, Any]], margins: list[float | None]) -> str:
    record_events(str(folder), events)
    for step, margin in enumerate(margins, 1):
        record_step(str(folder), step, dict.fromkeys(STEP_FIGURES) | {"spike_margin": margin})
    return str(folder)


def spike(step: int, *tokens: dict[str, Any], **changes: Any) -> dict[str, Any]:
    made = random.Random(step)
    defaults: dict[str, Any] = {"advantage": 1.0, "log_prob": -1.0, "old_log_prob": -1.0, "rollout_log_prob": -1.0}
    culprits = [culprit(t.pop("position"), TOKENS, t.pop("norm"), made, **defaults | t) for t in tokens]
    return event(step, culprits, made, passes=4, **changes)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Before: four spikes in 20 steps, two of them in one step, and a drill. After: one spike in 40 steps."""
    changed = {"context": "another context"}
    before = [
        drill(1, True, random.Random(1)),
        spike(3, {"position": 0, "norm": 2 * THRESHOLD}, {"position": 1, "norm": 9 * THRESHOLD, "prompt": "A"}),
        spike(3, {"position": 0, "norm": 4 * THRESHOLD}),
        spike(8, {"position": 2, "norm": 3 * THRESHOLD, "prompt": "B"}),
        without_culprits(9, "diffuse", random.Random(2), passes=8),
    ]
    after = [
        spike(
            30,
            {"position": 0, "norm": 3 * THRESHOLD, **changed},  # after the same prompt
            {"position": 1, "norm": 5 * THRESHOLD, "prompt": "C"},  # in the same context
            {"position": 2, "norm": 6 * THRESHOLD, "prompt": "C", **changed},  # in neither
            {"position": 3, "norm": 7 * THRESHOLD, "prompt": "B"},  # another token
        )
    ]
    margins = [*[0.5] * 17, 0.7, 4.0, None]
    return [write(tmp_path / "a", before, margins), write(tmp_path / "b", after, [0.25] * 40)]


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_of_both(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = compared(capsys, *runs)["runs"]
    assert (before["steps"], before["spikes"], before["steps_with_spikes"], before["culprits"]) == (20, 4, 3, 4)
    assert before["spikes_per_hundred_steps"] == 20.0 and after["spikes_per_hundred_steps"] == 2.5
    assert before["passes_per_spike"] == 5.0
    assert [before[f"margin_{name}"] for name in ("median", "p90", "max")] == [0.5, 0.7, 4.0]
    assert before["diagnoses"] == {"tokens": 3, "diffuse": 1} and after["diagnoses"] == {"tokens": 1}
    assert sum(after["sources"].values()) == after["culprits"] == 4


def test_the_culprits_of_both(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compared(capsys, *runs)
    assert comparison["shared_in_all"] == 2
    by_context, by_prompt = comparison["shared"]
    assert (by_context["same"], by_context["token"], by_context["count"]) == ("context", TOKENS[1], [1, 1])
    assert by_context["times_threshold"] == [9.0, 5.0]
    assert (by_prompt["same"], by_prompt["token"], by_prompt["count"]) == ("prompt", TOKENS[0], [2, 1])
    assert by_prompt["times_threshold"] == [4.0, 3.0]


def test_earlier_steps_can_be_left_out(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = compared(capsys, *runs, "--since", "8")["runs"]
    assert (before["steps"], before["spikes"], after["steps"], after["spikes"]) == (13, 2, 33, 1)
    assert main([*runs, "--since", "25"]) == 0
    printed = capsys.readouterr().out
    assert "A has no step from 25 on" in printed and "B has no step" not in printed and "steps.jsonl" not in printed


def test_what_the_files_lack_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(
        tmp_path / "a", [{**spike(3, {"position": 0, "norm": 900.0}), "mini_batch": i} for i in range(20)], [0.5]
    )
    second = write(tmp_path / "b", [], [0.5])
    with (tmp_path / "b" / "spikes.jsonl").open("w") as file:
        file.write("not JSON\n")
    before, after = compared(capsys, first, second)["runs"]
    assert before["spikes"] == 16 and len(before["notes"]) == 1 and after["skipped_lines"] == 1
    assert main([first, second]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Note in the files of A: {before['notes'][0]}." in printed
    assert "1 line of B skipped" in printed and "files of B" not in printed


def test_top_is_for_one_run(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*runs, "--top", "3"])
    assert "--top and --html are for the evidence of one run" in capsys.readouterr().err


def test_the_comparison_is_tables(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(runs) == 0
    printed = capsys.readouterr().out
    for said in ("spikes per hundred steps", "2 culprits in both runs", "3 of 4", f"A: {runs[0]}", "<b>"):
        assert said in printed
    assert "\x1b" not in printed


def test_runs_without_steps_without_spikes_and_with_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "a", [spike(3, {"position": 0, "norm": 900.0}, fault="stale")], [])
    second = write(tmp_path / "b", [], [0.5, None])
    comparison = compared(capsys, first, second)
    assert [run["spikes_per_hundred_steps"] for run in comparison["runs"]] == [None, 0.0]
    assert main([first, second]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "In A, faults were planted on purpose: stale." in printed
    assert "A has no steps.jsonl, so how frequent spikes are is not known." in printed
    assert "No culprit of A is in B, as the same token" in printed


def test_a_run_that_is_not_there(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([runs[0], str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
