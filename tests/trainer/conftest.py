from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from scripts import launch

from warm_python import warm_python


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Runs are started by an interpreter that has imported what they need."""
    environment = os.environ | launch.added_environment(os.environ)
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        with warm_python(Path(folder), environment) as runs.warm_interpreter:
            yield
