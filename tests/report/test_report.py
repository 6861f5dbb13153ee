"""The files that evidence is kept in, and the report that reads them."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from evidence import (
    HOSTILE_TO_TERMINALS,
    Event,
    answer,
    clip,
    clipped_token,
    culprit,
    event,
    replay_result,
    samples,
    spike,
    unsearched,
    without_culprits,
    write,
    write_replay,
)
from notation import Caplog, Capsys, Patch, cases, memory_peak
from pages import texts_of
from valid_events import VALIDATOR, lines_in, notes_in, valid_events

from gradloc import guarded, record_events, report
from gradloc.evidence import token_facts, writer
from gradloc.evidence.writer import LINE_BYTES, record_step
from gradloc.replay.command import main as replay
from gradloc.report import page, words
from gradloc.report.command import main
from gradloc.report.comparison import compare
from gradloc.report.view import json_of
from gradloc.selftest.command import main as selftest
from gradloc.tools import reading, results
from gradloc.tools.figures import part_of, short
from gradloc.tools.files import write_output, write_whole
from gradloc.tools.schema import EVENT, NOTE, conforms, parse

ROOT = Path(__file__).resolve().parents[2]


# The schema


def test_samples_and_real_events_have_the_form_of_the_schema() -> None:
    for schema in (EVENT, NOTE):
        jsonschema.Draft202012Validator.check_schema(schema)
    bare = [without_culprits(1, diagnosis) for diagnosis in words.DIAGNOSES]
    valid_events(json.dumps([*samples(30), *bare]))
    (real,) = lines_in(ROOT / "examples/spike")
    valid_events(json.dumps([real]))
    sample = writer.jsonable(spike())
    assert sample.keys() == real.keys() - {"fault", "more_units", "more_diffuse"}
    assert sample["comparison"].keys() == real["comparison"].keys()
    assert sample["culprits"][0].keys() == real["culprits"][0].keys()
    assert sample["units"][0].keys() == real["units"][0].keys()


MISSING = object()


@cases(
    "path value",
    (["schema"], 6),
    (["drill"], {"planted": {"rank": 0, "row": 1, "position": -1}, "found": True, "passes": 1}),
    (["culprits", 0, "sources"], ["gremlins"]),
    (["units", 0, "rest"], {"tokens": 3, "norm": 1.0}),
    (["culprits", 0, "layer_norms"], {"a": "x"}),
    (["units", 0, "rest"], MISSING),
    (["diffuse", 0, "largest_tokens", 0, "share"], MISSING),
)
def test_what_is_no_event_is_told_without_jsonschema(path: list, value: Any) -> None:
    sample = writer.jsonable(without_culprits(1, "diffuse") if path[0] == "diffuse" else spike())
    *way, last = path
    place = sample
    for key in way:
        place = place[key]
    assert VALIDATOR.is_valid(sample) and conforms(sample, EVENT)
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    assert not VALIDATOR.is_valid(sample) and not conforms(sample, EVENT)


# Files and their limits


def test_of_a_step_only_the_first_events_are_written(tmp_path: Path) -> None:
    """Lines of TokenClip, which are counted for themselves, do not take the place of spikes."""
    clips = [{"global_step": 1, "token_clip": {"tokens": []}}] * 20
    record_events(str(tmp_path), [*clips, *[spike(1)] * 20, spike(2)])
    found = lines_in(tmp_path)
    assert [line["global_step"] for line in found if "culprits" in line] == [1] * 16 + [2]
    assert sum("token_clip" in line for line in found) == 16
    of_clips, of_events = notes_in(tmp_path)
    assert of_clips["message"] == "4 more lines of TokenClip are not written: 16 in a step are the limit"
    assert (of_events["note"], of_events["global_step"], of_events["count"]) == ("rate_limit", 1, 4)


def test_of_an_event_only_the_largest_culprits_keep_their_texts(tmp_path: Path) -> None:
    culprits = [culprit(1, ["a", "b"], 1000.0 + i) for i in range(20)]
    record_events(str(tmp_path), [event(1, culprits)])
    found, note = lines_in(tmp_path)
    VALIDATOR.validate(found)
    assert [c["response"] for c in found["culprits"]] == ["ab"] * 16 + [None] * 4
    assert found["culprits"][-1]["context"] and (note["note"], note["count"]) == ("text_limit", 4)
    # Of long ones fewer do; the line of a single one may be longer.
    for culprit_count, size, kept in ((16, 10**5, 8), (3, 10**6, 1), (1, 2 * 10**6, 1)):
        long = event(1, [culprit(1, ["a", "b"], prompt="a" * size) for _ in range(culprit_count)])
        line, bare = writer.event_line(long)
        assert bare == culprit_count - kept and (len(line) < 2**20 or kept == 1)


@pytest.mark.parametrize("name", ["spikes", "steps"])
def test_the_disk_cannot_be_filled(name: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    def record(step: int) -> list[int]:
        """Writes a line of a step, and gives those that are read."""
        if name == "spikes":
            record_events(str(tmp_path), [spike(step)])
            return [each["global_step"] for each in report.read(str(tmp_path)).events]
        record_step(str(tmp_path), step, {"triggered": 0}, answer())
        return [*report.read(str(tmp_path)).steps]

    file = tmp_path / f"{name}.jsonl"
    record(0)
    size = file.stat().st_size + 10
    monkeypatch.setattr(writer, "FILE_BYTES", 5 * size)
    found = [record(step) for step in range(1, 20)][-1]
    assert file.stat().st_size < 6 * size and 3 < len(found) < 6 and found == [*range(len(found))]
    (note,) = notes_in(tmp_path, file.name)
    assert (note["note"], note["global_step"], note["count"]) == ("size_limit", len(found), 1)
    assert report.read(str(tmp_path)).notes == {note["message"]: {len(found)}}
    assert caplog.text.count(" left out of ") == 1
    # Where the file was moved away, the evidence goes on.
    file.unlink()
    assert record(78) == [78]


@contextlib.contextmanager
def other_run(directory: Path) -> Iterator[tuple["subprocess.Popen[str]", Callable[[str], None]]]:
    """A process that has written an event; and what has it run a line of code, of which one prints "done"."""
    code = """
