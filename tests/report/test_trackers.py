"""What verl's loggers get of spikes: written by the libraries themselves in their local modes, and read back."""

import json
import logging
import math
import os
import re
import shutil
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from evidence import WORDS, answer, clip, clipped_token, culprit, drill, event, warning
from notation import Caplog, Patch, cases
from pages import texts_of, unpacked

import trees
from gradloc import guarded, record_events
from gradloc.adapters.spike_log import add_spike_log
from gradloc.evidence.writer import record_step
from gradloc.judging import in_one_line
from gradloc.report import trackers
from gradloc.report.trackers import SpikeLog

pytestmark = pytest.mark.slow

# Libraries that cannot be installed beside verl are here.
TRACKERS_PYTHON = trees.ROOT / "build/venv-trackers/bin/python"
ACTOR = {"spike_detection": True, "spike_log": None, "bisect_dump_dir": "dump"}
KEY = "0123456789-a-key"
RESIDUAL, BROKEN = "gradloc/identity/rollout_log_probs", "gradloc/identities/broken"
NEWS = "gradloc/identities/news"
# Of the seven steps of tracked_run.py.
RESIDUALS, BROKENS = [0.5] * 5 + [80.0, 0.5], [0.0] * 5 + [1.0, 0.0]


def run(folder: Path, loggers: str, python: Path, *arguments: str, **environment: str) -> None:
    """A run with these loggers. The first argument is `spike_log`."""
    assert python.exists(), "run the tests with: bash tests/run.sh"
    # Outside the project, because ClearML reads every Python file of the repository that a script is in.
    script = shutil.copy(trees.ROOT / "tests/report/tracked_run.py", folder)
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(trees.ROOT / "tests/support")])
    done = trees.run(python, script, folder, loggers, *arguments, cwd=folder, **environment, PYTHONPATH=path)
    said = trees.ran(done) + done.stderr
    assert "Traceback" not in said and "could not be sent" not in said, said


def only(paths: Any) -> Path:
    (path,) = paths
    return path


def rows(text: str, columns: tuple[str, ...] = trackers.COLUMNS) -> list[dict[str, Any]]:
    """The rows of a table in JSON."""
    table = json.loads(text)
    assert table["columns"] == list(columns)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def is_page(text: str) -> bool:
    return "<!doctype html>" in text.lower() and "Content-Security-Policy" in text and bool(unpacked(text)["title"])


def run_locally(folder: Path, spike_log: str) -> Path:
    """With loggers whose libraries verl needs itself."""
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TENSORBOARD_DIR": str(folder / "tensorboard")}
    environment |= {"VERL_FILE_LOGGER_PATH": str(folder / "file.jsonl")}
    run(folder, "wandb,tensorboard,file,console", Path(sys.executable), spike_log, **environment)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_locally(tmp_path_factory.mktemp("run"), "null")


