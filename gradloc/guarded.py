# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A diagnostic must not end the training run, nor hold it up: what becomes of an error in one, and of what hangs.

For code with collective calls, see `collectives.guarded_on_all_ranks`.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

# How many seconds the other ranks wait for what may hang on one: far less than the timeout of a collective call.
PATIENCE = 60.0


class ForeseenError(ValueError):
    """An error whose message says all, so that it is logged without a traceback."""


def warn_once(said: set[str], what: str, error: Exception | None = None, about: str | None = None) -> None:
    """Logs a warning, unless it, or what it is `about`, was `said` before."""
    if (about or what) not in said:
        said.add(about or what)
        _log(what if error is None else f"{what}, and no warning follows for later ones", error)


@contextmanager
def guarded(what: str, said: set[str] | None = None) -> Iterator[None]:
    """Around code without collective calls: an error in it is a warning, and what follows goes on.

    `what` is what the error leaves undone, a sentence. Without `said` (see `warn_once`), every error is logged.
    """
    try:
        yield
    except Exception as error:
        if said is None:
            _log(what, error)
        else:
            warn_once(said, what, error)
        release_frames(error)


def release_frames(error: BaseException) -> None:
    """Clears the local variables of all frames that an error, or an error behind it, came through.

    They hold the tensors of the pass. An error that was raised while another was handled, or from another, holds that
    one's frames, too.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [found.__context__, found.__cause__]


def _log(what: str, error: Exception | None) -> None:
    known = error is None or isinstance(error, (ForeseenError, OSError))
    message = what if error is None else f"{what}: {error if known else repr(error)}"
    logger.warning("%s", message, exc_info=None if known else error)


class PatientThread:
    """Does work that may hang, as that of a disk, in a thread of its own, one piece of work at a time.

    Args:
        what (str | Path): What is waited for, for the error.
    """

    def __init__(self, what: str | Path) -> None:
        self._what = what
        self._work: futures.Future[Any] | None = None
        self.was_late = False  # whether work has ever not ended in time

    def run(self, work: Callable[[], _Value]) -> _Value:
        """What `work` returns. If it takes longer than `PATIENCE` seconds, it goes on beside training.

        Raises:
            TimeoutError: It, or earlier work, has not ended in that time.
            RuntimeError: Instead of `SystemExit` and the like: those of a signal, which are meant, reach the main
                thread alone.
        """
        result: futures.Future[_Value] = futures.Future()

        def run() -> None:
            try:
                result.set_result(work())
            except (Exception, KeyboardInterrupt) as error:  # raised again below
                result.set_exception(error)
            except BaseException as error:
                result.set_exception(RuntimeError(f"it tried to end the process: {error!r}"))

        if self._work is None or self._work.done():
            self._work = result
            threading.Thread(target=run, daemon=True).start()
            if futures.wait([result], PATIENCE).done:
                self._work = None  # an error in it holds what is on the stack
                return result.result()
        self.was_late = True
        raise TimeoutError(f"{self._what} does not respond within {PATIENCE:g} seconds")
