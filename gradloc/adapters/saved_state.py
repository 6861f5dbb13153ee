# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The file beside a checkpoint that has what was learned of the run."""

import io
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..guarded import PatientDisk

logger = logging.getLogger(__name__)

# Beside an actor's checkpoint.
STATE_FILE = "gradloc_state.pt"

# To be raised where a part saves other fields than it can read. Files of the first form do not say theirs.
FORM = 3


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
        if (form := state.pop("form", 1)) == FORM:
            return state
        reason = f"its form is {form!r}, and this release knows {FORM}"
    except Exception as error:
        reason = str(error)
    raise ValueError(f"{path} cannot be read ({reason}); restore it, or remove it, and all warm-ups start over")


def write_state(folder: str, state: Mapping[str, Any]) -> None:
    """Writes what `read_state` reads. A disk error, or a disk that does not answer in time, is a warning."""
    data = io.BytesIO()
    torch.save({"form": FORM, **state}, data)
    path = Path(folder, STATE_FILE)
    try:
        PatientDisk(path.parent).run(partial(_replace, path, data.getvalue()))
    except OSError as error:  # a TimeoutError is one
        logger.warning("%s is not saved, and a run that resumes from here warms up again: %s", STATE_FILE, error)


def _replace(path: Path, data: bytes) -> None:
    """Writes a file in a folder that is made if need be; if this is broken off, an older file stays as it was."""
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
