"""Short names for what many tests write."""

from typing import Any

import pytest

Caplog = pytest.LogCaptureFixture
Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def cases(names: str, *rows: Any, ids: Any = None) -> pytest.MarkDecorator:
    """Parametrizes a test by arguments with these names, separated by spaces; a row has a value for each, or is it."""
    arguments = names.split()
    return pytest.mark.parametrize(arguments if len(arguments) > 1 else names, rows, ids=ids)
