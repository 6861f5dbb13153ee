"""The search of a bundle in one process and under torchrun: what it writes, what it says, and what it refuses."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from as_torchrun import torchrun
from notation import Capsys, Patch
from pages import texts_of
from printed_commands import commands_in
from small_bundles import BAD, NAME, THRESHOLD, bundle, kept, replayed, resave, resign, save_other_weights
from stripped_bundles import strip

from gradloc.evidence.writer import jsonable
from gradloc.judge.verdict import CHECK_UNKNOWN
from gradloc.measure.passes import Passes
from gradloc.replay import memory
from gradloc.replay.command import main
from gradloc.report.command import main as report
from gradloc.tools.opening import open_bundle
from gradloc.tools.reading import read
from gradloc.tools.schema import EVENT, conforms

__all__ = ["bundle", "kept"]

OTHER = b'{"not": "an event"}\n\xff\xfe malformed\n'
UNFINISHED = b'{"schema": 4, "unfin'


@pytest.fixture
def evidence(kept: Path, tmp_path: Path) -> Path:
    """A copy of the evidence, with other lines around that of the spike."""
    folder = tmp_path / "dump"
    shutil.copytree(kept, folder)
    spikes = folder / "spikes.jsonl"
    spikes.write_bytes(OTHER + spikes.read_bytes() + OTHER + UNFINISHED)
    return folder


def search(folder: Path, *options: str, name: str = NAME) -> int:
    return main([str(folder / "replay" / name), "--model", str(folder / "model"), "--search", *options])


def line_of(folder: Path) -> dict[str, Any]:
    """The spike's line in the evidence."""
    (line,) = [line for line in (folder / "spikes.jsonl").read_bytes().splitlines() if b'"trigger"' in line]
    return json.loads(line)


def beside(bundle: Path) -> Path:
    """Where a search of a bundle writes its event."""
    return bundle.with_name(f"{bundle.name}.event.json")


def shown(folder: Path) -> dict[str, Any]:
    """The spike as the report has it."""
    (event,) = read(str(folder)).events
    return dict(event)


def change_line(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    event = line_of(folder)
    change(event)
    (folder / "spikes.jsonl").write_bytes(OTHER + json.dumps(event).encode() + b"\n" + OTHER + UNFINISHED)


def left(folder: Path) -> set[Path]:
    """The files around the bundle."""
    return {path for path in folder.rglob("*") if NAME not in path.parts and path.name != ".run.lock"}


@pytest.mark.target(version="0.9.1")
def test_the_event_is_beside_the_bundle_and_in_the_evidence(evidence: Path, capsys: Capsys) -> None:
    texts = {"token": "bad", "context": "a «bad» one", "reward": 1.0, "prompt": "what?"}
    change_line(evidence, lambda event: event["culprits"][0].update(texts))
    change_line(evidence, lambda event: event.update(more_units=5, more_diffuse=2))  # which are elsewhere
    before, written = line_of(evidence), (evidence / "spikes.jsonl").read_bytes()
    page = evidence.with_name("page.html")
    assert search(evidence, "--html", str(page)) == 0
    out = capsys.readouterr().out
    assert "Diagnosis: tokens." in texts_of(page)
    event = shown(evidence)
    assert conforms(event, EVENT) and event["search"] == "replayed"
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["position"]) == BAD and texts.items() <= culprit.items()
    assert culprit["grad_norm"] == pytest.approx(before["culprits"][0]["grad_norm"], rel=1e-4)
    same = set(before) - {"search", "culprits", "units", "seconds", "budget_seconds", "passes", "suspected", "summary"}
    assert {name: event[name] for name in same} == {name: before[name] for name in same}
    assert json.loads(beside(evidence / "replay" / NAME).read_text()) == event
    assert (evidence / "spikes.jsonl").read_bytes() == written
    (bare,) = read(str(evidence), texts=False).events  # as a tracker's page has it
    assert bare["search"] == "replayed" and "prompt" not in bare["culprits"][0]
    assert "The culprits" in out and "«bad»" in out and "these are the weights of training" in out
    said = " ".join(out.split())  # a line is broken where the path of the evidence is long
    assert "The search in training named the same tokens." in said and "shows it in place of training's line." in said


def several(folder: Path) -> None:
    data = (folder / "spikes.jsonl").read_bytes()
    (line,) = (line for line in data.splitlines(keepends=True) if b'"trigger"' in line)
    (folder / "spikes.jsonl").write_bytes(line + data)


