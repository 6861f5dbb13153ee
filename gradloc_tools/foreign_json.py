# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Parses JSON that may come from a stranger, within limits of its size in memory and of its depth."""

import json
from typing import Any

from gradloc.evidence.writer import DEPTH

# An empty list takes 3 bytes in a file and 64 in memory.
_CONTAINERS = 10**6


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
