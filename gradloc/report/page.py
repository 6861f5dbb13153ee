# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the view as a page: one HTML file from page.html, page.css, page.js and the view, compressed.

The page's content security policy blocks all requests.
"""

import base64
import gzip
from pathlib import Path

from ..tools.files import write_output
from ..tools.reading import Evidence
from .build import DETAILED, build
from .view import View, json_of

_FILES = ("page.html", "page.css", "page.js")


def write_page(evidence: Evidence, out: str, details: int = DETAILED) -> None:
    """Writes the page; of an ordinary file, a reader sees the old page or the new one, never an incomplete one.

    Args:
        evidence (Evidence): What was read.
        out (str): The file.
        details (int): How many culprits have their response, texts and layers.

    Raises:
        OSError: The page cannot be written.
    """
    write_output(out, assemble(packed(build(evidence, details=details))))


def packed(view: View) -> str:
    """The view as the page holds it: JSON, compressed, in Base64. No text of it can be taken for markup."""
    return base64.b64encode(gzip.compress(json_of(view).encode(), mtime=0)).decode()


def assemble(data: str) -> str:
    """The whole page as HTML, with what `packed` returned."""
    html, css, js = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in _FILES)
    html = html.replace('<link rel="stylesheet" href="page.css">', f"<style>\n{css}</style>")
    html = html.replace('<script type="module" src="page.js"></script>', f'<script type="module">\n{js}</script>')
    return html.replace(' id="data"></script>', f' id="data">{data}</script>')  # at last: it is not searched
