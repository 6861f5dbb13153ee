# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A line of spikes.jsonl as one line of text, for logs and trackers."""

from collections.abc import Mapping
from typing import Any


def in_one_line(line: Mapping[str, Any]) -> str:
    """The verdict with its check, then the summary; the summary alone where there is no verdict.

    Args:
        line (Mapping): An event or a clip line.
    """
    verdict = line.get("verdict") or {}
    parts = (verdict.get("sentence"), verdict.get("check"), line.get("summary"))
    return " ".join(str(part) for part in parts if part)
