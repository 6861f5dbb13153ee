"""gradloc_state.pt: whatever is wrong with it costs a warm-up and a sentence, and it outlives a write that fails."""

import copy
import errno
import math
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import Caplog, Patch, cases
from small_bundles import small_model

from gradloc import GradLoc, GradLocConfig, LayerClip, LayerClipConfig, TokenClip, TokenClipConfig, guarded
from gradloc.adapters.watch import FORM, STATE_FILE, Watch, read_state, write_state
from gradloc.judge.identities import BY_NAME
from gradloc.metrics import RunFacts

LAYER = {"warmup": [], "count": 30, "mean": 1.5, "deviation": 0.25, "floor": 0.125}
WARMING_UP = {"warmup": [1.0, 2.0], "count": 2, "mean": 0.0, "deviation": 0.0, "floor": 0.0}
SIGNAL = {"recent": [1.0, 2.0], "count": 21, "average": 1.5}
FACTORS = {"gradient.above": 512.0, "gradient.factor": 513.0}
RECORD = {"step": 3, "readings": {**FACTORS, "rate": 0.25, "has_moved": 1.0}}
RECORD |= {"times": {"gradient.above": 128.0}, "streaks": {}}
RECORD["streaks"] = {name: {"score": 3.5 * (name == "gradient"), "since": 3, "quiet": 0} for name in BY_NAME}
RUN_CHECKS = {"version": 3, "records": [{**RECORD, "step": None, "readings": {"has_moved": 0.0}}, RECORD]}

MODEL = small_model()


def parts() -> dict[str, Any]:
    return {
        "gradloc": GradLoc(MODEL, GradLocConfig(), lambda *_: None),
        "layer_clip": LayerClip(MODEL, LayerClipConfig()),
        "token_clip": TokenClip(MODEL, TokenClipConfig()),
    }


PARTS = parts()
STATE = {
    "gradloc": {"token_norms": [1.0, 2.5], "run_checks": RUN_CHECKS, "search_time": {"run": 1e9, "searches": 2.0}},
    "layer_clip": {layer: LAYER for layer in PARTS["layer_clip"].layers} | {"norm": WARMING_UP},
    "token_clip": {"boundaries": {name: SIGNAL for name in PARTS["token_clip"].boundaries}, "tokens": 64.0},
}


