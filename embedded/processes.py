# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run, and the processes that must end with it. Needs Linux and the standard library only."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GRACE_SECONDS = 5.0


def exit_on_signals() -> None:
    """Turns the first ending signal into SystemExit(128 + its number); later ones must not disturb the clean-up."""
    for number in ENDING:
        # Those ignored from the start (by nohup, or by a shell for its background jobs) stay so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    _ignore_signals()
    raise SystemExit(128 + number)


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def exit_code(returncode: int) -> int:
    """The exit code as shells give it: 128 + the number of the signal that ended the process."""
    return returncode if returncode >= 0 else 128 - returncode


@contextlib.contextmanager
def session(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Training, in a session of its own that all of its Ray processes inherit. The session ends with the block."""
    # Signals wait while the process is started: one in between would leave a process that nobody ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_let_signals_through,
        )
        try:
            _let_signals_through()
            yield process
        finally:
            _end_session(process)
    finally:
        _let_signals_through()


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    handlers = {number: signal.getsignal(number) for number in ENDING}
    _ignore_signals()
    leader.terminate()  # Ray's own way out
    deadline = time.monotonic() + GRACE_SECONDS
    while _members(leader.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    while members := _members(leader.pid):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    leader.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)  # another session may follow


def _members(session_id: int) -> list[int]:
    """The running processes of a session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            pid = int(stat.parent.name)
            state = stat.read_text(errors="replace").rpartition(") ")[2][0]  # after "pid (name) "
            if os.getsid(pid) == session_id and state != "Z":
                members.append(pid)
    return members