LINES: dict[str, Callable[[Path], Any]] = {
    "another bundle": lambda f: change_line(f, lambda e: e.update(replay="replay/x")),
    "no event": lambda f: change_line(f, lambda e: e.pop("trigger")),
    "twice": several,
}


@pytest.mark.parametrize("change", LINES)
def test_a_line_that_is_not_surely_that_of_the_spike_stays(evidence: Path, capsys: Capsys, change: str) -> None:
    LINES[change](evidence)
    assert search(evidence, "--json") == 0
    out, error = capsys.readouterr()
    assert "The report does not show it: spikes.jsonl around the bundle has no line of this spike, or several." in error
    event = json.loads(out)
    assert event["search"] == "replayed" and event["replay"] == f"replay/{NAME}"
    assert json.loads(beside(evidence / "replay" / NAME).read_text()) == event
    if change != "no event":
        assert {found["search"] for found in read(str(evidence)).events} == {"local"}


def test_the_last_of_several_searches_counts(evidence: Path) -> None:
    for budget, diagnosis in ((1, "incomplete"), (128, "tokens")):
        assert search(evidence, "--budget", str(budget)) == 0
        event = shown(evidence)
        assert event["budget"] == budget and event["diagnosis"] == diagnosis
    # If a spike has two bundles, the one that was searched last counts.
    file = beside(evidence / "replay" / NAME)
    for name, passes, age in (("a", 77, 10**9), ("z", 88, -(10**9))):
        other = beside(evidence / "replay" / name)
        other.write_text(json.dumps({**event, "passes": passes}))
        os.utime(other, ns=(file.stat().st_mtime_ns + age,) * 2)
    assert shown(evidence)["passes"] == 77


def test_what_only_seems_to_replace_a_line_hides_nothing(evidence: Path) -> None:
    line = line_of(evidence)
    assert search(evidence) == 0
    file = beside(evidence / "replay" / NAME)
    event = json.loads(file.read_text())
    for bad in ({**event, "culprits": None}, {**event, "replay": None}, [event]):
        file.write_text(json.dumps(bad))
        assert shown(evidence)["search"] == line["search"] == "local"
    file.unlink()
    os.mkfifo(file)
    assert shown(evidence)["search"] == "local"