import os, subprocess, sys
from evidence import samples
from gradloc import record_events
from gradloc.evidence import writer
for line in sys.stdin:
    exec(line)
"""
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(program, env={**os.environ, "PYTHONPATH": folders}, **pipes) as run:

        def execute(line: str) -> None:
            assert run.stdin is not None and run.stdout is not None
            run.stdin.write(line + "\n")
            run.stdin.flush()
            assert run.stdout.readline() == "done\n"

        execute(WRITES)
        yield run, execute


WRITES = "record_events(sys.argv[1], samples(1)); print('done', flush=True)"


def test_of_two_runs_the_second_is_refused(tmp_path: Path, caplog: Caplog) -> None:
    with other_run(tmp_path) as (first, _):
        named = f"another run (process {first.pid} on "
        said = str(writer.writer_of(str(tmp_path)))
        assert said.startswith(named) and "\n" not in said
        for step in (3, 4):
            record_events(str(tmp_path), [spike(step)])
        assert len(lines_in(tmp_path)) == 1 and caplog.text.count("are not written: " + named) == 1
    assert writer.writer_of(str(tmp_path)) is None  # however it has ended
    record_events(str(tmp_path), [spike(5)])
    assert lines_in(tmp_path)[-1]["global_step"] == 5


def test_a_run_whose_directory_is_removed_makes_way_for_another(tmp_path: Path) -> None:
    directory = tmp_path / "evidence"
    with other_run(directory) as (_, execute):
        shutil.rmtree(directory)
        record_events(str(directory), [spike(7)])
        execute(WRITES)
        assert [each["global_step"] for each in lines_in(directory)] == [7]
    # Without another, a run goes on in a new one, and holds that.
    shutil.rmtree(directory)
    record_events(str(directory), [spike(8)])
    assert [each["global_step"] for each in lines_in(directory)] == [8] and not is_free(directory)


def is_free(directory: Path) -> bool:
    """Whether no process has locked a directory."""
    with open(directory / ".run.lock", "rb") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


STAYS = "print('done', flush=True); os.read(0, 1); os._exit(0)"
STARTED = f"""subprocess.Popen([sys.executable, "-c", "import os; {STAYS}"], {{}})"""


@cases(
    "child frees",
    (f"if not os.fork(): {STAYS}", True),
    (STARTED.format("close_fds=False"), True),
    (STARTED.format("pass_fds=[*writer._locks.values()]"), False),
    ids=["forked", "started", "given the file"],
)
def test_a_child_of_a_dead_run_holds_nothing(child: str, frees: bool, tmp_path: Path) -> None:
    """A data loader, or a pool that compiles."""
    lock, directory = tmp_path / ".run.lock", str(tmp_path)
    with other_run(tmp_path) as (run, execute):
        execute(child)
        run.kill()
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        assert (is_free(tmp_path), writer.writer_of(directory)) == (frees, None)  # a zombie
        run.wait()
        assert writer.writer_of(directory) is None
        text, named = lock.read_text(), f"process {run.pid} on "
        first, second = text.splitlines()
        for other in (second.replace("pid:[", "pid:[1"), f"a{second}", second.rpartition(" ")[0] + " ", ""):
            # In another container, on another host, or where that is not known: it may well live.
            lock.write_text(f"{first}\n{other}")
            assert frees or str(writer.writer_of(directory)).startswith(f"another run ({named}")
        # This process has the same number, but began at another time.
        lock.write_text(text.replace(named, f"process {os.getpid()} on "))
        record_events(directory, [spike(6)])
        assert lines_in(tmp_path)[-1]["global_step"] == 6 and not is_free(tmp_path)


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "file", "folder", "pipe"])
@pytest.mark.parametrize("name", [".run.lock", ".critic.lock"])
def test_what_is_no_lock_stays_as_it_is(name: str, kind: str, tmp_path: Path, caplog: Caplog) -> None:
    lock, target = tmp_path / "evidence" / name, tmp_path / "target"
    lock.parent.mkdir()
    target.write_text(900 * "x")
    if kind in ("link", "dangling"):
        lock.symlink_to(target if kind == "link" else tmp_path / "nothing")
    elif kind == "hard link":
        lock.hardlink_to(target)
    elif kind == "file":
        lock.write_text("the notes of process 7 on a host, since noon")
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    events = "critic" if name == ".critic.lock" else "spikes"
    for step in (1, 2):
        record_events(str(lock.parent), [spike(step)], events)
    assert [line["global_step"] for line in lines_in(lock.parent, f"{events}.jsonl")] == [1, 2]
    assert target.read_text() == 900 * "x" and not (tmp_path / "nothing").exists()
    assert kind != "file" or lock.read_text().startswith("the notes")
    assert writer._holder(str(lock)) == "another run (it does not say which)"
    (message,) = caplog.messages
    why = {"link": "it is a link", "dangling": "it is a link", "folder": "Is a directory"}
    assert message.startswith(f"{lock} cannot be locked ({why.get(kind, 'it is not a lock of a run')}), so that ")


def test_a_start_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    os.mkfifo(tmp_path / ".run.lock")  # nobody writes to it, so that opening it never ends
    monkeypatch.setattr(guarded, "PATIENCE", 0.05)
    assert writer.writer_of(str(tmp_path)) is None
    (said,) = caplog.messages
    assert said.startswith("whether another run writes its evidence") and "does not respond within 0.05 s" in said


class Raises:
    def __str__(self) -> str:
        raise RuntimeError("not to be shown")


def test_whatever_a_ground_truth_is_training_goes_on(tmp_path: Path, caplog: Caplog, show: Any) -> None:
    inside: list[Any] = ["a"]
    inside += [inside, {"again": inside}]
    deep: dict[str, Any] = {"a": 1}
    for _ in range(5000):
        deep = {"a": deep}
    events = [spike(step, ground_truth=truth) for step, truth in enumerate((inside, deep, Raises(), "42"), 1)]
    out = show(events=events)
    assert "3 gradient spikes in steps 1 to 4" in out and "skipped" not in out
    assert "in step 3: a spike is not written: RuntimeError: not to be shown" in out
    assert "step 3: a spike is not written" in caplog.text
    found = [line for line in lines_in(tmp_path) if "note" not in line]
    valid_events(json.dumps(found))
    truths = [line["culprits"][0]["ground_truth"] for line in found]
    assert truths[0] == ["a", "(contains itself)", {"again": "(contains itself)"}] and truths[2] == "42"
    assert "(nests too deep)" in json.dumps(truths[1])
    assert [note["note"] for note in notes_in(tmp_path)] == ["unwritable"]


def test_a_line_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(writer, "LINE_BYTES", 40_000)
    record_events(str(tmp_path), [spike(1), spike(2, prompt="a" * 40_000), spike(3, ground_truth=["a" * 40_000])])
    record_events(str(tmp_path), [{**spike(4), "error": "a" * 40_000}])
    assert all(len(line) <= 40_000 for line in (tmp_path / "spikes.jsonl").read_bytes().splitlines())
    first, second, note, third, other, last = lines_in(tmp_path)
    assert first["culprits"][0]["prompt"] and second["culprits"][0]["prompt"] is None
    assert third["culprits"][0]["ground_truth"] is None
    assert [(n["note"], n["count"]) for n in (note, other)] == [("text_limit", 1)] * 2
    assert (last["note"], last["global_step"]) == ("unwritable", 4) and "bytes" in last["message"]


def test_a_long_response_is_kept_around_the_culprit() -> None:
    """And padding behind the response is left out."""
    torch = pytest.importorskip("torch")
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    found = token_facts.text_evidence(tokenizer, [], range(3000), 1000)
    assert found["response_tokens_start"] == 744
    assert found["response_tokens"] == [str(i) for i in range(744, 744 + 512)]
    heat = torch.full((3000,), math.pi)
    assert token_facts.response_window(heat, heat.cumsum(0) < 16, 2) == [3.142] * 5


# Reading and printing


@pytest.fixture
def refused(capsys: Capsys) -> Callable[..., str]:
    """What the report says, and nothing else, where it ends with exit code 2."""

    def call(*arguments: str | Path) -> str:
        assert main([*map(str, arguments)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    return call


@pytest.mark.parametrize("command", [main, replay, selftest])
@cases(
    "name said", ("nowhere/page", "/nowhere'. Make it, or name another."), ("dump", "/dump' is not a file"), ("", "''")
)
def test_where_nothing_can_be_written_is_said_first(
    tmp_path: Path, capsys: Capsys, command: Callable[[list[str]], int], name: str, said: str
) -> None:
    dump = write(tmp_path / "dump", [spike(5)])
    out = str(tmp_path / name) if name else ""
    with pytest.raises(SystemExit, match="2"):
        command(["--model", str(dump), "--output", out] if command is selftest else [str(dump), "--html", out])
    out, error = capsys.readouterr()
    assert out == "" and said in error.splitlines()[-1] and not (tmp_path / "nowhere").exists()


def test_what_is_not_there_is_one_sentence(tmp_path: Path, refused: Callable[..., str]) -> None:
    """No evidence there, but one or two levels away."""
    dump = write(tmp_path / "outputs" / "run1" / "bisect_dump", [spike(5)])
    (dump / "replay").mkdir()
    for path in (tmp_path / "outputs", dump / "replay"):
        assert refused(path) == f"No steps.jsonl or spikes.jsonl, found in {dump}: give that: {path}\n"
    for run in range(2, 6):
        write(tmp_path / "outputs" / f"run{run}", [spike(5)])
    assert ", and 2 more: give one of them" in refused(tmp_path / "outputs")


def test_no_evidence_is_not_taken_for_no_spike(tmp_path: Path, show: Any, refused: Callable[..., str]) -> None:
    assert refused(tmp_path) == f"No steps.jsonl or spikes.jsonl, which spike_detection writes: {tmp_path}\n"
    assert refused(tmp_path / "nowhere") == f"No such file or directory: {tmp_path}/nowhere\n"
    for name, held, said in (
        ("spikes.jsonl.gz", b"\x1f\x8b\x08\n\xff", "is not evidence: give the folder that has spikes.jsonl."),
        ("spikes.jsonl", b'{"schema": 4}\n', "has no valid line: it is cut, or no evidence. Copy it again."),
    ):
        (tmp_path / name).write_bytes(held)
        assert refused(tmp_path / name) == f"{tmp_path / name} {said}\n"
    (tmp_path / "spikes.jsonl").write_text("")
    assert "No gradient spike in" in show()
    # Nobody writes to this pipe, so that reading it never ends.
    os.mkfifo(tmp_path / "critic.jsonl")
    for path in (tmp_path, tmp_path / "critic.jsonl", tmp_path / "spikes.jsonl"):
        assert refused(path).startswith(f"{tmp_path}/critic.jsonl is not an ordinary file: give the folder")


@pytest.mark.parametrize("depth", [70, 990])
@pytest.mark.parametrize("place", ["ground_truth", "stowaway"])
def test_a_line_that_nests_deep_is_skipped(tmp_path: Path, show: Any, place: str, depth: int) -> None:
    deep = writer.jsonable(spike(1))
    deep["culprits"][0][place] = "HERE"
    text = json.dumps(deep).replace('"HERE"', "[" * depth + "]" * depth)
    (tmp_path / "spikes.jsonl").write_text(f"{text}\n")
    (tmp_path / "steps.jsonl").write_text(f'{{"a": {"[" * depth}{"]" * depth}}}\n')
    write_replay(tmp_path, replay_result(8))
    (tmp_path / "replay/deep.result.json").write_text(text)
    out = show("--html", str(tmp_path / "page.html"), events=[spike(8)])
    assert "1 gradient spike in step 8" in out and "2 lines skipped" in out and "The spike comes back" in out


def test_of_a_line_that_is_too_long_little_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "spikes.jsonl", "wb") as file:
        file.truncate(2**25)  # a hole, which takes no space; a file over 64 MiB gets no more events
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    record_events(str(tmp_path), [spike(8)])
    with memory_peak() as peak:
        found = report.read(str(tmp_path))
    assert peak() < 3 * LINE_BYTES
    assert [e["global_step"] for e in found.events] == [8] and found.skipped.total() == 1
    with open(tmp_path / "spikes.jsonl", "ab") as file:
        file.truncate(2**27)
    assert report.read(str(tmp_path)).too_large


def test_a_line_with_very_many_lists_is_not_parsed() -> None:
    line = b'{"a": [' + b"[]," * 4_000_000 + b"0]}\n"
    with memory_peak() as peak, pytest.raises(ValueError, match="it has over 1,000,000 lists and objects"):
        parse(line)
    assert peak() < len(line)


def test_of_too_much_evidence_the_beginning_is_read(show: Any, monkeypatch: Patch) -> None:
    events = [spike(step) for step in range(1, 5)]
    monkeypatch.setattr(reading, "MOST_BYTES", 2 * len(json.dumps(writer.jsonable(events[0]))) + 200)
    out = show(events=events)
    assert "2 gradient spikes in steps 1 to 2" in out and "of a file are read: a run writes no more." in out


def test_what_is_shown_of_a_culprit_is_bounded(view: Any) -> None:
    long = "é" * 10**5
    texts = dict.fromkeys(("token", "context", "prompt", "response", "uid", "data_source"), long)
    many = {"response_tokens": [long] * 3 + ["a"] * 9999, "response_suspicion": [1.0] * 10_002}
    big = spike(1, **texts, **many)
    big["culprits"][0]["layer_norms"] = {f"layer {i}": 1.0 for i in range(50_000)}
    big["units"] = [{**big["units"][0], "layer_norms": {}}] * 5000
    big["summary"] = big["error"] = long
    made = view([big])
    assert len(json_of(made)) < 400_000 and len(made.culprits[0].content["layers-figures"].rows) == 1024
    # On how many ranks the micro-batch was over its threshold is known.
    ladders = [each.content["ladder"] for each in view([{**big, "more_units": 1}]).culprits]
    said = [ladder.rows[1][0][1] for ladder in ladders]
    assert said == ["over on 5000 of 4 ranks", "over on at least 5000 of 4 ranks"]


def test_malformed_and_other_lines_are_counted_in_one_warning(tmp_path: Path, show: Any) -> None:
    broken = writer.jsonable(spike(1))
    broken["culprits"][0]["grad_norm"] = 10**400  # no float can hold it
    odd = b'{"schema": 4}\n{"schema": [1]}\n' + json.dumps(broken).encode() + b"\n"
    (tmp_path / "spikes.jsonl").write_bytes(b"not json\n3\n\xff\xfe\n" + b"[" * 100_000 + b"\n" + odd)
    with open(tmp_path / "spikes.jsonl", "ab") as file:
        file.write(b'{"schema": 1, "ti')  # as a killed process leaves it
    out = show("--html", str(tmp_path / "page.html"), events=[spike(8)])
    assert "1 gradient spike in step 8" in out
    assert out.count("skipped") == 1 and "8 lines skipped: malformed or unfinished." in out
    note = json.loads(writer._note("rate_limit", 1, 4, "4 more"))
    other = [json.dumps({**line, "schema": 99}) for line in (writer.jsonable(spike(1)), note)]
    (tmp_path / "spikes.jsonl").write_text("\n".join([*other, ""]))
    want = "2 lines skipped: of another version of GradLoc, whose own report reads them."
    out = show()
    assert "No gradient spike in" in out and want in out and "4 more" not in out


def test_the_summary_says_what_there_is(show: Any, summary: Any) -> None:
    events = [spike(4, token="NaN"), spike(9, log_prob=-1.0, old_log_prob=-3.0), spike(9, math.nan)]
    events[0] |= {"complete": False}
    out = show(events=events)
    figures = ["Culprit tokens: 3", "threshold 640", "Largest token gradient: NaN", "9000", "14×", "7.389", "nonfinite"]
    ended = "1 search ended early: there may be more culprits."
    for text in ("3 gradient spikes in steps 4 to 9", *figures, "␣b", ended):
        assert text in out
    found = summary()
    assert found["largest_grad_norm"] == "NaN" and found["sources"] == dict.fromkeys(("nonfinite", "token", "other"), 1)
    assert {entry["token"] for entry in found["tokens"]} == {" b", "NaN"}


def test_without_a_culprit_it_is_said_what_was_found_and_done(show: Any, summary: Any) -> None:
    events = [without_culprits(step, diagnosis) for step, diagnosis in enumerate(words.DIAGNOSES, 1)]
    events[0] = spike(1)
    events[1] |= {"action": "drop", "applied": False}
    events[4] |= {"error": "rank 1: out of\x1b memory"}
    out = show(events=events)
    for diagnosis, meaning in words.DIAGNOSES.items():
        assert f" {diagnosis} " in out and (meaning in out or diagnosis == "tokens")
    assert "token 3 of row 9: 599, 3% of the norm" in out and "8 to 9, 11" in out
    assert f"1 spike, with spike_action=drop: {words.NOT_APPLIED['drop']}" in out
    assert "1 search failed with an error: rank 1: out of\\x1b memory." in out
    found = summary()
    assert found["diagnoses"] == dict.fromkeys(words.DIAGNOSES, 1) and found["incomplete_events"] == 1
    fields = EVENT["properties"]
    assert set(words.DIAGNOSES) == set(fields["diagnosis"]["enum"])
    assert set(words.APPLIED) == set(words.NOT_APPLIED) == set(fields["action"]["enum"])


def test_a_converted_spike_names_what_it_suspects(show: Any, view: Any, tmp_path: Path) -> None:
    tokens = ["2", " plus", " two", " is", " five"]
    found = unsearched(40, [culprit(4, tokens, 9e4, advantage=7.5), culprit(2, tokens, 8e4)])
    valid_events(json.dumps([found]))
    text = show(events=[found])
    assert "1 gradient spike in step 40: no identity could be checked." in text
    assert "replay/step40-epoch0-mini_batch0 --search" in text
    assert "Suspected tokens of rank 0 (3 other ranks not looked at): not measured" in text
    made = view()
    table = made.spikes[0].content["suspected"]
    assert [row[7] for row in table.rows] == ["4", "2"] and table.columns[7].name == "Position"
    assert made.culprits == [] and made.tables["culprits"].rows == []
    # A search that has found nothing over a threshold does not make a spike of it.
    under = {"trigger": {**found["trigger"], "norm": 1.0}, "diagnosis": "under", "search": "replayed"}
    facts = {name: value for name, *value in view([unsearched(41, [], **under)]).facts}
    assert facts["Spikes"] == ["1", "1 gradient spike and 1 converted mini-batch"]
    assert facts["Searches complete"] == ["1", "of 1"]
    (figures, _) = compare(*[report.read(str(tmp_path))] * 2)["runs"]
    assert (figures["spikes"], figures["steps_with_spikes"]) == (1, 1)


def spread(tokens: int, norm: float, rest: float | None, units: int = 1, **changes: Any) -> Event:
    """An event whose units are this far over their thresholds, with their culprits and without."""
    found = [culprit(i, ["a"] * 9, 9000.0, rank=1, micro_batch=2 + i % units) for i in range(tokens)]
    made = event(5, found, **changes)
    for i, unit in enumerate(made["units"]):
        unit["norm"] = norm * unit["threshold"]
        left = {"tokens": 9 if rest else 0, "threshold": unit["threshold"] if rest else 0.0}
        unit["rest"] = None if rest is None else {**left, "norm": (rest - i / 4) * unit["threshold"]}
    for c in made["culprits"]:
        c["share"] = 0.07
    return made


DIFFUSE = {"diagnosis": "diffuse", "explained": False, "complete": False}
INCOMPLETE = {"diagnosis": "incomplete", "explained": False, "complete": False, "more_tokens": None}
EXHAUSTIVE = {"until": "exhaustive", "explained": None, "more_tokens": None}
AT = "micro-batch 2 of rank 1 is"
EXPLAINED = (
    "Explained: without this token every micro-batch is under its threshold; the highest, micro-batch 2 of rank 1,"
)


@cases(
    "sample sentence",
    (
        spread(1, math.nan, 0.998, more_tokens=0),
        f"{EXPLAINED} is at 0.998 of its threshold (NaN with it); no more seem to be over τ.",
    ),
    (
        spread(4, 14.2, 0.93, units=2, more_tokens=1),
        "Explained: without these 4 tokens every micro-batch is under its threshold; the highest, micro-batch 2 of "
        "rank 1, is at 0.93 of its threshold (14.2 with them); about 1 more token may be over τ.",
    ),
    (
        spread(1, 14.2, 0.0, more_tokens=None),
        f"{EXPLAINED} has no token left that can move (it is at 14.2 of its threshold with it).",
    ),
    (
        spread(3, 1.42, 1.3, more_tokens=1300, **DIFFUSE),
        f"The 3 likeliest carry 12% of the norm; without them {AT} still at 1.30 of its threshold (1.42 with them); "
        "about 1,300 more tokens may be over τ.",
    ),
    (
        spread(2, 1.42, 1.2, **INCOMPLETE),
        f"Not explained: the search ended early; without these 2 tokens {AT} still at 1.20 of its threshold "
        "(1.42 with them).",
    ),
    (
        spread(1, 1.42, 0.5, **EXHAUSTIVE | {"explained": True}),
        "Exhaustive: everything over its threshold was settled, with 1 token over τ; "
        f"without this token {AT} at 0.50 of its threshold (1.42 with it).",
    ),
    (without_culprits(5, "nonfinite", diffuse=[]), ""),  # there is nothing to add to the summary
)
def test_a_sentence_says_whether_the_culprits_explain_the_spike(view: Any, sample: Event, sentence: str) -> None:
    valid_events(json.dumps([sample]))
    assert view([sample]).spikes[0].content["explanation"] == sentence


def test_replays_are_told_and_what_is_no_result_is_left_out(show: Any, summary: Any, view: Any, tmp_path: Path) -> None:
    write_replay(tmp_path, replay_result(3, remedy_notes=["What cannot be computed is said."]))
    write_replay(tmp_path, replay_result(2, bundle="older"))
    write_replay(tmp_path, replay_result(1, bundle="other", units=[{"norm": 3}]))
    (tmp_path / "replay" / "half.result.json").write_text('{"kind":')
    assert "The spike comes back: rank 1, micro-batch 0." in show(events=[spike(3)])
    made = view()
    assert made.replays[-1]["where"] == "/models/small, bfloat16, sdpa on cpu; in training bfloat16, flash_attention_2"
    override = "actor_rollout_ref.actor.spike_action=drop"
    shown = ["3", "under 1%", "yes", "0%", "1", "1", "the step without the culprits", override]
    assert [*made.replays[-1]["tables"][-1].rows[0]] == ["spike_action=drop", *shown]
    assert made.rules["advantage"][1].startswith("In the replay of step 3, spike_action=drop fits best")
    assert "What cannot be computed is said." in made.replays[-1]["notes"]
    assert [replay["bundle"] for replay in summary()["replays"]] == ["older", "step3-epoch0-mini_batch0"]
    assert [replay["global_step"] for replay in summary("--since", "3")["replays"]] == [3]


def test_a_result_that_is_no_plain_file_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, [spike(3)])
    write_replay(tmp_path, replay_result(2))
    (tmp_path / "replay/zero.result.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "replay/pipe.result.json")
    (tmp_path / "replay/folder.result.json").mkdir()
    # In a process of its own, since this would hang, or use up the memory.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30,) * 2); "
    code = limit + "import sys; from gradloc.report.command import main; sys.exit(main(sys.argv[1:]))"
    program = [sys.executable, "-c", code, str(tmp_path), "--json"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [replay["global_step"] for replay in json.loads(done.stdout)["replays"]] == [2]


def test_results_together_have_a_limit(tmp_path: Path, monkeypatch: Patch) -> None:
    for step in range(4):
        write_replay(tmp_path, replay_result(step))
    size = next((tmp_path / "replay").iterdir()).stat().st_size
    assert len(results.read_results(str(tmp_path))) == 4
    monkeypatch.setattr(results, "_BYTES", 2 * size + size // 2)
    assert [result["global_step"] for result in results.read_results(str(tmp_path))] == [2, 3]  # the newest


def test_since_and_top(tmp_path: Path, show: Any, summary: Any) -> None:
    out = show("--top", "3", events=[spike(step, 1000.0 * step) for step in range(1, 31)])
    assert [row.split()[0] for row in out.splitlines() if " Explained: " in row] == ["30", "29", "28"]
    everything = summary()
    assert everything["events"] == 30 and len(everything["largest_culprits"]) == 20
    late = summary("--since", "25", "--top", "3")
    assert (late["events"], late["first_step"], late["last_step"]) == (6, 25, 30)
    assert [c["global_step"] for c in late["largest_culprits"]] == [30, 29, 28]
    assert [e["global_step"] for e in late["largest_events"]] == [30, 29, 28]
    assert f"No gradient spike in {tmp_path} from step 31 on" in show("--since", "31")
    with pytest.raises(SystemExit):
        show("--top", "0")


def test_texts_and_folders_cannot_steer_the_terminal(tmp_path: Path, capsys: Capsys) -> None:
    folder = str(tmp_path / "a\x1b[2Jb")
    hostile = dict.fromkeys(("token", "boundary", "data_source", "context"), f"a\r{HOSTILE_TO_TERMINALS}\n")
    cut = clip(1, [clipped_token(0, ["a"], 9.0, **hostile)], refused=[HOSTILE_TO_TERMINALS])
    record_events(folder, [spike(1, token=HOSTILE_TO_TERMINALS, context=hostile["context"]), cut])
    assert main([folder, "--html", f"{folder}/page.html"]) == 0
    assert main([f"{folder}/nowhere"]) == 2
    assert main([folder, folder]) == 0
    out, error = capsys.readouterr()
    assert not {"\x1b", "\u202e", "\r"} & {*out, *error} and "\\x1b[2J[bold]\\u202e" in out
    assert "The report: " in out and "a\\x1b[2Jb/page.html" in out and "No such file or directory: " in error


@pytest.mark.parametrize("columns", [70, 140])
def test_a_narrow_terminal_keeps_the_context_and_the_source(columns: int, show: Any) -> None:
    token = culprit(2, ["of", "twenty", "<|im_end|>"], advantage=1.5)
    out = show(events=[event(3, [token | {"source": "unsampled", "sources": ["unsampled"]}])], columns=columns)
    (row,) = (line for line in out.splitlines() if " unsampled" in line and "im_end" in line)
    assert "«<|i" in row and len(row) <= columns
    assert (" reward" in out) == (columns == 140)


@pytest.mark.parametrize("columns", [60, 140])
def test_long_texts_leave_room_for_the_figures(show: Any, columns: int) -> None:
    long = {"token": " wordy" * 40, "context": "before «" + " wordy" * 40 + "»" + " after" * 40}
    cut = clipped_token(0, ["a"], 12.5, boundary="layers.1", data_source="d" * 300, **long)
    out = show(events=[spike(4, **long), clip(123456, [cut])], columns=columns)
    heading, row = out.partition("The culprits")[2].strip().splitlines()[:2]
    assert all(name in heading for name in ("step", "× threshold", "source"))
    assert row.split()[:1] == ["4"] and "9000" in row
    lines = [line for line in out.splitlines() if "`" not in line]  # a command is to be copied
    assert max(map(len, lines)) <= columns
    assert all(any(wanted in line for line in lines) for wanted in ("123456", "layers.1", "12.5", "dropped"))


# The view


def test_the_view_stays_bounded_and_its_totals_count_all(view: Any) -> None:
    events = []
    for step in range(8):
        # The later the milder; each has a mild culprit and a milder one with another token and source.
        norms = [9000.0 - 100 * step, 2000.0, 1000.0 - step]
        found = [culprit(i, ["a", "b", "c"], norm) for i, norm in enumerate(norms)]
        found[2] |= {"source": "sequence"}
        events.append(event(step, found, complete=step % 2 == 0))
    events.append(without_culprits(9, "diffuse"))
    made = view(events, rows=10, details=2)
    # The largest of every event is there, and then the largest others.
    assert len(made.spikes) == 9 and len(made.culprits) == 10
    assert {shown.spike for shown in made.culprits} == set(range(8)) and made.spikes[-1].culprits == []
    assert [shown.layers is not None for shown in made.culprits] == [True] * 2 + [False] * 8
    assert {("Culprit tokens", "24", ""), ("Searches complete", "5", "of 9")} <= {*made.facts}
    assert [row[:2] for row in made.tables["sources"].rows] == [
        [("other", "?source other"), "16"],
        [("sequence", "?source sequence"), "8"],
    ]
    assert made.tables["tokens"].rows[0] == [("a", "?token a"), "8"]
    assert made.tables["culprits"].more == "14 smaller ones left out" and "10 culprits of 24" in made.notes[-1]
    # Where there are more spikes than that, the largest culprits are shown, and all spikes.
    made = view(rows=3, details=2)
    assert [shown.spike for shown in made.culprits] == [0, 1, 2] and len(made.spikes) == 9
    assert made.spikes[7].content["left"] == "The page leaves out 3 smaller culprits of this spike."


def test_counts_up_to_twenty_are_counts_and_more_are_shares() -> None:
    assert [part_of(1, 1), part_of(2, 2), part_of(1, 2), part_of(3, 3), part_of(19, 20)] == [
        *("the only one", "both", "1 of 2", "all 3", "19 of 20")
    ]
    assert [part_of(7, 21), part_of(21, 21), part_of(1, 1000), part_of(0, 30)] == ["33%", "100%", "under 1%", "0%"]


def test_the_parts_of_a_diffuse_event_are_bounded(view: Any) -> None:
    sample = without_culprits(1, "diffuse")
    part = sample["diffuse"][0]
    part["largest_tokens"][2]["share"] = None  # it is not known
    sample["diffuse"] = [{**part, "norm": float(i), "rows": list(range(0, 60, 2))} for i in range(1, 31)]
    table = view([sample]).spikes[0].content["parts"]
    assert [row[4] for row in table.rows] == [str(i) for i in range(30, 10, -1)]
    more = view([{**sample, "more_diffuse": 5}]).spikes[1].content["parts"].more
    assert (table.more, more) == ("10 smaller parts left out here.", "15 smaller parts left out here.")
    assert table.rows[0][2] == "0, 2, 4, 6, 8, 10, 12, 14, …"
    tokens = "token 0 of row 9: 600, 2% of the norm\ntoken 3 of row 9: 599, 3% of the norm\ntoken 6 of row 9: 598"
    assert table.rows[0][7] == tokens


def test_the_chart_of_the_run_has_every_culprit_at_its_norm(view: Any) -> None:
    events = samples(40) + [without_culprits(900, "diffuse")]
    made = view(events)
    chart = made.charts["level"]
    marks = {(point.x, short(point.y)) for series in chart.series for point in series.points}
    assert marks >= {(e["global_step"], short(c["grad_norm"])) for e in events for c in e["culprits"]}
    for _, y, tip, link, _ in (point for series in chart.series for point in series.points):
        if isinstance(tip, int):
            assert link == f"c{tip}" and made.tables["culprits"].rows[tip][2] == short(y)
    # What is not finite is above all others, and every place is within the chart.
    placed = [height for series in chart.placed()["series"] for _, height, *_ in series["points"]]
    assert all(0 <= height <= 1000 for height in placed) and chart.y.place(math.nan) > chart.y.place(1e5)


def test_the_page_holds_no_markup_of_a_model(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--"
    record_events(str(tmp_path), [spike(1, tokens=("a", hostile, "b"), ground_truth={"answer": hostile})])
    out = tmp_path / "page.html"
    report.write_page(report.read(str(tmp_path)), str(out))
    text = out.read_text(encoding="utf-8")
    assert "alert(1)" not in text and "alert(1)" in texts_of(out)
    assert [path.name for path in tmp_path.iterdir() if "page.html" in path.name] == ["page.html"]


def test_only_an_ordinary_file_is_replaced(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """What a user names is written where it leads to; beside a bundle, a stranger may have put a link."""
    dump, outside, link, pipe = (tmp_path / name for name in ("dump", "outside", "link", "pipe"))
    write(dump, [spike(5)])
    outside.write_text("mine")
    link.symlink_to(outside)
    os.mkfifo(pipe)
    assert main([str(dump), "--html", str(link)]) == 0 and "<!DOCTYPE html>" in outside.read_text()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "a page")
    assert os.read(reader, 99) == b"a page"
    os.close(reader)
    assert link.is_symlink() and pipe.is_fifo()
    for name in (link, pipe):
        with pytest.raises(OSError, match="Not an ordinary file"):
            write_whole(name, "x")
    before = outside.read_text()
    with pytest.raises(TypeError):
        write_whole(outside, 7)  # type: ignore[arg-type]
    assert outside.read_text() == before and link.is_symlink() and pipe.is_fifo()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert main([str(dump), "--html", str(link)]) == 2 and outside.read_text() == before
    assert capsys.readouterr().err == f"No space left on device: {link}\n"
    assert {file.name for file in tmp_path.iterdir()} == {"dump", "outside", "link", "pipe"}


def test_a_page_has_all_its_parts_and_is_not_searched_for_more() -> None:
    link = '<link rel="stylesheet" href="page.css">'
    whole = page.assemble(link)
    assert whole.count(link) == 1 and f">{link}<" in whole and "page.js" not in whole
