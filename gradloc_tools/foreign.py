# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what may come from a stranger: ordinary files up to a size, and JSON within limits of its size in memory and of
its depth.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from gradloc.evidence.writer import DEPTH

# An empty list takes 3 bytes in a file and 64 in memory.
_CONTAINERS = 10**6


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


def parse(data: bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: It is not JSON, nests too deep, or has too many lists and objects. The message says which.
    """
    containers = data.count(b"[") + data.count(b"{")
    if containers > _CONTAINERS:
        raise ValueError(f"it has over {_CONTAINERS:,} lists and objects")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if containers > DEPTH and _is_deep(value):
        raise ValueError("it nests too deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        inner = (part.values() if type(part) is dict else part for part in level if type(part) in (dict, list))
        level = [entry for entries in inner for entry in entries if type(entry) in (dict, list)]
    return bool(level)
