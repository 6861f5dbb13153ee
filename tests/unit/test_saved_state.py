"""gradloc_state.pt: another form of it is refused in one sentence, and an older one outlives a write that fails."""

import copy
import errno
import math
import os
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import Caplog, Patch, cases
from small_bundles import small_model
from verl.utils.gradloc import GradLoc, GradLocConfig, LayerClip, LayerClipConfig, TokenClip, TokenClipConfig, guarded
from verl.utils.gradloc.adapters.watch import FORM, STATE_FILE, read_state, write_state

LAYER = {"warmup": [], "count": 30, "mean": 1.5, "deviation": 0.25, "floor": 0.125}
WARMING_UP = {"warmup": [1.0, 2.0], "count": 2, "mean": 0.0, "deviation": 0.0, "floor": 0.0}
SIGNAL = {"recent": [1.0, 2.0], "count": 21, "average": 1.5}
RUN_CHECKS = {"rates": 0.5, "last_rates": 0.25, "last_rate": 0.25, "largest_rate": 0.125}
RUN_CHECKS |= {"readings": [[math.nan, 3], [0.25, None]], "stride": 2}
RUN_CHECKS |= {"since_reading": 1, "times": {"stale_reference": 2}, "updates": 3, "last_gap": 0.25, "least": math.inf}
RUN_CHECKS |= {"first_gap": 0.03, "misaligned_since": None, "last_tilt": 0.25}
RUN_CHECKS |= {"one_side": 0.75, "split": (0.5, 3), "split_at_first": True, "lags": [[1.0, 0.5], [0.5, 0.375]]}
RUN_CHECKS |= {"steps": [0.125, 0.25], "distance": 0.125}
RUN_CHECKS |= {"said": ("stale_reference", {"name": "stale_weights", "sentence": "Old.", "check": "Compare."}, 0.25, 1)}
RUN_CHECKS |= {"unsampled_before": 3.0, "sizes": [0.5, 0.25, 0.5]}
RUN_CHECKS |= {"spreads": [0.5, 0.75], "scale": (3, 7.5), "weights": {"layers.0": 2.5}}
RUN_CHECKS |= {"written": None, "gradients": {"layers.0": 0.75}, "gradient_updates": 4}
RUN_CHECKS |= {"carrying": ("layers.0", 3, 2), "share_before": 0.25}

MODEL = small_model()
PARTS = {
    "gradloc": GradLoc(MODEL, GradLocConfig(), lambda *_: None),
    "layer_clip": LayerClip(MODEL, LayerClipConfig()),
    "token_clip": TokenClip(MODEL, TokenClipConfig()),
}
STATE = {
    "gradloc": {"token_norms": [1.0, 2.5], "run_checks": RUN_CHECKS, "search_time": {"run": 1e9, "searches": 2.0}},
    "layer_clip": {layer: LAYER for layer in PARTS["layer_clip"].layers} | {"norm": WARMING_UP},
    "token_clip": {"boundaries": {name: SIGNAL for name in PARTS["token_clip"].boundaries}, "tokens": 64.0},
}


@cases("saved", {"form": FORM + 1, **STATE}, STATE, [1.0], None, ids=["newer", "first", "list", "torn"])
def test_a_state_of_another_form_is_refused_in_one_sentence(saved: Any, tmp_path: Path) -> None:
    path = tmp_path / STATE_FILE
    if saved is None:
        write_state(str(tmp_path), STATE)
        path.write_bytes(path.read_bytes()[:-200])
    else:
        torch.save(saved, path)
    wanted = (
        f"^{re.escape(str(path))} cannot be read \\((.|\n)*\\); restore it, or remove it, and all warm-ups start over$"
    )
    with pytest.raises(ValueError, match=wanted):
        read_state(str(tmp_path))


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
def test_a_failed_write_leaves_the_old_file(disk: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    answers, full = threading.Event(), OSError(errno.ENOSPC, "No space left on device")
    write_state(str(tmp_path), {"gradloc": {"token_norms": [1.0]}})
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full if disk == "full" else lambda _: answers.wait()))
    monkeypatch.setattr(guarded, "PATIENCE", 1e9 if disk == "full" else 0.05)
    write_state(str(tmp_path), {"gradloc": {"token_norms": [2.0]}})
    reason = "No space left on device" if disk == "full" else f"{tmp_path} does not respond within 0.05 seconds"
    assert f"{STATE_FILE} is not saved" in caplog.text and reason in caplog.text
    assert read_state(str(tmp_path)) == {"gradloc": {"token_norms": [1.0]}}
    assert disk == "hangs" or [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    answers.set()
