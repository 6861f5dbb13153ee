# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads files that may come from a stranger: ordinary ones, up to a size."""

import os
import stat
from pathlib import Path


class NotPlainFileError(ValueError):
    """Why a file is not read; the message names the file."""


def read_plain_file(path: Path, most: int) -> bytes:
    """Reads an ordinary file of at most `most` bytes. A link is not followed, and a named pipe is not waited for.

    Raises:
        NotPlainFileError: It is something else, or larger.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise NotPlainFileError(f"{path.name} is not an ordinary file.")
    # It may have been replaced since.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainFileError(f"{path.name} is not an ordinary file.")
        data = file.read(most + 1) if found.st_size <= most else b""
    if found.st_size > most or len(data) > most:
        size = max(found.st_size, len(data))
        raise NotPlainFileError(f"{path.name} is larger than it may be: {size:,} bytes, and {most:,} are expected.")
    return data
