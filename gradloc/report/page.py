# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the page: one HTML file from page.html, page.css, page.js, plotly.js and the data. It needs plotly.

The page's content security policy blocks all requests.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..evidence.writer import jsonable
from .page_data import page_data
from .reading import Evidence

_FILES = ("page.html", "page.css", "page.js")


def write_page(evidence: Evidence, out: str) -> None:
    """Writes the page atomically: a reader sees the old page or the new one, never an incomplete one.

    Raises:
        OSError: The page cannot be written.
    """
    from plotly.offline import get_plotlyjs

    data = json.dumps(jsonable(page_data(evidence)), allow_nan=False, separators=(",", ":"))
    write_whole(out, assemble(page_files(), data, get_plotlyjs()))


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file that appears under its name only when it is complete; its directory is created if need be.

    Raises:
        OSError: It cannot be written; a file that was there is as it was.
    """
    folder, name = os.path.split(os.path.abspath(path))
    unfinished = os.path.join(folder, f".{name}.{os.getpid()}")
    os.makedirs(folder, exist_ok=True)
    try:
        with open(unfinished, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def page_files() -> Mapping[str, str]:
    """The page's own files by name: of the sources, or where the package is installed, as a module holds them."""
    try:
        from .page_files import FILES  # type: ignore[import-not-found]  # made by make_patch.sh
    except ImportError:
        folder = Path(__file__).parent
        return {name: (folder / name).read_text(encoding="utf-8") for name in _FILES}
    return FILES


def assemble(files: Mapping[str, str], data: str, plotly: str) -> str:
    """The whole page as HTML.

    Args:
        files (Mapping[str, str]): The page's own files by name.
        data (str): JSON.
        plotly (str): The source of plotly.js.
    """
    # The data must not close the script element that contains it, or open a comment.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # What page.html refers to, and what stands there in the page.
    parts = {
        '<link rel="stylesheet" href="page.css">': f"<style>\n{files['page.css']}</style>",
        '<script type="application/json" id="data"></script>': (
            f'<script type="application/json" id="data">{data}</script>'
        ),
        '<script src="plotly.js"></script>': f"<script>{plotly}</script>",
        '<script type="module" src="page.js"></script>': f'<script type="module">\n{files["page.js"]}</script>',
    }
    # All in one substitution, so that the inserted text is not searched.
    references = re.compile("|".join(map(re.escape, parts)))
    page, replaced = references.subn(lambda match: parts[match[0]], files["page.html"])
    if replaced != len(parts):
        raise ValueError(f"page.html must refer once to each of its parts: {', '.join(parts)}")
    return page
