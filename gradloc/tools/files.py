# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the files of commands. What is no ordinary file is never replaced by one."""

import errno
import os
import secrets
import stat


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to what is no ordinary file: a pipe, a device, a folder, or what /dev/stdout is."""
    return os.path.exists(path) and not os.path.isfile(os.path.realpath(path))


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to the file that a user has named. A link stays, and what it leads to is written.

    Raises:
        OSError: It cannot be written; it has the name of the file as it was given.
    """
    try:
        if is_special(path):
            with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        else:
            write_whole(os.path.realpath(path), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to an ordinary file that appears under its name only when it is complete.

    Its directory is created if it does not exist. A link, which a stranger may have put there, is refused.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "Not an ordinary file", str(path))
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # A name that nobody can guess and O_EXCL, so that a link in this folder is not followed.
    unfinished = os.path.join(folder, f".{secrets.token_hex(8)}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        os.remove(unfinished)
        raise
