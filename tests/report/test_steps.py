"""steps.jsonl: its form, its limits, and what the report makes of it; drills and planted faults."""

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from evidence import Event, answer, drill, samples, spike, warning, without_culprits, write_steps
from notation import Caplog, Patch
from valid_events import lines_in, valid_events

from gradloc import guarded, record_events, report
from gradloc.evidence import writer
from gradloc.evidence.writer import record_step
from gradloc.report.charts import levels
from gradloc.report.identities import warnings_of
from gradloc.tools.schema import EVENT, STEP, conforms

FIGURES = {"token_norm_max": 120.0, "threshold": 640.0, "spike_margin": 0.1875, "ratio_max": math.inf, "triggered": 0}
WARNING = warning("stale_weights", "rollout_log_probs")


# The file


def test_a_step_is_one_short_line_of_the_schemas_form(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(STEP)
    record_step(str(tmp_path / "deep" / "dump"), 3, FIGURES, answer([WARNING]))
    (line,) = lines_in(tmp_path / "deep" / "dump", "steps.jsonl")
    assert (tmp_path / "deep" / "dump" / "steps.jsonl").stat().st_size < 2000
    assert {name: line[name] for name in FIGURES} == {**FIGURES, "ratio_max": "Infinity"}
    assert line["global_step"] == 3 and line["rollout_ratio_max"] is None and line["warnings"] == [WARNING]
    jsonschema.validate(line, STEP)
    assert conforms(line, STEP) and not conforms(line, EVENT)
    for name in line.keys() - {"identities", "warnings", "changes", "misplaced_share"}:  # which older lines lack
        assert not conforms({key: value for key, value in line.items() if key != name}, STEP)
    for odd in ({"ratio_max": "large"}, {"warnings": 7}, {"warnings": [{**WARNING, "check": None}]}):
        assert not conforms({**line, **odd}, STEP)


def test_a_failing_disk_is_a_warning(tmp_path: Path, caplog: Caplog) -> None:
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    record_step(str(tmp_path), 4, FIGURES)
    (tmp_path / "spikes.jsonl").mkdir()
    record_events(str(tmp_path), [spike(1)])
    assert "the figures of step 4 could not be written" in caplog.text and "No space left" in caplog.text
    assert "1 gradient spike(s) could not be written" in caplog.text


def test_a_disk_that_hangs_is_not_waited_for_again(tmp_path: Path, caplog: Caplog, monkeypatch: Patch) -> None:
    os.mkfifo(tmp_path / "steps.jsonl")  # nobody reads it, so that opening it never ends
    monkeypatch.setattr(guarded, "PATIENCE", 0.05)
    record_step(str(tmp_path), 3, FIGURES)
    monkeypatch.setattr(guarded, "PATIENCE", 1e9)
    record_events(str(tmp_path), [spike(1)])
    assert "the figures of step 3 could not be written" in caplog.text and "does not respond" in caplog.text
    assert "1 gradient spike(s) could not be written" in caplog.text
    with open(tmp_path / "steps.jsonl", "rb") as reader:  # it answers at last
        assert json.loads(reader.read())["global_step"] == 3


def test_the_last_line_of_a_step_counts_after_a_resume(tmp_path: Path) -> None:
    """A line that is cut, or malformed, is left; a figure that is not known is read over."""
    for step, norm in ((1, 10.0), (2, 20.0), (3, 30.0)):
        record_step(str(tmp_path), step, {"token_norm_max": norm})
    file = tmp_path / "steps.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    for step, norm in ((2, 21.0), (3, math.nan), (4, 40.0)):
        record_step(str(tmp_path), step, {"token_norm_max": norm})
    last = json.loads(file.read_text().splitlines()[-1])
    with open(file, "a") as more:
        for changes in ({"ratio_p999": 1.02}, {"global_step": 5, "warnings": 7}):
            more.write(f"{json.dumps({**last, **changes})}\n")
        more.write('{"schema": 4, "glo')
    found = report.read(str(tmp_path))
    assert found.skipped.total() == 3 and warnings_of(found) == []
    norms = [figures["token_norm_max"] for figures in found.steps.values()]
    assert norms == pytest.approx([10.0, 21.0, math.nan, 40.0], nan_ok=True)


@pytest.mark.parametrize("count", [0, 1])
def test_steps_of_a_run_are_found_beside_its_events(tmp_path: Path, count: int) -> None:
    record_step(str(tmp_path / "bisect_dump"), 3, FIGURES)
    record_events(str(tmp_path / "bisect_dump"), samples(count))
    for path in (tmp_path, *(tmp_path / "bisect_dump" / name for name in ("", "spikes.jsonl", "steps.jsonl"))):
        found = report.read(str(path))
        assert list(found.steps) == [3] and len(found.events) == count and not found.skipped


# What the report shows


def test_the_steps_before_a_spike_are_shown(tmp_path: Path, summary: Any, view: Any) -> None:
    events = samples(12)
    assert view(events).spikes[0].content["before"] is None
    last = events[-1]["global_step"]
    figures = write_steps(tmp_path, last, events=events)
    before = view().spikes[-1].content["before"]
    assert summary()["steps"]["count"] == last
    assert before.title == "The 20 steps before"
    names = ["spike_margin", "ratio_max", "rollout_ratio_max", "unlikely_share"]
    assert [row[0][1] for row in before.rows] == names
    for name, (_, (points, dot), usual, own) in zip(names, before.rows, strict=True):
        values = [figures[step][name] for step in range(last - 20, last + 1)]
        factor = 100 if name == "unlikely_share" else 1
        shown = [float(text.removesuffix("%")) for text in (usual, own)]
        assert shown == pytest.approx([factor * statistics.median(values[:-1]), factor * values[-1]], rel=5e-3)
        heights = [float(point.split(",")[1]) for point in points.split()]
        assert len(heights) == 21 and heights.index(min(heights)) == values.index(max(values))
        assert dot == points.split()[-1]  # the spike is marked
    # Earlier steps are left out of the level, but not here.
    since = last - 10
    assert [step for step, *_ in levels(report.read(str(tmp_path), since))] == [*range(since, last + 1)]
    assert view(since=since).spikes[-1].content["before"] == before


def test_a_run_without_a_spike_says_how_near_it_came(tmp_path: Path, show: Any) -> None:
    for step in range(1, 5):
        record_step(str(tmp_path), step, {**FIGURES, "spike_margin": 0.1 * step if step != 4 else None})
    out = show()
    assert "No gradient spike in" in out
    assert "Steps: 4 (1 to 4) Largest micro-batch norm per token over its threshold: 0.3 (in step 3)" in out


# Drills and faults


def test_a_drill_is_no_spike(tmp_path: Path, show: Any, summary: Any, view: Any) -> None:
    valid_events(json.dumps([drill(2, True)]))
    alone = summary(events=[spike(3)])
    together = summary(events=[drill(2, True)])
    (shown,) = together["drills"]
    assert shown["text"] == "Drill in step 2: the planted token was found, 1 extra pass, 4 s." and not shown["advice"]
    assert {**together, "drills": []} == alone
    assert shown["text"] in show() and not summary("--since", "3")["drills"]
    write_steps(tmp_path, 9)
    made = view([drill(3, False)])
    assert made.title == "1 gradient spike in step 3" and len(made.spikes) == 1 and len(made.drills) == 2
    names = [(series.name, len(series.points)) for series in made.charts["level"].series if series.kind == "marks"]
    assert names == [("other", 1), ("drill, found", 1), ("drill, FAILED", 1)]


FAILURES = [
    ({"threshold": 1e30}, "The threshold was not finite, or that of the warm-up of grad_norm_threshold=auto"),
    ({"error": "rank 1: out of memory"}, "It failed with an error: rank 1: out of memory."),
    ({"complete": False, "budget": 1, "diagnosis": "incomplete"}, "Its budget of 1 pass was spent: raise"),
    ({"mini_batch": 3}, "The same mini-batch has a spike of its own"),
    ({}, "The event names no reason"),
]


@pytest.mark.parametrize(("changes", "advice"), FAILURES)
def test_a_drill_that_fails_says_what_to_look_at(show: Any, changes: Event, advice: str) -> None:
    out = show(events=[drill(2, False, **changes), {**without_culprits(2, "diffuse"), "mini_batch": 3}])
    assert "Drill in step 2 FAILED: the planted token (rank 0, row 0, position 1) was not found, 1 extra pass" in out
    assert "Do not rely on spike_detection in this configuration before a drill succeeds." in out
    assert [text for _, text in FAILURES if text in out] == [advice]


def test_a_planted_fault_is_announced(show: Any, summary: Any, view: Any) -> None:
    said = "A fault was planted in this run on purpose: bitflip"
    assert show(events=[{**spike(step), "fault": "bitflip"} for step in (1, 2)]).count(said) == 1
    assert summary()["faults"] == ["bitflip"] and view().alarms == [said]


# Spikes that are counted, and not in spikes.jsonl


def write_counted(directory: Path, count: int = 2) -> None:
    """A run of three steps, with the evidence of spikes in its second step."""
    record_events(str(directory), [{**spike(2), "mini_batch": i} for i in range(count)])
    for step in range(1, 4):
        record_step(str(directory), step, {**FIGURES, "triggered": count * (step == 2)})


@pytest.mark.parametrize("has", [0, 1])
def test_spikes_that_are_counted_and_missing_are_told(tmp_path: Path, show: Any, view: Any, has: int) -> None:
    write_counted(tmp_path)
    file = tmp_path / "spikes.jsonl"
    assert "steps.jsonl counts" not in show()
    first, _ = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first if has else first[: len(first) // 2])
    out = show(code=1)
    said = f"steps.jsonl counts 2 spikes in step 2, spikes.jsonl has {has}: it is missing or cut."
    assert said in out and view().alarms[0].startswith(said)
    assert "No gradient spike in" not in out and ("No gradient spike could be read in" in out) == (not has)
    assert ("1 line skipped: malformed or unfinished." in out) == (not has)
    assert json.loads(show(str(tmp_path), "--json", code=1))["runs"][1]["lost_spikes"].startswith(said)
    show("--since", "3")


def test_spikes_that_the_writer_leaves_out_are_not_lost(tmp_path: Path, monkeypatch: Patch, show: Any) -> None:
    monkeypatch.setattr(writer, "EVENTS_PER_STEP", 1)
    write_counted(tmp_path)
    assert "1 more spikes are not written" in show()
    monkeypatch.setattr(writer, "FILE_BYTES", 0)
    record_events(str(tmp_path), [spike(4)])
    for step in (4, 5):
        record_step(str(tmp_path), step, {**FIGURES, "triggered": 1})
    assert "events are not written from here on" in show()
    show("--since", "5")
    record_step(str(tmp_path), 3, {**FIGURES, "triggered": math.inf})
    show()


@pytest.mark.parametrize(("steps", "runs"), [((1, 2, 1, 2), 2), ((1, 2, 3, 4, 3, 4, 5, 3), 1)])
def test_several_runs_in_one_folder_are_told_from_a_resumed_one(
    tmp_path: Path, show: Any, steps: tuple[int, ...], runs: int
) -> None:
    for step in steps:
        record_step(str(tmp_path), step, FIGURES)
    said = "2 runs are in this folder: the steps begin again at 1, and the spikes of all are counted."
    assert (said in show()) == (runs == 2)
