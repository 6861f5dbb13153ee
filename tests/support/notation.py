"""Short names for what many tests write."""

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Caplog = pytest.LogCaptureFixture
Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def cases(names: str, *rows: Any, ids: Any = None) -> pytest.MarkDecorator:
    """Parametrizes a test by arguments with these names, separated by spaces; a row has a value for each, or is it."""
    arguments = names.split()
    return pytest.mark.parametrize(arguments if len(arguments) > 1 else names, rows, ids=ids)


@contextlib.contextmanager
def memory_peak() -> Iterator[Callable[[], int]]:
    """Gives what says, afterwards, how many bytes Python allocated at most in the block."""
    peak = 0
    tracemalloc.start()
    try:
        yield lambda: peak
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