def test_other_weights_do_not_replace_what_training_has_found(evidence: Path, tmp_path: Path, capsys: Capsys) -> None:
    before = line_of(evidence)
    other = save_other_weights(tmp_path / "other")
    command = [str(evidence / "replay" / NAME), "--model", other, "--search"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the tokens are those of these weights, which need not be those of training." in out
    assert "it would hide what training has found" in out and shown(evidence) == before


def test_a_threshold_that_nothing_exceeds_leads_to_a_better_one(evidence: Path, capsys: Capsys) -> None:
    files = left(evidence)
    assert search(evidence, "--threshold", "1e9", "--json") == 0
    out, error = capsys.readouterr()
    assert "No micro-batch is over τ = 1e+09: the largest, micro-batch 0 of rank 0, has 0.000282 τ. " in error
    assert left(evidence) == files and json.loads(out)["search"] == "local"
    suggested = error.partition("--threshold ")[2].partition("\n")[0].rstrip(".")
    assert search(evidence, "--threshold", suggested, "--json") == 0
    (culprit,) = json.loads(capsys.readouterr().out)["culprits"]
    assert (culprit["row"], culprit["position"]) == BAD and culprit["threshold"] == float(suggested)


def test_the_command_that_a_search_prints_works_as_printed(evidence: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    folder = evidence.with_name("it's a folder")
    evidence.rename(folder)
    # An event without a cause names another one.
    change_line(folder, lambda event: event.update(verdict={**event["verdict"], "check": CHECK_UNKNOWN}))
    assert search(folder) == 0
    commands = commands_in(capsys.readouterr().out)
    assert [command.rpartition(" ")[2] for command in commands] == ["--switches", "--remedies"]
    monkeypatch.chdir("/")
    assert main(shlex.split(commands[0])[2:]) == 0


def test_a_search_with_nothing_over_its_threshold_is_a_result(converted: Path, kept: Path, capsys: Capsys) -> None:
    """Not searched, searched without a culprit, searched with one: the report says which."""
    dump = converted.parent.parent
    line = jsonable({**open_bundle(converted).event, "replay": f"replay/{converted.name}"})
    (dump / "spikes.jsonl").write_text(json.dumps(line) + "\n")

    def lines(*options: str) -> str:
        if options:
            assert main([str(converted), "--model", str(kept / "model"), *options]) == 0
        capsys.readouterr()
        assert report([str(dump)]) == 0
        return " ".join(capsys.readouterr().out.split())

    said = lines()
    assert "no identity could be checked. `gradloc replay" in said and "not looked at): not measured" in said
    said = lines("--search", "--threshold", "1e9")
    assert "1 gradient spike in step 1: no micro-batch is over its threshold: the spike is not in these tokens" in said
    event = shown(dump)
    assert conforms(event, EVENT) and event["diagnosis"] == "under" and event["threshold"] == 1e9
    said = "the advantages are outliers (true of the only culprit"
    assert said in lines("--search")
    # The finding is not lost with another τ.
    assert said in lines("--search", "--threshold", "1e9")


def test_a_pass_that_fails_ends_it_in_one_sentence(evidence: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    files = left(evidence)
    fail = Mock(side_effect=RuntimeError("planted failure\nwith more lines"))
    monkeypatch.setattr(Passes, "_forward_backward", fail)
    assert search(evidence) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.splitlines()[1:] == ["The search failed: rank 0: RuntimeError: planted failure."]
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)
    assert search(evidence) == 2
    assert "sdpa takes more memory than there is: at least 0.0 GiB" in capsys.readouterr().err
    assert left(evidence) == files


def test_what_a_stranger_may_write_into_a_bundle_does_no_harm(bundle: Path, kept: Path, capsys: Capsys) -> None:
    """A random state that torch would refuse, and a run on a thousand million ranks."""
    resave(bundle, lambda tensors: tensors.update({"rng.cpu": torch.zeros(3, dtype=torch.uint8)}))
    resign(bundle, lambda manifest: manifest["event"].update(world_size=10**9, until="exhaustive"))
    event = replayed(bundle, kept / "model", capsys, "--search")
    assert [(culprit["row"], culprit["position"]) for culprit in event["culprits"]] == [BAD]


@pytest.fixture
def converted(kept: Path, tmp_path: Path) -> Path:
    """The bundle of a converted spike of two ranks, of which the records of one are there."""
    source = tmp_path / "source"
    shutil.copytree(kept / "replay" / NAME, source)
    resign(source, lambda manifest: manifest["event"].update(world_size=2))
    return strip(source, tmp_path / "dump")


def test_a_converted_spike_is_searched(converted: Path, kept: Path, capsys: Capsys) -> None:
    assert main([str(converted), "--model", str(kept / "model"), "--search", "--json"]) == 0
    out, error = capsys.readouterr()
    event = json.loads(out)
    assert [(c["rank"], c["row"], c["position"]) for c in event["culprits"]] == [(0, *BAD)]
    assert conforms(event, EVENT) and event["search"] == "replayed" and event["micro_batches"] == 1
    # Nothing is known of the missing micro-batches.
    assert event["explained"] is None and not event["complete"]
    assert "Searched 1 micro-batch (rank 0): " in error
    assert "Its records are those of rank 0 (1 other rank not looked at)." in error


def test_a_replay_after_the_search_has_its_culprits(converted: Path, kept: Path, capsys: Capsys) -> None:
    again = partial(replayed, converted, kept / "model", capsys, "--only")
    before = again()
    assert before["tokens"] == [] and any("--search finds the tokens" in note for note in before["notes"])
    assert [layer["norm"] for layer in before["layers"]] == [None] * 5
    replayed(converted, kept / "model", capsys, "--search")
    found = again()
    (culprit,) = found["tokens"]
    assert culprit["culprit"] and (culprit["row"], culprit["position"]) == BAD
    assert culprit["replayed"] == pytest.approx(culprit["grad_norm"], rel=1e-4)
    # It may be of another bundle, or come from a stranger.
    path = beside(converted)
    event = json.loads(path.read_text())
    for change in ({"global_step": 5}, {"culprits": [{**event["culprits"][0], "position": 99}]}):
        path.write_text(json.dumps({**event, **change}))
        assert again()["tokens"] == []


@pytest.mark.target(version="0.9.1")
def test_two_processes_of_torchrun_find_the_same(evidence: Path, tmp_path: Path) -> None:
    """As users start it. What would abort a process while its interpreter ends does not."""
    paths = str(evidence / "replay" / NAME), "--model", str(evidence / "model")
    done = torchrun(tmp_path, "replay", *paths, "--search", "--json")
    assert done.returncode == 0 and "SIGABRT" not in done.stderr, done.stderr
    event = json.loads(done.stdout)
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["position"]) == BAD and culprit["grad_norm"] > THRESHOLD
    assert shown(evidence) == event
