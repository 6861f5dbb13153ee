"""One process that is a group of its own: NCCL on a GPU, gloo on a CPU. `run.py` beside this file starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multirank"))


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., list[Any]]]:
    """Runs a function of the `*_cases.py` as the only rank, whatever number of ranks is asked for."""
    import single_process

    with single_process.group():

        def run(_world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
            return [function(*arguments)]

        yield run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With GRADLOC_GPU_QUICK, of each test its first case alone."""
    if not os.environ.get("GRADLOC_GPU_QUICK"):
        return
    firsts: dict[str, pytest.Item] = {}
    for item in items:
        firsts.setdefault(item.nodeid.partition("[")[0], item)
    items[:] = firsts.values()
