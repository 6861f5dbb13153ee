# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the page. It needs plotly."""

import json
import os

from ..evidence import jsonable
from .markup import page
from .page_data import page_data
from .reading import Evidence


def write_page(evidence: Evidence, out: str) -> None:
    """Writes the page; readers of an older one never see half of it.

    Raises:
        OSError: It cannot be written.
    """
    from plotly.offline import get_plotlyjs

    data = json.dumps(jsonable(page_data(evidence)), allow_nan=False, separators=(",", ":"))
    unfinished = f"{out}.{os.getpid()}"
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(page(data, get_plotlyjs()))
        os.replace(unfinished, out)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)
