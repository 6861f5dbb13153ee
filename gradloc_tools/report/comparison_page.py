# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A comparison of two runs as one HTML file: tables without scripts, which opens offline."""

import html
from collections.abc import Mapping
from typing import Any

from .comparison_table import TextTable, remarks, tables
from .page import write_whole

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GradLoc: two runs</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin-bottom: 2rem; }
caption { font-weight: 600; text-align: left; padding-bottom: 0.4rem; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1.2rem 0.2rem 0; border-top: 1px solid #8886; }
td { white-space: pre-wrap; font-variant-numeric: tabular-nums; }
</style>
"""


def write_comparison(comparison: Mapping[str, Any], out: str) -> None:
    """Writes the page.

    Args:
        comparison (Mapping): What `compare` returned.
        out (str): The file; its directory is created if it does not exist.

    Raises:
        OSError: The page cannot be written.
    """
    said = "".join(f"<p>{html.escape(remark)}</p>\n" for remark in remarks(comparison))
    body = f"<h1>Two runs side by side</h1>\n{said}" + "".join(map(_table, tables(comparison)))
    write_whole(out, f"{_HEAD}<body>\n{body}</body>\n</html>\n")


def _table(table: TextTable) -> str:
    names = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    return f"<table>\n<caption>{html.escape(table.title)}</caption>\n<tr>{names}</tr>\n{rows}</table>\n"
