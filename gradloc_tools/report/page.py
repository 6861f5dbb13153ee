# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the page: one HTML file from page.html, page.css, page.js, plotly.js and the data. It needs plotly.

The page's content security policy blocks all requests.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradloc.evidence.writer import jsonable

from .page_data import page_data
from .reading import Evidence

_FILES = ("page.html", "page.css", "page.js")


def write_page(evidence: Evidence, out: str) -> None:
    """Writes the page atomically: a reader sees the old page or the new one, never an incomplete one.

    Raises:
        OSError: The page cannot be written.
    """
    from plotly.offline import get_plotlyjs

    write_whole(out, *assemble(page_files(), _json(page_data(evidence)), get_plotlyjs()))


def _json(data: Mapping[str, Any]) -> str:
    """The data as JSON, one entry of a list after the other: a copy of all in plain types would take much memory."""

    def dumps(value: Any) -> str:
        return json.dumps(jsonable(value), allow_nan=False, separators=(",", ":"))

    fields = (
        f"{dumps(name)}:" + (f"[{','.join(map(dumps, value))}]" if isinstance(value, list) else dumps(value))
        for name, value in data.items()
    )
    return f"{{{','.join(fields)}}}"


def write_whole(path: str | os.PathLike[str], *texts: str) -> None:
    """Writes texts, one after the other, to a file that appears under its name only when it is complete.

    Its directory is created if it does not exist.

    Raises:
        OSError: It cannot be written; a file that was there is as it was.
    """
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # A name that nobody can guess and O_EXCL, so that a link in this folder is not followed.
    unfinished = os.path.join(folder, f".{secrets.token_hex(8)}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        os.remove(unfinished)
        raise


def page_files() -> Mapping[str, str]:
    """The page's own files by name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_text(encoding="utf-8") for name in _FILES}


def assemble(files: Mapping[str, str], data: str, plotly: str) -> list[str]:
    """The whole page as HTML, in pieces: together they would take much more memory.

    Args:
        files (Mapping[str, str]): The page's own files by name.
        data (str): JSON.
        plotly (str): The source of plotly.js.
    """
    # The data must not close the script element that contains it, or open a comment.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # What page.html refers to, and what stands there in the page.
    parts = {
        '<link rel="stylesheet" href="page.css">': ("<style>\n", files["page.css"], "</style>"),
        '<script type="application/json" id="data"></script>': (
            '<script type="application/json" id="data">',
            data,
            "</script>",
        ),
        '<script src="plotly.js"></script>': ("<script>", plotly, "</script>"),
        '<script type="module" src="page.js"></script>': ('<script type="module">\n', files["page.js"], "</script>"),
    }
    # The inserted text is not searched.
    pieces = re.split(f"({'|'.join(map(re.escape, parts))})", files["page.html"])
    if len(pieces) != 2 * len(parts) + 1:
        raise ValueError(f"page.html must refer once to each of its parts: {', '.join(parts)}")
    return [text for piece in pieces for text in parts.get(piece, (piece,))]
