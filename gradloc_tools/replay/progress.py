# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a replay is measuring and for how long it has run, on stderr: on a CPU it may take an hour."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..report.figures import visible

_logger = logging.getLogger(__name__)

# A search makes hundreds of short passes: one line in this many seconds.
SECONDS = 5.0


def loading(path: str, variant: object) -> None:
    """Says which model is loaded from now on, on rank 0 alone."""
    if int(os.environ.get("RANK", 0)) == 0:
        _logger.info("loading the model %s with %s", visible(path), variant)


def measuring(what: str, number: int, of: int) -> None:
    """Says what is measured from now on, as "token 3 of 16"."""
    _logger.info("%s, %d of %d", what, number, of)


class SearchProgress:
    """Says from time to time how many passes this process has made in a search."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def passed(self, count: int) -> None:
        if time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            _logger.info("searching: %d forwards and backwards so far", count)


@contextmanager
def shown() -> Iterator[None]:
    """Writes these lines to stderr within the block."""
    start = time.monotonic()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(elapsed)s  %(message)s"))
    handler.addFilter(lambda record: record.__dict__.update(elapsed=_duration(time.monotonic() - start)) is None)
    level, propagates = _logger.level, _logger.propagate
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)
        _logger.propagate = propagates


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
