"""What the report and its readers make of TokenClip's lines."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
from evidence import Event, clip, clipped_token, drill, spike, write_steps

from gradloc.evidence import writer
from gradloc.report.token_clips import EXPLANATION, summarize_clips
from gradloc.report.view import json_of
from gradloc.tools.reading import without_texts
from gradloc.tools.schema import CLIP, EVENT, NOTE, conforms

TOKENS = ["a", " bad", " token"]


def one(multiple: float = 9.0, position: int = 1, **changes: Any) -> Event:
    return clipped_token(position, TOKENS, multiple, **changes)


def test_samples_have_the_form_of_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(CLIP)
    for line in (clip(1, [one(math.nan), one(position=-3)]), clip(None, [], "log")):
        jsonschema.validate(writer.jsonable(line), CLIP)
        assert conforms(writer.jsonable(line), CLIP)
        assert not any(conforms(writer.jsonable(line), form) for form in (EVENT, NOTE))


def test_a_clip_line_is_no_spike_and_no_malformed_line(show: Any, summary: Any, view: Any) -> None:
    found = summary(events=[clip(4, [one(33.0), one(5.0, 2)]), clip(7, [one()], "smooth")])
    assert (found["events"], found["culprits"], found["skipped_lines"], found["notes"]) == (0, 0, 0, [])
    clips = found["token_clip"]
    assert (clips["mini_batches"], clips["stopped"], clips["over"], clips["cut"], clips["tokens"]) == (2, 2, 3, 3, 3)
    assert clips["boundaries"] == {"log_probs": 3} and clips["with_spike"] == 0
    by_step = {"4": {"over": 2, "cut": 2, "stopped": True}, "7": {"over": 1, "cut": 1, "stopped": True}}
    assert clips["by_step"] == by_step and [row["multiple"] for row in clips["largest_tokens"]] == [33.0, 9.0, 5.0]
    out = show()
    assert "No gradient spike in" in out and "Tokens that TokenClip cut" in out and EXPLANATION in out
    # Evidence without such lines has no such section.
    made = view([spike(8)], since=8)
    assert "clips" not in made.tables and not any("clips" in name for name in (*made.texts, *made.charts))


def test_what_was_found_and_not_cut_is_told(show: Any, summary: Any) -> None:
    line = clip(4, [one(), one(boundary="layers.1", cut=False)], refused=["layers.1"])
    clips = summary(events=[line])["token_clip"]
    assert (clips["stopped"], clips["over"], clips["cut"], clips["refused"]) == (0, 2, 1, {"layers.1": 1})
    out = show()
    said = "More than max_share, so that some were left as they are, in mini-batches: layers.1 (1)."
    assert said in out and "stopped" not in out and any(" left " in row for row in out.splitlines() if " 9 " in row)


def test_a_spike_in_the_same_mini_batch_is_named(show: Any, summary: Any, view: Any) -> None:
    events = [clip(3, [one()]), clip(3, [one(8.0)], mini_batch=1), spike(3) | {"mini_batch": 1}]
    # Of two lines without a step it is not known whether they are about the same mini-batch.
    events += [clip(None, [one(7.0)], mini_batch=2), spike(None) | {"mini_batch": 2}]
    events += [clip(5, [one(6.0)]), drill(5, True)]  # no spike that was left
    clips = summary(events=events)["token_clip"]
    assert (clips["mini_batches"], clips["stopped"], clips["with_spike"]) == (4, 3, 1)
    assert clips["by_step"]["3"] == {"over": 2, "cut": 2, "stopped": False} and clips["by_step"]["5"]["stopped"]
    assert "1 mini-batch has a gradient spike as well." in show()
    made = view()
    assert [row[-1] for row in made.tables["clips"].rows] == ["–", ("yes", "s0"), "–", "–"]
    said = "TokenClip found 1 backward signal over its bound in this mini-batch, and cut it: the spike is in what was"
    assert [spike.content["clipped"] for spike in made.spikes] == [f"{said} left.", ""]


def test_each_token_is_a_row_and_its_step_is_marked(tmp_path: Path, view: Any) -> None:
    found = spike(8) | {"mini_batch": 2}
    write_steps(tmp_path, 12, events=[found])
    lines = [clip(3, [one(33.0), one(math.nan, -4)]), clip(5, [one(6.0)], "log")]
    made = view([*lines, clip(8, [one(5.0)], "smooth", mini_batch=2), found])
    rows = made.tables["clips"].rows
    assert [[row[0], *row[3:5]] for row in rows] == [
        ["3", "NaN", "dropped"],
        ["3", "33", "dropped"],
        ["5", "6", "left"],
        ["8", "5", "reduced"],
    ]
    assert (rows[0][1][0], rows[0][7]) == ("(prompt)", "prompt")
    said = "In 3 mini-batches of steps 3 to 8, 4 backward signals were over their bounds: 3 were cut."
    assert made.texts["clips-hint"].startswith(said)
    level, cut = made.charts["level"], made.charts["clips-chart"]
    # A spike was left in step 8.
    marks = {series.name: [point.x for point in series.points] for series in level.series if series.kind == "marks"}
    assert marks == {"other": [8], "stopped by TokenClip": [3], "found by TokenClip": [5, 8]}
    assert [series.name for series in cut.series] == ["dropped", "reduced", "left"]


def test_later_fields_are_read_over_and_malformed_lines_skipped(summary: Any, tmp_path: Path) -> None:
    line = clip(4, [{**one(), "mood": "bad"}])
    line = {**line, "mood": "bad", "token_clip": {**line["token_clip"], "mood": "bad"}}
    odd = [writer.jsonable(clip(4, [one()])) for _ in range(3)]
    odd[0]["token_clip"]["over"] = {"log_probs": -1}
    odd[1]["token_clip"]["tokens"][0]["multiple"] = 10**400
    odd[2]["token_clip"]["tokens"][0]["context"] = 3
    (tmp_path / "spikes.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in odd))
    # An event with an unknown field of that name stays an event, whatever is in it.
    found = summary(events=[line, {**spike(5), "token_clip": {"tokens": 7}}, {**line, **spike(6)}])
    assert (found["events"], found["token_clip"]["tokens"], found["skipped_lines"]) == (2, 1, 3)
    assert "mood" not in json.dumps(found)


def test_what_is_kept_of_a_hostile_line_is_bounded(view: Any) -> None:
    long = "é" * 10**5
    texts = dict.fromkeys(("token", "context", "data_source", "uid", "boundary"), long)
    line = clip(4, [one()])
    line["summary"] = long
    many = [f"layer {i}" for i in range(5000)]
    line["token_clip"] |= {"tokens": [{**one(), **texts}] * 3, "over": dict.fromkeys(many, 1), "refused": many}
    made = view([line], rows=2)
    assert len(json_of(made)) < 100_000 and len(made.tables["clips"].rows) == 2
    (token,) = summarize_clips([line], (), 1)["largest_tokens"]
    assert len(token["uid"]) < 300 < len(token["context"]) < 5000
    assert "5,000 backward signals" in made.texts["clips-hint"] and "(1), …" in made.texts["clips-hint"]


def test_without_texts_no_unknown_field_is_left() -> None:
    """Of the known ones, test_trackers.py looks at what is sent."""
    line = clip(4, [{**one(), "stowaway": "secret"}]) | {"stowaway": "secret"}
    line["token_clip"]["stowaway"] = "secret"
    assert "secret" not in json.dumps(without_texts(line))
