from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from scripts import launch

from warm_python import warm_python


@contextlib.contextmanager
def interpreter(verl: bool) -> Iterator[Path]:
    """One that has imported what runs need."""
    environment = os.environ | launch.added_environment(os.environ) | {"EMBEDDED_METRICS": os.devnull}
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_python(Path(folder), environment, verl) as path:
        yield path


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Runs are started by an interpreter that has imported what they need, verl included."""
    with interpreter(verl=True) as runs.warm_interpreter:
        yield


@pytest.fixture(scope="session")
def warm_without_verl() -> Iterator[Path]:
    with interpreter(verl=False) as path:
        yield path
