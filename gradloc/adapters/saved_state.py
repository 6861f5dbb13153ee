# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The file beside a checkpoint that has what was learned of the run."""

import io
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from ..checks import is_finite_number
from ..evidence import patient_disk

logger = logging.getLogger(__name__)

# Beside an actor's checkpoint.
STATE_FILE = "gradloc_state.pt"

# The forms of what the parts save: a type; a list or a dict of one form, for any number of entries; a tuple or a dict
# of one form each, where a name that ends with a question mark may be missing.
_USUAL_SIGNAL = {"recent?": [float], "count?": int, "average?": float}
_LAYER = {"warmup?": [float], "count?": int, "mean?": float, "deviation?": float, "floor?": float}
_RUN_CHECKS = {
    "rates": float,
    "readings": [(float, int | None)],
    "stride": int,
    "since_reading": int,
    "times": {str: int},
    "updates": int,
    "gap": float | None,
    "least": float,
    "misaligned_since": int | None,
    "related": float | None,
    "sizes": [float],
    "spreads?": [float],
    "scale_step": int | None,
    "scale_factor": float | None,
}
_FORM = {
    "gradloc?": {
        "token_norms": [float],
        "run_checks?": _RUN_CHECKS,
        "search_time?": {"run": float, "searches": float},
    },
    "layer_clip?": {str: _LAYER},
    "token_clip?": {"boundaries": {str: _USUAL_SIGNAL}, "tokens": float},
}


def read_state(folder: str | None) -> dict[str, Any]:
    """What `Watch.save` wrote to a checkpoint's folder; empty without a file.

    Raises:
        ValueError: The file cannot be read, or has another form.
    """
    path = os.path.join(folder, STATE_FILE) if folder else ""
    if not os.path.isfile(path):
        return {}
    try:
        state = torch.load(path, weights_only=True)
        reason = misfit(state, _FORM)
    except Exception as error:
        reason = str(error)
    if reason is None:
        return state
    raise ValueError(f"{path} cannot be read ({reason}); restore it, or remove it, and all warm-ups start over")


def write_state(folder: str, state: Mapping[str, Any]) -> None:
    """Writes what `read_state` reads. A disk error, or a disk that does not answer in time, is a warning."""
    data = io.BytesIO()
    torch.save(dict(state), data)
    try:
        write_whole(Path(folder, STATE_FILE), data.getvalue())
    except OSError as error:  # a TimeoutError is one
        logger.warning("%s is not saved, and a run that resumes from here warms up again: %s", STATE_FILE, error)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file in a folder that is made if need be; if this is broken off, an older file stays as it was.

    Raises:
        OSError: It cannot be written, or the disk does not answer in time.
    """
    patient_disk.PatientDisk(path.parent).run(partial(_replace, path, data), patient_disk.PATIENCE)


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def misfit(value: Any, form: Any, place: str = "its content") -> str | None:
    """Where a value does not have a form; None if it has."""
    if isinstance(form, (type, UnionType)):
        if form is float:
            fits = isinstance(value, float) or is_finite_number(value)
        else:
            is_count = is_finite_number(value) and value >= 0
            fits = isinstance(value, form) and (is_count or not isinstance(value, int))
        return None if fits else f"{place} is {value!r:.60}"
    kind: Any = dict if isinstance(form, dict) else (list, tuple)
    if not isinstance(value, kind) or (isinstance(form, tuple) and len(value) != len(form)):
        return f"{place} is {value!r:.60}"
    if isinstance(form, list):
        parts = [(each, form[0], place) for each in value]
    elif isinstance(form, tuple):
        parts = [(each, own, place) for each, own in zip(value, form, strict=True)]
    else:
        assert isinstance(value, dict)  # by `kind`
        forms = {name: form[str] for name in value} if str in form else {name.rstrip("?"): form[name] for name in form}
        missing = [name for name in form if name is not str and not name.endswith("?") and name not in value]
        unknown = [name for name in value if not isinstance(name, str) or name not in forms]
        if missing or unknown:
            return f"{place} lacks {missing[0]}" if missing else f"{place} has {unknown[0]!r:.60}"
        parts = [(each, forms[name], name) for name, each in value.items()]
    return next((found for part in parts if (found := misfit(*part)) is not None), None)
