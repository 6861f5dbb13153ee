# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Uses a disk that may not answer, without waiting for ever."""

import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

_Value = TypeVar("_Value")

# How many seconds the other ranks wait for rank 0's disk: far less than the timeout of a collective call.
PATIENCE = 60.0


class PatientDisk:
    """Does work that uses a disk in a thread of its own, one piece of work at a time.

    Args:
        directory (Path): What is waited for, for the error.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._work: futures.Future[Any] | None = None

    def run(self, work: Callable[[], _Value]) -> _Value:
        """What `work` returns. If it takes longer than `PATIENCE` seconds, it goes on beside training.

        Raises:
            TimeoutError: It, or earlier work, has not ended in that time.
        """
        result: futures.Future[_Value] = futures.Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # raised again below
                result.set_exception(error)

        if self._work is None or self._work.done():
            self._work = result
            threading.Thread(target=run, daemon=True).start()
            if futures.wait([result], PATIENCE).done:
                return result.result()
        raise TimeoutError(f"{self._directory} does not respond within {PATIENCE:g} seconds")