@pytest.fixture(scope="module")
def with_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_locally(tmp_path_factory.mktemp("run"), '"texts"')


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    environment = {"MLFLOW_TRACKING_URI": f"file:{folder}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    environment |= {"SWANLAB_MODE": "offline", "CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": f"{folder}/clearml"}
    site_packages = sysconfig.get_paths()["purelib"]
    run(folder, "mlflow,swanlab,clearml", TRACKERS_PYTHON, "null", site_packages, **environment)
    return folder


def texts_in(place: Path) -> set[str]:
    """The names of the samples' texts of which a word is in any byte that a tracker got: these are all files here."""
    files = [path for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file()]
    assert files, f"{place} has no files"
    contents = [content for file in files for content in contents_of(file)]
    return {name for name, word in WORDS.items() if any(word.encode() in content for content in contents)}


def contents_of(file: Path) -> Iterator[bytes]:
    """The bytes of a file, and of what is packed in it."""
    yield file.read_bytes()
    if file.suffix == ".html":
        yield texts_of(file).encode()
    if file.suffix == ".wandb":
        yield without_block_headers(file.read_bytes())
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            yield from map(archive.read, archive.namelist())


def without_block_headers(data: bytes) -> bytes:
    """A .wandb file has blocks of 32 KiB, and 7 bytes before the part of a record that one begins with."""
    return b"".join(data[place + 7 : place + 32768] for place in range(0, len(data), 32768))


@pytest.mark.every_target
def test_wandb_gets_a_growing_table_the_page_and_alerts(local: Path) -> None:
    files = local / "wandb/latest-run/files/media"
    tables = sorted(files.glob("table/gradloc/culprits_*.json"))
    assert [file.name.split("_")[1] for file in tables] == ["2", "3"]  # their steps
    first, second = (rows(file.read_text()) for file in tables)
    assert [row["token"] for row in first] == [" <think>", " a|b\n"]
    assert second[:2] == first and second[2]["rank"] == 1 and second[2]["source"] == "nonfinite"
    assert first[0]["grad_norm"] == 9000.0 and first[1]["reward"] is None and first[0]["step"] == 2
    assert [is_page(file.read_text()) for file in files.glob("html/gradloc/report_*.html")] == [True] * 4
    clipped = (file.read_text() for file in sorted(files.glob("table/gradloc/clipped_tokens_*.json")))
    assert [[row["cut"] for row in rows(text, trackers.CLIP_COLUMNS)] for text in clipped] == [[True], [True, False]]
    records = without_block_headers(only(local.glob("wandb/latest-run/*.wandb")).read_bytes())
    # A title, and the length of the text that follows it. 600 s, the time in which W&B sends one of these, end each.
    titles = rb"Gradient spike|Outlying tokens|Broken identity: \w+|No longer broken: \w+"
    alert = rb"\n.(" + titles + rb")\x12.{1,2}Step (\d): .*?(WARN|INFO) \xc0\xcf\x24"
    assert re.findall(alert, records, re.S) == [
        (b"Gradient spike", b"2", b"WARN"),
        (b"Gradient spike", b"3", b"WARN"),
        # What was stopped in step 4 is no reason for an alert.
        (b"Outlying tokens", b"5", b"WARN"),
        (b"Broken identity: rollout_log_probs", b"6", b"WARN"),
        (b"No longer broken: rollout_log_probs", b"7", b"INFO"),
    ]
    # Each figure is in the history, and again in the summary of the run, unless that was told of the next one first.
    figures = map(float, re.findall(RESIDUAL.encode() + rb"\x82\x01.([\d.]+)\n", records, re.S))
    found, expected = ([(value, len([*of])) for value, of in groupby(values)] for values in (figures, RESIDUALS))
    assert [value for value, _ in found] == [value for value, _ in expected]
    assert all(count <= times <= 2 * count for (_, times), (_, count) in zip(found, expected, strict=True))


@pytest.mark.every_target
def test_tensorboard_and_the_file_get_the_same(local: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [json.loads(line) for line in (local / "file.jsonl").read_text().splitlines()]
    told = {line["step"]: line["data"]["gradloc/spikes"] for line in lines if "gradloc/spikes" in line["data"]}
    assert list(told) == [2, 3, 4, 5] and told[2].startswith("Step 2: ") and "2 culprits in " in told[2]
    events = EventAccumulator(str(local / "tensorboard"))
    events.Reload()
    tensors = events.Tensors("gradloc/spikes/text_summary")
    texts = {text.step: text.tensor_proto.string_val[0].decode() for text in tensors}
    assert list(texts) == list(told)
    assert texts[4].startswith("TokenClip found 1 backward signal") and "| step | action | boundary |" in texts[4]
    assert "&lt;think&gt;" in texts[2] and "a&#124;b⏎" in texts[2]
    rows_of_table = [line.count("|") for line in texts[2].splitlines() if line.startswith("|")]
    assert rows_of_table == [len(trackers.COLUMNS) + 1] * 4
    assert texts[3].startswith("A drill: the planted token was found, 1 extra pass.\n\n")
    # The identities, in each step.
    scalars = {name: [line["data"][name] for line in lines if name in line["data"]] for name in (RESIDUAL, BROKEN)}
    assert scalars == {RESIDUAL: RESIDUALS, BROKEN: BROKENS}
    assert {name: [each.value for each in events.Scalars(name)] for name in (RESIDUAL, BROKEN)} == scalars
    assert [each.step for each in events.Scalars(BROKEN)] == [1, 2, 3, 4, 5, 6, 7]
    news = {line["step"]: line["data"][NEWS] for line in lines if NEWS in line["data"]}
    assert news == {6: "Step 6: Weights <are> old. Look.", 7: "Step 7: The identity rollout_log_probs holds again."}
    tensors = events.Tensors(f"{NEWS}/text_summary")
    texts = {text.step: text.tensor_proto.string_val[0].decode() for text in tensors}
    assert texts == {6: "Weights &lt;are&gt; old. Look.", 7: "The identity rollout_log_probs holds again."}


def test_mlflow_gets_the_table_and_the_page_as_artifacts(elsewhere: Path) -> None:
    artifacts = only(elsewhere.glob("mlruns/*/*/artifacts/gradloc"))
    assert [row["step"] for row in rows((artifacts / "culprits.json").read_text())] == [2, 2, 3]
    clipped = rows((artifacts / "clipped_tokens.json").read_text(), trackers.CLIP_COLUMNS)
    assert [row["step"] for row in clipped] == [4, 5]
    assert is_page((artifacts / "report.html").read_text())
    assert "2 culprits in " in (artifacts / "step_2.txt").read_text()
    assert (artifacts / "step_6.txt").read_text() == "Step 6: Weights <are> old. Look."
    metrics = only(elsewhere.glob(f"mlruns/*/*/metrics/{RESIDUAL}")).read_text().splitlines()
    assert [(float(value), int(step)) for _, value, step in map(str.split, metrics)] == [
        *zip(RESIDUALS, range(1, 8), strict=True)
    ]


def test_swanlab_and_clearml_get_text_table_and_page(elsewhere: Path) -> None:
    media = only(elsewhere.glob("swanlog/run-*/media"))
    texts = sorted(file.read_text() for path in media.glob("text*") for file in path.rglob("*") if file.is_file())
    assert [text[:7] for text in texts] == [f"Step {step}:" for step in range(2, 8)]
    tables = [json.loads(file.read_text()) for file in media.glob("echarts/*")]
    for columns, lengths in ((trackers.COLUMNS, [2, 3]), (trackers.CLIP_COLUMNS, [1, 2])):
        found = [table["rowData"] for table in tables if [of["field"] for of in table["colDefs"]] == list(columns)]
        assert sorted(map(len, found)) == lengths and all(table[0]["token"] == " <think>" for table in found)
    assert all(is_page(file.read_text()) for file in media.glob("html/*")) and any(media.glob("html/*"))
    session = only(path for path in elsewhere.glob("clearml/offline/*") if path.is_dir())
    reported = (session / "metrics.jsonl").read_text()
    assert all(name in reported for name in ("gradloc", "think", "clipped_tokens", "identity/rollout_log_probs"))
    log = (session / "log.jsonl").read_text()
    assert "2 culprits in " in log and "holds again" in log
    assert is_page(only(session.rglob("*report.html")).read_text())


# What is shown with texts. The page has the response's tokens in place of its text.
PAGE_TEXTS = {"prompt", "response_tokens", "context", "ground_truth", "data_source", "uid"}


@pytest.mark.parametrize(
    ("tracker", "asked_for"), [("wandb", PAGE_TEXTS), ("tensorboard", {"context", "uid"}), ("file.jsonl", set())]
)
def test_texts_are_sent_only_if_asked_for(local: Path, with_texts: Path, tracker: str, asked_for: set[str]) -> None:
    assert texts_in(local / tracker) == set()
    assert texts_in(with_texts / tracker) == asked_for
    assert texts_in(local / "bisect_dump") == WORDS.keys()  # the evidence has them all


def test_other_trackers_get_no_texts_either(elsewhere: Path) -> None:
    assert [texts_in(elsewhere / tracker) for tracker in ("mlruns", "swanlog", "clearml")] == [set()] * 3


Sent = tuple[trackers.StepNews, dict[str, tuple[int, list[Any]]]]


@pytest.fixture
def sent(monkeypatch: Patch) -> list[Sent]:
    """What W&B gets, with each table's number of new rows and all its rows: it grows in place."""
    found: list[Sent] = []

    def keep(_: Any, news: trackers.StepNews) -> None:
        found.append((news, {table.name: (len(table.new_rows), [*table.rows]) for table in news.tables}))

    monkeypatch.setitem(trackers.TRACKERS, "wandb", keep)
    return found


class Broken:
    """A tracker whose server is away."""

    def log(self, data: object, step: int) -> None:
        raise ConnectionError(f"POST https://me:pass@host/api?key={KEY} failed")


class Kept(dict[int, dict[str, Any]]):
    def log(self, data: dict[str, Any], step: int) -> None:
        self[step] = data


def spike(step: int, count: int = 1) -> dict[str, Any]:
    return event(step, [culprit(1, [" a", " b"], 900.0 + index) for index in range(count)])


def spiked(log: SpikeLog, folder: Path, *steps: int) -> None:
    """Logs steps with a spike each."""
    for step in steps:
        record_events(str(folder), [spike(step)])
        log.log({"actor/gradloc/triggered": 1.0}, step)


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    kept = Kept()
    monkeypatch.setitem(trackers.TRACKERS, "clearml", trackers.to_file)  # type: ignore[arg-type]
    spiked(SpikeLog({"clearml": Broken(), "unheard_of": None, "file": kept}, str(tmp_path)), tmp_path, 1, 2)
    assert list(kept) == [1, 2]
    failed, unknown = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "clearml: spikes and identities could not be sent (ConnectionError: POST https://…@host/api?key=…" in failed
    assert "the logger unheard_of gets figures only" in unknown


@cases("what how", ("clearml", "exits"), ("clearml", "hangs"), ("the page", "exits"), ("the page", "hangs"))
def test_what_exits_or_hangs_warns_once_and_the_others_go_on(
    what: str, how: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog, sent: list[Any]
) -> None:
    ends = threading.Event()
    fails = Mock(side_effect=SystemExit(3) if how == "exits" else lambda *_: ends.wait())
    monkeypatch.setitem(trackers.TRACKERS, "clearml", fails if what == "clearml" else lambda *_: None)
    monkeypatch.setattr(trackers, "write_page", fails if what == "the page" else lambda *_: None)
    run = SpikeLog._run

    def impatient(self: SpikeLog, of: str, work: Any) -> Any:
        monkeypatch.setattr(guarded, "PATIENCE", 0.05 if (of, how) == (what, "hangs") else 1e9)
        return run(self, of, work)

    monkeypatch.setattr(SpikeLog, "_run", impatient)
    spiked(SpikeLog({"clearml": None, "wandb": None}, str(tmp_path)), tmp_path, 1, 2)
    assert [(spikes.step, spikes.page is None) for spikes, _ in sent] == [(step, what == "the page") for step in (1, 2)]
    (said,) = caplog.messages
    why = "RuntimeError: it tried to end the process: SystemExit(3)"
    why = why if how == "exits" else f"TimeoutError: {what} does not respond within 0.05 seconds"
    assert f"{what}: spikes and identities could not be sent ({why})." in said
    assert fails.call_count == 2 if how == "exits" else fails.call_count <= 1
    ends.set()


@cases("when file", ("at the start", "steps"), ("after a spike", "spikes"), ("after a step", "steps"))
def test_a_disk_that_hangs_is_waited_for_once(
    when: str, file: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog
) -> None:
    kept = Kept()
    monkeypatch.setattr(guarded, "PATIENCE", 0.05 if when == "at the start" else 1e9)
    if when != "at the start":
        log = SpikeLog({"file": kept}, str(tmp_path))
    os.mkfifo(tmp_path / f"{file}.jsonl")  # nobody writes to it, so that opening it never ends
    if when == "at the start":
        log = SpikeLog({"file": kept}, str(tmp_path))
    for step, patience in ((1, 0.05), (2, 1e9)):
        monkeypatch.setattr(guarded, "PATIENCE", patience)
        log.log({"actor/gradloc/triggered": float(file == "spikes")}, step)
    (said,) = caplog.messages
    assert f"(TimeoutError: {tmp_path} does not respond within 0.05 seconds)" in said and not kept


@pytest.mark.parametrize("metric", ["triggered", "checked"])
def test_evidence_that_the_driver_cannot_read(metric: str, tmp_path: Path, caplog: Caplog) -> None:
    kept = Kept()
    log = SpikeLog({"file": kept}, str(tmp_path / "on another machine"))
    for step in (1, 2):
        log.log({f"actor/gradloc/{metric}": 2.0}, step)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is bisect_dump_dir a directory that the driver and the actor's rank 0 share" in said and not kept


def test_events_are_read_once_also_behind_half_a_line(tmp_path: Path) -> None:
    kept = Kept()
    record_events(str(tmp_path), [spike(1)])
    log = SpikeLog({"file": kept}, str(tmp_path))
    with (tmp_path / "spikes.jsonl").open("a") as file:
        file.write('{"schema": 4, "culprits": [')  # what a killed process leaves
    record_events(str(tmp_path), [drill(3, False)])
    log.log({"actor/gradloc/triggered": 0.0, "actor/gradloc/drill_found": 0.0}, 3)
    spiked(log, tmp_path, 4)
    (tmp_path / "spikes.jsonl").unlink()  # moved away, so that it is begun anew
    spiked(log, tmp_path, 5)
    texts = {step: data["gradloc/spikes"] for step, data in kept.items()}
    assert list(texts) == [3, 4, 5] and all(text.count("\n") == 0 for text in texts.values())
    assert texts[3] == "Step 3: A drill: the planted token was not found, 1 extra pass."


def test_tables_and_pages_are_bounded(tmp_path: Path, monkeypatch: Patch, sent: list[Sent]) -> None:
    monkeypatch.setattr(trackers, "TABLE_ROWS", 70)
    monkeypatch.setattr(trackers, "write_page", lambda _, path: Path(path).write_text("page"))
    log = SpikeLog({"wandb": None}, str(tmp_path))
    for step in range(1, 32):
        record_events(str(tmp_path), [spike(step, 30 if step == 1 else 2)])
        log.log({"actor/gradloc/triggered": 1.0}, step)
    assert [spikes.step for spikes, _ in sent if spikes.page] == [*range(1, 11), 20, 30]
    assert [tables["culprits"][0] for _, tables in sent if tables] == [20, *[2] * 25]
    # The table of clipped tokens is as bounded, and beside it there is none of culprits.
    record_events(str(tmp_path), [clip(32, [clipped_token(1, ["a", " b"], math.nan)] * 80)])
    log.log({"actor/token_clip/over": 80.0}, 32)
    last, tables = sent[-1]
    assert last.spikes == [] and [(name, new) for name, (new, _) in tables.items()] == [("clipped_tokens", 20)]


def step_of(log: SpikeLog, folder: Path, step: int, *broken: str, judged: bool = True, **changes: Any) -> None:
    """Logs a step without a spike in which these identities are broken."""
    found = answer([warning(name, **changes) for name in broken]) if judged else None
    record_step(str(folder), step, {"token_norm_max": 1.0}, found)
    log.log({"actor/gradloc/checked": 1.0, "actor/gradloc/triggered": 0.0}, step)


def news_in(kept: Kept) -> dict[int, str]:
    return {step: data[NEWS] for step, data in kept.items() if NEWS in data}


def test_identities_are_told_without_a_spike(tmp_path: Path, sent: list[Sent], caplog: Caplog) -> None:
    kept, other = Kept(), Kept()
    log = SpikeLog({"file": kept, "trackio": other, "console": Broken(), "wandb": None}, str(tmp_path))
    log.log({"val/score": 0.0}, 0)
    for step, broken in enumerate((["loss"], ["loss", "groups"], ["loss", "groups"], ["groups"]), 1):
        step_of(log, tmp_path, step, *broken)
        log.log({"val/score": 0.0}, step)  # with nothing new
    assert list(kept) == list(other) == [1, 2, 3, 4]
    assert news_in(kept) == {
        1: "Step 1: The run has loss. Look.",
        2: "Step 2: The run has groups. Look.",
        4: "Step 4: The identity loss holds again.",
    }
    assert [data[BROKEN] for data in kept.values()] == [1.0, 2.0, 2.0, 1.0]
    assert [data["gradloc/identity/loss"] for data in other.values()] == [80.0, 80.0, 80.0, 0.5]
    assert len(other[1]) == 12 and NEWS not in other[1]
    titles = [news.identity_title for news, _ in sent if news.identities]
    assert titles == ["Broken identity: loss", "Broken identity: groups", "No longer broken: loss"]
    (said,) = caplog.messages
    assert "the logger trackio gets figures only" in said


def test_a_tracker_that_fails_gets_no_identities_and_the_others_do(
    tmp_path: Path, monkeypatch: Patch, caplog: Caplog
) -> None:
    ends, kept = threading.Event(), Kept()
    monkeypatch.setattr(guarded, "PATIENCE", 1.0)
    monkeypatch.setitem(trackers.TRACKERS, "swanlab", lambda *_: ends.wait())
    log = SpikeLog({"clearml": Broken(), "swanlab": None, "file": kept}, str(tmp_path))
    for step, broken in enumerate((["loss"], ["loss"], []), 1):
        step_of(log, tmp_path, step, *broken)
    assert list(kept) == [1, 2, 3] and list(news_in(kept)) == [1, 3]
    refused, late = caplog.messages
    assert "clearml: spikes and identities could not be sent (ConnectionError: " in refused
    assert "swanlab: spikes and identities could not be sent (TimeoutError: swanlab does not respond" in late
    ends.set()


def test_residuals_of_any_size_are_sent() -> None:
    states = answer([warning("loss", times=None), warning("groups", times=1e9)])["identities"]
    states["reference"] = {"state": "unchecked", "times": None, "since": None, "missing": "no reference"}
    scalars = trackers.identity_scalars(states)
    assert {scalars["gradloc/identity/loss"], scalars["gradloc/identity/groups"]} == {1e6}
    assert scalars[BROKEN] == 2.0 and "gradloc/identity/reference" not in scalars and len(scalars) == 11
    line = {"identities": states, "warnings": []}
    before = answer([warning(name) for name in ("loss", "groups", "reference")])["identities"]
    (news,) = trackers.identity_news(line, before)
    assert (news.name, news.is_broken) == ("reference", False) and "any more: no reference." in news.sentence


@cases(
    "earlier step broken told",
    # Up to the step before, `loss` is broken, and told of.
    ({9: ["loss"], 10: ["loss"]}, 11, ["loss"], False),
    ({9: ["loss"], 10: []}, 11, ["loss"], True),
    # It has broken after the checkpoint: here it breaks again, or holds as before.
    ({9: [], 10: ["loss"]}, 10, ["loss"], True),
    ({9: [], 10: ["loss"]}, 10, [], False),
    ({9: ["loss"], 10: ["loss"], 11: []}, 11, ["loss"], False),
    # The last line of a step counts.
    ({9: [], 10: [], 11: [], -10: ["loss"]}, 11, ["loss"], False),
    # Another run in the same directory.
    ({1: ["loss"], 2: ["loss"]}, 1, ["loss"], True),
)
def test_nothing_is_told_twice_after_a_resume(
    earlier: dict[int, list[str]], step: int, broken: list[str], told: bool, tmp_path: Path
) -> None:
    for at, names in earlier.items():
        record_step(str(tmp_path), abs(at), {"token_norm_max": 1.0}, answer([warning(name) for name in names]))
    kept = Kept()
    log = SpikeLog({"file": kept}, str(tmp_path))
    log.log({"val/score": 0.0}, step - 1)
    assert not kept
    for each in (step, step + 1):
        step_of(log, tmp_path, each, *broken)
    assert list(kept) == [step, step + 1] and list(news_in(kept)) == [step] * told


def test_lines_without_identities_tell_nothing(tmp_path: Path, caplog: Caplog) -> None:
    older = {"schema": 4, "global_step": 1, "token_norm_max": 1.0, "warnings": [{"name": "stale_weights"}]}
    (tmp_path / "steps.jsonl").write_text(json.dumps(older) + "\n")
    kept = Kept()
    log = SpikeLog({"file": kept}, str(tmp_path))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write(json.dumps({**older, "global_step": 2}) + "\n")
    log.log({"actor/gradloc/checked": 1.0}, 2)
    step_of(log, tmp_path, 3, "loss")
    step_of(log, tmp_path, 4, judged=False)  # the judge was late
    step_of(log, tmp_path, 5, "loss")
    assert list(kept) == [3, 5] and list(news_in(kept)) == [3] and not caplog.messages


def test_little_is_read_of_a_long_earlier_run(tmp_path: Path, monkeypatch: Patch) -> None:
    for step in range(1, 40):
        record_step(str(tmp_path), step, {"token_norm_max": 1.0}, answer([warning("loss")]))
    monkeypatch.setattr(trackers, "_TAIL_BYTES", 4000)
    log = SpikeLog({"file": Kept()}, str(tmp_path))
    assert 1 <= len(log._earlier) < 5 and log._earlier[-1]["global_step"] == 39


def test_only_what_was_left_is_alerted() -> None:
    found = [clipped_token(1, ["a", " b"], 9.0), clipped_token(0, ["a", " b"], 8.0, cut=False)]
    stopped, partly = clip(1, found[:1]), clip(1, found)
    of_spike, of_drill = spike(1), drill(1, True)
    for lines, title, sentences in (
        ([stopped, partly], "Outlying tokens", [partly["summary"]]),
        # A spike comes before what was found in clip lines.
        ([stopped, partly, of_spike], "Gradient spike", [in_one_line(of_spike), partly["summary"]]),
        ([stopped, of_drill], "Spike drill", [of_drill["summary"]]),
    ):
        alerting = trackers.StepNews(1, lines).alerting
        assert alerting is not None and (alerting.title, alerting.sentences) == (title, sentences)
    assert trackers.StepNews(1, [stopped]).alerting is None


@cases(
    "loggers changes added",
    (["console", "file"], {}, False),
    (["console", "wandb"], {}, True),
    (["console"], {"spike_log": True}, True),
    (["wandb"], {"spike_log": False}, False),
    (["wandb"], {"spike_detection": False, "spike_log": True}, False),
    (["wandb"], {"spike_detection": False, "token_clip": {"enable": True}}, True),
    (["wandb"], {"spike_detection": False, "token_clip": None}, False),
)
def test_who_gets_spikes(loggers: list[str], changes: dict[str, Any], added: bool) -> None:
    found = dict.fromkeys(loggers)
    add_spike_log(found, {"actor_rollout_ref": {"actor": ACTOR | changes}})
    assert list(found) == loggers + ["gradloc"] * added
    add_spike_log(alone := dict.fromkeys(loggers), {"actor_rollout_ref": None})  # a run that is no such run
    assert list(alone) == loggers
