"""steps.jsonl: its form, its limits, and what the report makes of it; drills and planted faults."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from evidence_samples import culprit, drill, event, samples, step_figures, without_culprits
from gradloc import record_events
from gradloc.evidence import writer
from gradloc.evidence.schema import EVENT, NOTE, STEP, conforms
from gradloc.evidence.writer import record_step
from gradloc_tools import report
from gradloc_tools.report import build
from gradloc_tools.report.build import FEW_STEPS
from gradloc_tools.report.command import main
from gradloc_tools.report.steps import POINTS, level, steps_before

FIGURES = {"token_norm_max": 120.0, "threshold": 640.0, "spike_margin": 0.1875, "ratio_max": math.inf, "triggered": 0}


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes events and prints the report on tmp_path, in one line."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: str, events: list[dict[str, Any]] = ()) -> str:
        record_events(str(tmp_path), events)
        assert main([str(tmp_path), *arguments]) == 0
        return " ".join(capsys.readouterr().out.split())

    yield call


# The file


def test_a_step_is_one_short_line_of_the_schemas_form(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(STEP)
    record_step(str(tmp_path / "deep" / "dump"), 3, FIGURES)
    (line,) = lines(tmp_path / "deep" / "dump")
    jsonschema.validate(line, STEP)
    assert conforms(line, STEP) and not conforms(line, EVENT)
    assert {name: line[name] for name in FIGURES} == {**FIGURES, "ratio_max": "Infinity"}
    assert line["global_step"] == 3 and line["rollout_ratio_max"] is None and line["unlikely_share"] is None
    assert (tmp_path / "deep" / "dump" / "steps.jsonl").stat().st_size < 350


def test_steps_do_not_conform_without_their_fields(tmp_path: Path) -> None:
    record_step(str(tmp_path), 3, FIGURES)
    (line,) = lines(tmp_path)
    for name in line.keys() - {"warnings", "misplaced_share"}:  # which older lines lack
        assert not conforms({key: value for key, value in line.items() if key != name}, STEP)
    assert not conforms({**line, "ratio_max": "large"}, STEP)
    assert line["warnings"] == [] and not conforms({**line, "warnings": [{"name": "stale_weights"}]}, STEP)


def test_a_step_has_its_warnings(tmp_path: Path) -> None:
    warning = {"name": "stale_weights", "sentence": "The rollout is late.", "check": "`look` shows it."}
    record_step(str(tmp_path), 3, FIGURES, [warning])
    (line,) = lines(tmp_path)
    assert line["warnings"] == [warning]
    jsonschema.validate(line, STEP)
    assert conforms(line, STEP)


def test_a_file_stays_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_step(str(tmp_path), 0, FIGURES)
    size = (tmp_path / "steps.jsonl").stat().st_size + 10
    monkeypatch.setattr(writer, "FILE_BYTES", 10 * size)
    for step in range(1, 60):
        record_step(str(tmp_path), step, FIGURES)
    assert (tmp_path / "steps.jsonl").stat().st_size < 11 * size and caplog.text.count("left out of") == 1
    found = report.read(str(tmp_path))
    assert list(found.steps) == list(range(len(found.steps))) and len(found.steps) >= 9
    (note,) = (line for line in lines(tmp_path) if "note" in line)
    jsonschema.validate(note, NOTE)
    assert found.notes == {note["message"]: {note["global_step"]}}
    assert (note["note"], note["global_step"], note["count"]) == ("size_limit", len(found.steps), 1)
    assert f"the figures of step {len(found.steps)} left out" in caplog.text
    assert note["message"].startswith("steps are not written from here on")


def test_a_failing_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    record_step(str(tmp_path / "file" / "dump"), 3, FIGURES)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "steps.jsonl").symlink_to("/dev/full")
    record_step(str(tmp_path / "full"), 4, FIGURES)
    assert "the figures of step 3 could not be written" in caplog.text
    assert "the figures of step 4 could not be written" in caplog.text and "No space left" in caplog.text


def test_a_disk_that_hangs_is_a_warning_and_not_waited_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "steps.jsonl")  # nobody reads it, so that opening it never ends
    monkeypatch.setattr(writer, "PATIENCE", 0.05)
    record_step(str(tmp_path), 3, FIGURES)
    monkeypatch.setattr(writer, "PATIENCE", 1e9)
    record_events(str(tmp_path), samples(1))
    assert "the figures of step 3 could not be written" in caplog.text and "does not respond" in caplog.text
    assert "1 gradient spike(s) could not be written" in caplog.text
    with open(tmp_path / "steps.jsonl", "rb") as reader:  # it answers at last
        assert json.loads(reader.read())["global_step"] == 3


def test_the_last_line_of_a_step_counts_after_a_resume(tmp_path: Path) -> None:
    for step, norm in ((1, 10.0), (2, 20.0), (3, 30.0)):
        record_step(str(tmp_path), step, {"token_norm_max": norm})
    file = tmp_path / "steps.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    for step, norm in ((2, 21.0), (3, math.nan)):
        record_step(str(tmp_path), step, {"token_norm_max": norm})
    with open(file, "a") as torn:
        torn.write('{"schema": 4, "glo')
    found = report.read(str(tmp_path))
    assert found.skipped == 2
    assert [figures["token_norm_max"] for figures in found.steps.values()][:2] == [10.0, 21.0]
    assert math.isnan(found.steps[3]["token_norm_max"] or 0.0)


def test_steps_of_a_run_are_found_beside_its_events(tmp_path: Path) -> None:
    record_step(str(tmp_path / "bisect_dump"), 3, FIGURES)
    places = [tmp_path, *(tmp_path / "bisect_dump" / name for name in ("", "spikes.jsonl", "steps.jsonl"))]
    for count in (0, 1):
        record_events(str(tmp_path / "bisect_dump"), samples(count))
        for path in places:
            found = report.read(str(path))
            assert list(found.steps) == [3] and len(found.events) == count and not found.skipped


# The level over the run


def test_a_long_run_is_thinned_without_losing_its_highest_steps() -> None:
    generator = random.Random(1)
    norms = {step: generator.lognormvariate(0, 0.3) for step in range(1, 20_001)}
    norms |= {7777: 900.0, 12_345: math.nan, 19_999: math.inf}
    found = level({step: {"token_norm_max": norm, "threshold": 5.0} for step, norm in norms.items()})
    assert found is not None and found["steps_in_all"] == 20_000
    assert POINTS / 2 <= len(found["steps"]) <= POINTS and found["steps"] == sorted(set(found["steps"]))
    assert {7777, 12_345, 19_999, min(norms, key=lambda step: norms[step])} <= set(found["steps"])
    assert len(found["steps"]) == len(found["norms"]) == len(found["thresholds"])
    # Lows are kept as well, so that the line does not look higher than the run was.
    assert sum(norm < 1 for norm in found["norms"]) > len(found["norms"]) / 3


@pytest.mark.parametrize("count", [1, 1999, 2000])
def test_a_run_that_fits_is_kept_whole(count: int) -> None:
    steps = {step: {"token_norm_max": 1.0 * step, "threshold": None} for step in range(count)}
    found = level(steps)
    assert found is not None and found["steps"] == list(steps)
    assert level(steps, since=count) is None and level({}) is None


# What the report shows


def test_evidence_without_steps_still_opens(tmp_path: Path, show: Any) -> None:
    out = show(events=samples(3))
    assert "3 gradient spikes" in out
    view = build(report.read(str(tmp_path)))
    assert "level" not in view.charts and view.spikes[0].content["before"] is None
    assert json.loads(show("--json"))["steps"] is None


def test_the_steps_before_a_spike_are_shown(tmp_path: Path, show: Any) -> None:
    events = samples(12)
    figures = step_figures(events, events[-1]["global_step"])
    for step, of_step in figures.items():
        record_step(str(tmp_path), step, of_step)
    show(events=events)
    summary = json.loads(show("--json"))
    last = events[-1]["global_step"]
    assert (summary["steps"]["count"], summary["steps"]["first"], summary["steps"]["last"]) == (last, 1, last)
    assert summary["steps"]["last_figures"]["threshold"] == 640.0
    before = build(report.read(str(tmp_path))).spikes[-1].content["before"]
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
    since = last - 2 * FEW_STEPS
    evidence = report.read(str(tmp_path), since=since)
    found = level(evidence.steps, evidence.since)
    assert found is not None and found["steps"] == [*range(since, last + 1)]
    assert build(evidence).spikes[-1].content["before"] == before


def test_missing_steps_and_figures_are_left_out() -> None:
    steps = {step: {**dict.fromkeys(writer.STEP_FIGURES), "spike_margin": 0.5, "ratio_max": None} for step in (3, 5, 8)}
    steps[5]["ratio_max"] = math.nan
    found = steps_before(steps, 8)
    assert found is not None and found["steps"] == [3, 5, 8]
    margin, ratio = found["figures"]
    assert margin == {"name": "spike_margin", "values": [0.5, 0.5, 0.5]}
    assert ratio["name"] == "ratio_max" and ratio["values"][::2] == [None, None] and math.isnan(ratio["values"][1])
    # A spike whose own step is not known; and spikes without a step before them.
    assert steps_before(steps, 7) == {
        "steps": [3, 5],
        "figures": [{**margin, "values": [0.5, 0.5]}, {**ratio, "values": ratio["values"][:2]}],
    }
    assert steps_before(steps, 3) is None and steps_before(steps, 29) is None and steps_before({}, 3) is None


def test_steps_of_an_older_release_are_read(tmp_path: Path) -> None:
    record_step(str(tmp_path), 3, FIGURES)
    (line,) = lines(tmp_path)
    (tmp_path / "steps.jsonl").write_text(json.dumps({**line, "ratio_p999": 1.02}) + "\n")
    found = report.read(str(tmp_path))
    assert found.steps[3]["spike_margin"] == FIGURES["spike_margin"] and not found.skipped


def test_a_run_without_a_spike_says_how_near_it_came(tmp_path: Path, show: Any) -> None:
    for step in range(1, 5):
        record_step(str(tmp_path), step, {**FIGURES, "spike_margin": 0.1 * step if step != 4 else None})
    out = show()
    assert "No gradient spike in" in out
    assert "Steps: 4 (1 to 4) Largest micro-batch norm per token over its threshold: 0.3 (in step 3)" in out


def test_the_summary_of_an_event_comes_after_its_verdict(tmp_path: Path, show: Any) -> None:
    sample = {**samples(1)[0], "summary": "2 of 2 culprits are\x1b[31m rare tokens."}
    out = show(events=[sample])
    assert "2 of 2 culprits are\\x1b[31m rare tokens." in out
    assert out.index("What happened") < out.index("What was found") and "\x1b" not in out
    assert json.loads(show("--json"))["largest_events"][0]["summary"] == sample["summary"]


def test_all_sources_of_a_culprit_are_kept(tmp_path: Path) -> None:
    generator = random.Random(1)
    several = {**culprit(0, ["a"], 9000.0, generator), "source": "unsampled", "sources": ["unsampled", "unlikely"]}
    record_events(str(tmp_path), [event(1, [several], generator)])
    assert build(report.read(str(tmp_path))).culprits[0].reasons == ["unsampled", "unlikely"]


# Drills and faults


def test_a_drill_is_no_spike(tmp_path: Path, show: Any) -> None:
    generator = random.Random(1)
    spike = samples(1)[0]
    jsonschema.validate(writer.jsonable(drill(2, True, generator)), EVENT)
    alone = show("--json", events=[spike])
    together = json.loads(show("--json", events=[drill(2, True, generator)]))
    (shown,) = together["drills"]
    assert shown["text"] == "Drill in step 2: the planted token was found, 1 extra pass, 4 s." and not shown["advice"]
    assert {**together, "drills": []} == {**json.loads(alone), "drills": []}
    assert shown["text"] in show()
    assert "No gradient spike" in show("--since", "2") or spike["global_step"] >= 2
    view = build(report.read(str(tmp_path)))
    assert len(view.spikes) == 1 and len(view.drills) == 1 and view.facts[0] == ("Spikes", "1", "")


FAILURES = [
    ({"threshold": 1e30}, "The threshold was not finite, or that of the warm-up of grad_norm_threshold=auto"),
    ({"error": "rank 1: out of memory"}, "It failed with an error: rank 1: out of memory."),
    (
        {"complete": False, "budget": 1, "diagnosis": "incomplete"},
        "Its budget of 1 pass was spent: raise bisect_budget_steps.",
    ),
    ({"mini_batch": 3}, "The same mini-batch has a spike of its own"),
    ({}, "The event names no reason"),
]


@pytest.mark.parametrize(("changes", "advice"), FAILURES)
def test_a_drill_that_fails_says_what_to_look_at(show: Any, changes: dict[str, Any], advice: str) -> None:
    generator = random.Random(1)
    other = {**without_culprits(2, "diffuse", generator), "mini_batch": 3}
    out = show(events=[drill(2, False, generator, **changes), other])
    assert "Drill in step 2 FAILED: the planted token (rank 0, row 0, position 1) was not found, 1 extra pass" in out
    assert "Do not rely on spike_detection in this configuration before a drill succeeds." in out
    given = [text for _, text in FAILURES if text in out]
    assert given == [advice]


def test_a_drill_without_a_place_is_shown(show: Any) -> None:
    broken = drill(2, False, random.Random(1), error="no response token has a weight in the loss")
    broken["drill"]["planted"] = None
    assert "Drill in step 2 FAILED: a planted token was not found" in show(events=[broken])


def test_a_planted_fault_is_announced(tmp_path: Path, show: Any) -> None:
    out = show(events=[{**sample, "fault": "bitflip"} for sample in samples(2)])
    assert out.count("A fault was planted in this run on purpose: bitflip") == 1
    assert json.loads(show("--json"))["faults"] == ["bitflip"]
    assert build(report.read(str(tmp_path))).alarms == ["A fault was planted in this run on purpose: bitflip"]


# Spikes that are counted, and not in spikes.jsonl


def _counted_spikes(directory: Path, count: int = 2) -> list[dict[str, Any]]:
    """A run of three steps, with the evidence of spikes in its second step."""
    events = [{**each, "global_step": 2} for each in samples(count)]
    record_events(str(directory), events)
    for step in range(1, 4):
        record_step(str(directory), step, {**FIGURES, "triggered": count * (step == 2)})
    return events


@pytest.mark.parametrize("left", ["none", "half a line", "one line"])
def test_spikes_that_are_counted_and_missing_are_told(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    _counted_spikes(tmp_path)
    file = tmp_path / "spikes.jsonl"
    assert main([str(tmp_path)]) == 0
    assert "steps.jsonl counts" not in capsys.readouterr().out
    first = file.read_bytes().splitlines(keepends=True)[0]
    file.write_bytes({"none": b"", "half a line": first[: len(first) // 2], "one line": first}[left])
    if left == "none":
        file.unlink()
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    has = int(left == "one line")
    said = f"steps.jsonl counts 2 spikes in step 2, spikes.jsonl has {has}: it is missing or cut."
    assert said in out and build(report.read(str(tmp_path))).alarms[0].startswith(said)
    assert ("No gradient spike in" in out) == 0 and ("No gradient spike could be read in" in out) == (not has)
    assert ("1 line skipped: malformed or unfinished." in out) == (left == "half a line")
    assert main([str(tmp_path), str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][1]["lost_spikes"].startswith(said)
    assert main([str(tmp_path), str(tmp_path)]) == 1
    assert f"In B: {said}" in " ".join(capsys.readouterr().out.split())
    assert main([str(tmp_path), "--since", "3"]) == 0


def test_spikes_that_the_writer_leaves_out_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Any
) -> None:
    monkeypatch.setattr(writer, "EVENTS_PER_STEP", 1)
    _counted_spikes(tmp_path)
    assert "1 more spikes are not written" in show()
    monkeypatch.setattr(writer, "FILE_BYTES", 0)
    record_events(str(tmp_path), [{**samples(1)[0], "global_step": 4}])
    for step in (4, 5):
        record_step(str(tmp_path), step, {**FIGURES, "triggered": 1})
    assert "events are not written from here on" in show()
    show("--since", "5")
    record_step(str(tmp_path), 3, {**FIGURES, "triggered": math.inf})
    show()


# Several runs in one folder


def test_two_runs_in_one_folder_are_told(tmp_path: Path, show: Any) -> None:
    for step in (1, 2, 1, 2):
        record_step(str(tmp_path), step, FIGURES)
    said = "2 runs are in this folder: the steps begin again at 1, and the spikes of all are counted."
    assert said in show()
    assert json.loads(show("--json"))["runs_in_folder"] == 2
    assert main([str(tmp_path)] * 2) == 0


def test_a_resumed_run_is_one_run(tmp_path: Path, show: Any) -> None:
    for step in (1, 2, 3, 4, 3, 4, 5, 3):
        record_step(str(tmp_path), step, FIGURES)
    assert "in this folder" not in show()


def test_a_doubled_line_counts_once(tmp_path: Path, show: Any) -> None:
    show(events=samples(2))
    first, second = (tmp_path / "spikes.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "spikes.jsonl").write_bytes(first + second + first + first)
    out = show()
    assert out.count("2 gradient spikes") == 1 and "2 lines found more than once, and counted once." in out
