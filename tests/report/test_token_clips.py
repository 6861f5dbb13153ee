"""What the report and its readers make of TokenClip's lines."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from evidence_samples import THRESHOLD, clip, clipped_token, culprit, drill, event
from gradloc import record_events
from gradloc.evidence import writer
from gradloc.evidence.appended import AppendedEvents
from gradloc.evidence.schema import CLIP, EVENT, NOTE, conforms
from gradloc.evidence.texts import without_texts
from gradloc_tools import report
from gradloc_tools.report import build
from gradloc_tools.report.command import main
from gradloc_tools.report.token_clips import EXPLANATION
from gradloc_tools.report.view import json_of

TOKENS = ["a", " bad", " token"]


def one(multiple: float = 9.0, position: int = 1, **changes: Any) -> dict[str, Any]:
    return clipped_token(position, TOKENS, multiple, **changes)


def spike(step: int, mini_batch: int = 0) -> dict[str, Any]:
    generator = random.Random(step)
    return event(step, [culprit(1, TOKENS, 9 * THRESHOLD, generator)], generator, mini_batch=mini_batch)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls the report on the evidence in tmp_path; returns what it prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, lines: list[dict[str, Any]] = ()) -> str:
        for line in lines:
            record_events(str(tmp_path), [line])
        assert main([str(tmp_path), *arguments]) == 0
        return capsys.readouterr().out

    return call


def summary(run: Any, *arguments: str, lines: list[dict[str, Any]] = ()) -> dict[str, Any]:
    return json.loads(run("--json", *arguments, lines=lines), parse_constant=pytest.fail)


def test_samples_have_the_form_of_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(CLIP)
    for line in (clip(1, [one(math.nan), one(position=-3)]), clip(None, [], "log"), clip(2, [one()], "smooth")):
        jsonschema.validate(writer.jsonable(line), CLIP)
        assert conforms(writer.jsonable(line), CLIP)
        assert not any(conforms(writer.jsonable(line), form) for form in (EVENT, NOTE))


def test_a_clip_line_is_no_spike_and_no_malformed_line(run: Any) -> None:
    found = summary(run, lines=[clip(4, [one(33.0), one(5.0, 2)]), clip(7, [one()], "smooth")])
    assert (found["events"], found["culprits"], found["skipped_lines"], found["notes"]) == (0, 0, 0, [])
    clips = found["token_clip"]
    assert (clips["mini_batches"], clips["stopped"], clips["over"], clips["cut"], clips["tokens"]) == (2, 2, 3, 3, 3)
    assert clips["boundaries"] == {"log_probs": 3} and clips["with_spike"] == 0
    assert clips["by_step"] == {
        "4": {"over": 2, "cut": 2, "stopped": True},
        "7": {"over": 1, "cut": 1, "stopped": True},
    }
    assert [row["multiple"] for row in clips["largest_tokens"]] == [33.0, 9.0, 5.0]
    out = run()
    assert "No gradient spike in" in out and "Tokens that TokenClip cut" in out and EXPLANATION in out
    assert "In 2 mini-batches of steps 4 to 7, 3 backward signals were over their bounds: 3 were cut." in out
    assert "2 mini-batches were stopped" in out and "skipped" not in out
    rows = [line.split() for line in out.splitlines() if "log_probs" in line]
    assert [row[0] for row in rows] == ["4", "7", "4"] and [row[1] for row in rows] == ["␣bad", "␣bad", "␣token"]
    assert ["dropped" in rows[0], "reduced" in rows[1], "math_verify" in rows[0]] == [True] * 3


def test_evidence_without_clip_lines_has_no_such_section(run: Any, tmp_path: Path) -> None:
    assert summary(run, lines=[spike(3)])["token_clip"] is None and "TokenClip" not in run()
    view = build(report.read(str(tmp_path)))
    assert "clips" not in view.tables and not any("clips" in name for name in (*view.texts, *view.charts))


def test_what_is_only_logged_was_found_and_not_cut(run: Any) -> None:
    clips = summary(run, lines=[clip(4, [one()], "log")])["token_clip"]
    assert (clips["stopped"], clips["over"], clips["cut"], clips["title"]) == (0, 1, 0, "Tokens that TokenClip found")
    out = run()
    assert "1 backward signal was over its bound: none was cut." in out and "stopped" not in out
    (row,) = (line for line in out.splitlines() if "log_probs" in line)
    assert " left " in row


def test_of_too_many_at_once_it_is_said_that_they_were_left(run: Any) -> None:
    left = one(boundary="layers.1", cut=False)
    clips = summary(run, lines=[clip(4, [one(), left], refused=["layers.1"])])["token_clip"]
    assert (clips["stopped"], clips["over"], clips["cut"], clips["refused"]) == (0, 2, 1, {"layers.1": 1})
    assert "More than max_share, so that some were left as they are, in mini-batches: layers.1 (1)." in run()


def test_a_spike_in_the_same_mini_batch_is_named(run: Any, tmp_path: Path) -> None:
    lines = [clip(3, [one()]), clip(3, [one(8.0)], mini_batch=1), spike(3, mini_batch=1)]
    # Of two lines without a step it is not known whether they are about the same mini-batch.
    lines += [clip(None, [one(7.0)], mini_batch=2), {**spike(5, mini_batch=2), "global_step": None}]
    clips = summary(run, lines=lines)["token_clip"]
    assert (clips["mini_batches"], clips["stopped"], clips["with_spike"]) == (3, 2, 1)
    assert clips["by_step"] == {"3": {"over": 2, "cut": 2, "stopped": False}}
    assert [row["spike"] for row in clips["largest_tokens"]] == [False, True, False]
    assert "1 mini-batch has a gradient spike as well." in " ".join(run().split())
    view = build(report.read(str(tmp_path)))
    assert view.tables["clips"].links == ["", "s0", ""] and [row[-1] for row in view.tables["clips"].rows][1] == "yes"
    said = "TokenClip found 1 backward signal over its bound in this mini-batch, and cut it: the spike is in what was"
    assert [spike.content["clipped"] for spike in view.spikes] == [f"{said} left.", ""]


def test_a_drill_is_no_spike_that_was_left(run: Any) -> None:
    lines = [clip(3, [one()]), drill(3, True, random.Random(1))]
    assert summary(run, lines=lines)["token_clip"]["stopped"] == 1


def test_since_leaves_out_earlier_lines(run: Any) -> None:
    lines = [clip(step, [one(float(step))]) for step in (3, 8, 9)] + [clip(None, [one()])]
    late = summary(run, "--since", "8", "--top", "1", lines=lines)["token_clip"]
    assert (late["mini_batches"], late["tokens"], list(late["by_step"])) == (2, 2, ["8", "9"])
    assert [row["global_step"] for row in late["largest_tokens"]] == [9]


def test_the_tokens_shown_are_bounded(run: Any, tmp_path: Path) -> None:
    lines = [clip(step, [one(100.0 - step), one(50.0 - step, 2)]) for step in range(1, 13)]
    clips = summary(run, "--top", "10", lines=lines)["token_clip"]
    assert (clips["tokens"], clips["over"], clips["mini_batches"]) == (24, 24, 12)
    assert [row["multiple"] for row in clips["largest_tokens"]] == [100.0 - step for step in range(1, 11)]
    view = build(report.read(str(tmp_path)), rows=10)
    assert len(view.tables["clips"].rows) == 10 and "24 backward signals" in view.texts["clips-hint"]
    chart = build(report.read(str(tmp_path))).charts["clips-chart"]
    (series,) = chart.series
    assert sorted(series.x) == sorted([*range(1, 13)] * 2) and series.y[0] == 99.0


def test_nan_is_further_than_any_number(run: Any) -> None:
    clips = summary(run, lines=[clip(1, [one(5.0), one(math.nan), one(1e300)])])["token_clip"]
    assert [row["multiple"] for row in clips["largest_tokens"]] == ["NaN", 1e300, 5.0]


def test_fields_of_a_later_patch_are_read_over(run: Any) -> None:
    line = clip(4, [{**one(), "mood": "bad"}])
    line = {**line, "mood": "bad", "token_clip": {**line["token_clip"], "mood": "bad"}}
    with pytest.raises(jsonschema.ValidationError, match="mood"):
        jsonschema.validate(writer.jsonable(line), CLIP)
    # An event with an unknown field of that name stays an event, whatever is in it.
    found = summary(run, lines=[line, {**spike(5), "token_clip": {"tokens": 7}}, {**line, **spike(6)}])
    assert (found["events"], found["token_clip"]["tokens"], found["skipped_lines"]) == (2, 1, 0)
    assert "mood" not in json.dumps(found)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], True),
        (["token_clip"], []),
        (["token_clip", "action"], "explode"),
        (["token_clip", "factor"], 0),
        (["token_clip", "over"], {"log_probs": -1}),
        (["token_clip", "cut"], {"log_probs": "many"}),
        (["token_clip", "refused"], [7]),
        (["token_clip", "tokens"], {}),
        (["token_clip", "tokens", 0, "multiple"], 10**400),
        (["token_clip", "tokens", 0, "boundary"], None),
        (["token_clip", "tokens", 0, "cut"], 1),
        (["token_clip", "tokens", 0, "context"], 3),
    ],
)
def test_malformed_lines_are_skipped(run: Any, tmp_path: Path, path: list, value: Any) -> None:
    line = writer.jsonable(clip(4, [one()]))
    *way, last = path
    place = line
    for key in way:
        place = place[key]
    place[last] = value
    (tmp_path / "spikes.jsonl").write_text(json.dumps(line) + "\n")
    found = summary(run, lines=[clip(9, [one()])])
    assert found["skipped_lines"] == 1 and found["token_clip"]["mini_batches"] == 1


def test_lines_of_other_versions_are_left_out_with_a_sentence(run: Any, tmp_path: Path) -> None:
    line = {**writer.jsonable(clip(4, [one()])), "schema": 5}
    (tmp_path / "spikes.jsonl").write_text(json.dumps(line) + "\n")
    found = summary(run)
    assert found["token_clip"] is None and found["skipped_lines"] == 0 and len(found["other_versions"]) == 1


def test_what_is_kept_of_a_hostile_line_is_bounded(run: Any, tmp_path: Path) -> None:
    long = "é" * 10**5
    texts = dict.fromkeys(("token", "context", "data_source", "uid", "boundary"), long)
    line = clip(4, [one()])
    line["summary"] = long
    line["token_clip"]["tokens"] = [{**one(), **texts}] * 3
    line["token_clip"]["over"] = {f"layer {i}": 1 for i in range(5000)}
    line["token_clip"]["refused"] = [f"layer {i}" for i in range(5000)]
    record_events(str(tmp_path), [line])
    found = report.read(str(tmp_path))
    view = build(found)
    assert len(json_of(view)) < 100_000
    assert "5,000 backward signals" in view.texts["clips-hint"] and "(1), …" in view.texts["clips-hint"]


def test_the_texts_of_a_model_cannot_steer_the_terminal(run: Any) -> None:
    hostile = "\x1b[2J[bold]\u202e"
    changes = dict.fromkeys(("token", "boundary", "data_source"), hostile)
    out = run(lines=[clip(1, [one(context=f"a\r{hostile}\n", **changes)], refused=[hostile])])
    assert "\x1b[2J" not in out and "\u202e" not in out and "\r" not in out
    assert "\\x1b[2J[bold]" in out


@pytest.mark.parametrize("width", [60, 90, 140])
def test_every_width_has_the_figures(run: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = {"token": "t" * 300, "context": "c" * 300, "data_source": "d" * 300, "boundary": "layers.1"}
    out = run(lines=[clip(123456, [one(12.5, **long)])])
    assert max(len(line) for line in out.splitlines()) <= width
    assert all(any(wanted in line for line in out.splitlines()) for wanted in ("123456", "layers.1", "12.5", "dropped"))


def test_without_texts_only_the_token_is_left(tmp_path: Path) -> None:
    line = {**clip(4, [{**one(), "stowaway": "secret text"}]), "stowaway": "secret text"}
    line["token_clip"]["stowaway"] = "secret text"
    bare = without_texts(line)
    jsonschema.validate(writer.jsonable(bare), CLIP)
    (token,) = bare["token_clip"]["tokens"]
    assert token.keys().isdisjoint({"context", "data_source", "uid"})
    assert (token["token"], token["reward"], token["multiple"]) == (" bad", 1.0, 9.0)
    assert "secret" not in json.dumps(bare)
    record_events(str(tmp_path), [line])
    data = json_of(build(report.read(str(tmp_path), texts=False)))
    assert "secret" not in data and "math_verify" not in data and '"u1"' not in data and "«" not in data
    assert "bad" in data


def test_a_token_of_the_prompt_has_no_text(run: Any) -> None:
    assert "(prompt)" in run(lines=[clip(4, [one(position=-3)])])


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    first, second, third = (tmp_path / name for name in "abc")
    record_events(str(first), [spike(3), clip(3, [one()]), clip(4, [one(boundary="layers.1")])])
    record_events(str(second), [spike(3)])
    record_events(str(third), [spike(3)])
    assert main([str(first), str(second), "--json"]) == 0
    before, after = json.loads(capsys.readouterr().out)["runs"]
    assert (before["clipped_mini_batches"], before["stopped_mini_batches"], before["spikes"]) == (2, 1, 1)
    assert (after["clipped_mini_batches"], after["stopped_mini_batches"]) == (0, 0)
    assert main([str(first), str(second)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of these, stopped by TokenClip" in shown and "Where tokens were first over" in shown
    assert main([str(second), str(third)]) == 0
    assert "TokenClip" not in capsys.readouterr().out


def test_a_run_that_goes_on_is_read_as_well(tmp_path: Path) -> None:
    appended = AppendedEvents(str(tmp_path))
    record_events(str(tmp_path), [spike(3), clip(3, [one()])] + [clip(4, [one()])] * 17)
    found = appended.read()
    assert [line["global_step"] for line in found] == [3, 3] + [4] * 16
    assert ["token_clip" in line for line in found] == [False] + [True] * 17


def numbered(step: int, size: int) -> str:
    return json.dumps({"global_step": step, "culprits": [], "text": "x" * size}) + "\n"


def test_what_a_search_appends_is_no_new_event(tmp_path: Path) -> None:
    path = tmp_path / "spikes.jsonl"
    path.write_text(numbered(0, 10))
    appended = AppendedEvents(str(tmp_path))
    with open(path, "a") as file:
        file.write(numbered(1, 10) + json.dumps({"replaces": "0", "global_step": 0, "culprits": []}) + "\n")
    assert [line["global_step"] for line in appended.read()] == [1]
    path.write_text(numbered(7, 1))  # moved away, and begun anew
    assert [line["global_step"] for line in appended.read()] == [7]
