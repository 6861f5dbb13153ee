"""gradloc_state.pt: another form of it is refused in one sentence, and an older one outlives a write that fails."""

from __future__ import annotations

import copy
import errno
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.gradloc import GradLoc, GradLocConfig, LayerClip, LayerClipConfig, TokenClip, TokenClipConfig
from verl.utils.gradloc.adapters.saved_state import STATE_FILE, read_state, write_state
from verl.utils.gradloc.evidence import patient_disk

LAYER = {"warmup": [], "count": 30, "mean": 1.5, "deviation": 0.25, "floor": 0.125}
SIGNAL = {"recent": [1.0, 2.0], "count": 21, "average": 1.5}
RUN_CHECKS = {
    "rates": 0.5,
    "readings": [[math.nan, 3], [0.25, None]],
    "stride": 2,
    "since_reading": 1,
    "times": {"stale_reference": 2},
    "updates": 3,
    "gap": 0.25,
    "least": math.inf,
    "misaligned_since": None,
    "related": 0.5,
    "sizes": [0.5, 0.25, 0.5],
    "spreads": [0.5, 0.75],
    "scale_step": 3,
    "scale_factor": 7.5,
}


def build_parts() -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=37, **sizes))
    layer_clip, token_clip = LayerClip(model, LayerClipConfig()), TokenClip(model, TokenClipConfig())
    return {
        "gradloc": GradLoc(model, GradLocConfig(), lambda *_: None),
        "layer_clip": layer_clip,
        "token_clip": token_clip,
    }


PARTS = build_parts()
STATE = {
    "gradloc": {"token_norms": [1.0, 2.5], "run_checks": RUN_CHECKS, "search_time": {"run": 1e9, "searches": 2.0}},
    "layer_clip": {layer: LAYER for layer in PARTS["layer_clip"].layers},
    "token_clip": {"boundaries": {name: SIGNAL for name in PARTS["token_clip"].boundaries}, "tokens": 64.0},
}


def variants(value: Any) -> Iterator[Any]:
    """The value with one thing in it replaced, taken out or added."""
    yield from (other for other in (None, "x", 1, -1, 2.5, [], {}, ["x"], {"x": 1}, True, 10**400) if other != value)
    if isinstance(value, dict):
        yield {**value, "other": 1}
        for key in value:
            yield {name: entry for name, entry in value.items() if name != key}
            yield {**{name: entry for name, entry in value.items() if name != key}, 7: value[key]}
            yield from ({**value, key: changed} for changed in variants(value[key]))
    if isinstance(value, list):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in variants(value[index]))


def load(state: dict[str, Any]) -> None:
    """What a resumed run does with it: the parts take it in, and their next step uses it."""
    for name, part in PARTS.items():
        part.load_state_dict(state.get(name))
        part.state_dict()
    layer_clip = PARTS["layer_clip"]
    layer_clip.clip(torch.ones(len(layer_clip.layers), dtype=torch.float64))
    PARTS["token_clip"].end_mini_batch()


def test_a_state_of_another_form_is_refused_in_one_sentence(tmp_path: Path) -> None:
    wanted = f"^{re.escape(str(tmp_path / STATE_FILE))} cannot be read \\(.*\\); restore it, or remove it, and all"
    ours = ("belong to another model", "cannot be read")
    refused = read = 0
    for changed in variants(STATE):
        torch.save(changed, tmp_path / STATE_FILE)
        try:
            state = read_state(str(tmp_path))
        except ValueError as error:
            assert re.match(wanted, str(error)), error
            refused += 1
            continue
        read += 1
        try:
            load(state)
        except ValueError as error:
            assert any(each in str(error) for each in ours), (changed, error)
    assert refused > 300 and read > 20


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


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_a_write_that_fails_is_a_warning_and_leaves_the_old_file(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def fsync(_: int) -> None:
        if disk == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        answers.wait()

    write_state(str(tmp_path), {"gradloc": {"token_norms": [1.0]}})
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(patient_disk, "PATIENCE", 1e9 if disk == "full" else 0.05)
    write_state(str(tmp_path), {"gradloc": {"token_norms": [2.0]}})
    reason = "No space left on device" if disk == "full" else f"{tmp_path} does not respond within 0.05 seconds"
    assert f"{STATE_FILE} is not saved" in caplog.text and reason in caplog.text
    assert read_state(str(tmp_path)) == {"gradloc": {"token_norms": [1.0]}}
    assert disk == "hangs" or [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    answers.set()