def nested(depth: int) -> list[Any]:
    """Python cannot send much of that to other ranks, which would wait for it."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@cases(
    "saved reason",
    ({"form": FORM + 1, **STATE}, f"ValueError: its form is {FORM + 1}, and this release knows {FORM}"),
    (STATE, f"ValueError: its form is 1, and this release knows {FORM}"),
    ([1.0], f"ValueError: its form is None, and this release knows {FORM}"),
    ({"form": FORM, "gradloc": nested(100)}, "ValueError: it has values that no release has written"),
    ({"form": FORM, "gradloc": torch.ones(2)}, "ValueError: it has values that no release has written"),
    ({"form": FORM, "gradloc": Path("/")}, "UnpicklingError: Weights only load failed"),
    (b"", "EOFError: "),
    (b"torn", "RuntimeError: PytorchStreamReader failed"),
    (64 * 2**20 + 1, "ValueError: it has 67,108,865 bytes, and 67,108,864 are the limit"),
    ids="newer first list nested tensor class empty torn large".split(),
)
def test_a_file_that_cannot_be_read_costs_a_warm_up_and_one_sentence(
    saved: Any, reason: str, tmp_path: Path, caplog: Caplog
) -> None:
    path = tmp_path / STATE_FILE
    if isinstance(saved, bytes):
        write_state(str(tmp_path), STATE)
        path.write_bytes(saved and path.read_bytes()[:-200])
    elif isinstance(saved, int):
        path.touch()
        os.truncate(path, saved)
    else:
        torch.save(saved, path)
    watch = Watch(None, lambda: 1.0, 1, **parts())
    watch.load(lambda: read_state(str(tmp_path)))
    (message,) = caplog.messages
    assert message.startswith(f"{path} cannot be read ({reason}")
    assert message.endswith("): all warm-ups start over") and "\n" not in message
    assert [watch.gradloc.state_dict()["token_norms"], watch.layer_clip.state_dict()["norm"]["count"]] == [[], 0]
    assert watch.gradloc._facts.steps_since_resume == 0


BOUNDARIES = {name: SIGNAL for name in PARTS["token_clip"].boundaries}


@cases(
    "name path value",
    ("gradloc", [], "text"),
    ("gradloc", [], {"run_checks": RUN_CHECKS}),
    ("gradloc", ["token_norms"], "123"),
    ("gradloc", ["token_norms"], [1.0, math.nan]),
    ("gradloc", ["token_norms"], [10**400]),
    ("gradloc", ["search_time"], {"run": 1.0}),
    ("gradloc", ["search_time", "run"], -1.0),
    ("layer_clip", [], [1.0]),
    ("layer_clip", ["norm"], {}),
    ("layer_clip", ["norm"], {**LAYER, "unheard": 1.0}),
    ("layer_clip", ["norm", "mean"], math.nan),
    ("layer_clip", ["norm", "count"], None),
    ("layer_clip", ["norm"], {**LAYER, "deviation": 0.0}),
    ("layer_clip", ["norm"], {**WARMING_UP, "warmup": []}),
    ("layer_clip", ["another"], LAYER),
    ("token_clip", [], {"boundaries": BOUNDARIES}),
    ("token_clip", ["tokens"], math.inf),
    ("token_clip", ["boundaries", "log_probs", "average"], "1.5"),
    ("token_clip", ["boundaries", "log_probs", "recent"], 1.0),
)
def test_a_part_whose_state_is_odd_starts_over_alone(
    name: str, path: list[str], value: Any, tmp_path: Path, caplog: Caplog
) -> None:
    state: dict[str, Any] = copy.deepcopy(STATE)
    inside, keys = state, [name, *path]
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    write_state(str(tmp_path), state)
    fresh, watch = parts(), Watch(None, lambda: 1.0, 1, **parts())
    watch.load(lambda: read_state(str(tmp_path)))
    (message,) = caplog.messages
    assert message.startswith(f"{name} in {STATE_FILE} is not used, and its warm-up starts over: ")
    for other, part in fresh.items():
        if other != name:
            part.load_state_dict(STATE[other])
        found = getattr(watch, other).state_dict()
        assert repr(without_clock(found)) == repr(without_clock(part.state_dict()))


def without_clock(state: dict[str, Any]) -> dict[str, Any]:
    """Without the seconds that the run has lasted, which go on."""
    time = state.get("search_time", {"run": 0.0})
    return {**state, "search_time": {**time, "run": round(time["run"], -2)}}


def records(**changes: Any) -> dict[str, Any]:
    return {**RUN_CHECKS, "records": [RECORD, {**RECORD, **changes}]}


@cases(
    "state",
    "text",
    {},
    {"version": 2, "records": []},
    {"version": 3, "records": 3},
    {"version": 3, "records": [{"step": 3}]},
    records(unheard=1.0),
    records(step="three"),
    records(readings={"gradient.above": None}),
    records(streaks={"gradient": {"score": 4.5}}),
    ids=lambda state: str(state)[-40:],
)
def test_run_checks_start_over_once_where_their_state_is_odd(state: Any, caplog: Caplog) -> None:
    checks = RunFacts(lambda: 0.25)
    checks.load_state_dict(state)
    for _ in range(3):
        checks.start_update(None)
        checks.add_step()
    assert caplog.text.count("the checks of the run start over") == len(caplog.records) == 1
    answer = checks.answer()
    assert answer is not None and answer["warnings"] == [] and checks.state_dict()["records"] == []
    checks.load_state_dict(RUN_CHECKS)
    assert len(checks.state_dict()["records"]) == 2
    for fails in ("the checks of the run start over", "nothing checks the run from here on"):
        caplog.clear()
        checks._run.add_step = Mock(side_effect=ZeroDivisionError("a bug of the judge"))
        checks.add_step()
        assert fails in caplog.text
    assert checks.answer() is None and checks.state_dict() is None


@cases(
    "changes",
    {
        "readings": {**FACTORS, "gradient.above": math.inf, "rollout.gap": math.nan},
        "times": {"gradient.above": math.inf},
    },
    {"streaks": {name: {"score": math.nan, "since": 4, "quiet": 0} for name in (*BY_NAME, "unheard")}},
    {"readings": {**FACTORS, "rate": math.nan}},
    {"step": -5},
)
def test_odd_numbers_in_a_state_are_no_error(changes: dict[str, Any], caplog: Caplog) -> None:
    checks = RunFacts(lambda: 0.25)
    checks.load_state_dict(records(**changes))
    checks.start_update(4)
    checks.add_step()
    answer = checks.answer()
    assert answer is not None and not caplog.records, caplog.text


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    write_state(str(tmp_path / "new"), STATE)
    state = read_state(str(tmp_path / "new"))
    for name, part in PARTS.items():
        part.load_state_dict(copy.deepcopy(state[name]))
    written = {name: part.state_dict() for name, part in PARTS.items()}
    seconds = written["gradloc"]["search_time"]
    assert seconds["run"] >= 1e9
    seconds["run"] = 1e9
    assert repr(written) == repr(STATE) == repr(state)  # NaN is not equal to itself
    assert read_state(str(tmp_path)) == read_state(None) == {}


@pytest.mark.parametrize("fault", ["full", "hangs", "unsavable", "raises"])
def test_a_state_that_is_not_saved_leaves_the_old_file(
    fault: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog
) -> None:
    """And the checkpoint's other files are saved."""
    answers, full = threading.Event(), OSError(errno.ENOSPC, "No space left on device")
    write_state(str(tmp_path), {"gradloc": {"token_norms": [1.0]}})
    part, reason = LayerClip(MODEL, LayerClipConfig()), "No space left on device"
    if fault == "hangs":
        reason = f"{tmp_path} does not respond within 0.05 seconds"
        monkeypatch.setattr(os, "fsync", lambda _: answers.wait())
        monkeypatch.setattr(guarded, "PATIENCE", 0.05)
    elif fault == "full":
        monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    else:
        reason = "pickle" if fault == "unsavable" else "a bug"
        error = ZeroDivisionError("a bug") if fault == "raises" else None
        monkeypatch.setattr(part, "state_dict", Mock(side_effect=error, return_value=lambda: None))
    Watch(None, lambda: 1.0, 1, layer_clip=part).save(str(tmp_path))
    assert f"{STATE_FILE} is not saved" in caplog.text and reason in caplog.text
    assert read_state(str(tmp_path)) == {"gradloc": {"token_norms": [1.0]}}
    assert fault == "hangs" or [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    answers.set()
