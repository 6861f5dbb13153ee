# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the evidence's fields into the documentation, from the schemas in gradloc_tools/schema.py.

python -m tools.field_tables    # in the root of the checkout

A table stands between `<!-- fields: NAME -->` and `<!-- end -->`. Fields with the same meaning share a row.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from gradloc_tools import schema

PAGES = [Path(__file__).resolve().parents[1] / f"docs/reference/{name}.md" for name in ("evidence", "clips")]
_EVENT = schema.EVENT["properties"]
_CULPRIT = _EVENT["culprits"]["items"]["properties"]
_TOKEN_CLIP = schema.CLIP["properties"]["token_clip"]["properties"]
FIELDS: dict[str, Mapping[str, Any]] = {
    "event": _EVENT,
    "unit": _EVENT["units"]["items"]["properties"],
    "culprit": _CULPRIT,
    "note": schema.NOTE["properties"],
    "step": schema.STEP["properties"],
    "critic": schema.CRITIC["properties"],
    "clip": schema.CLIP["properties"],
    "token_clip": _TOKEN_CLIP,
    "clipped_token": _TOKEN_CLIP["tokens"]["items"]["properties"],
}
# The tables that only name what they share with another.
LIKE = {
    **dict.fromkeys(("note", "step", "critic", "clip"), ("an event", _EVENT)),
    "clipped_token": ("a culprit", _CULPRIT),
}


def table(name: str) -> str:
    """A table of Markdown; raises KeyError for a field without a meaning."""
    of, others = LIKE.get(name, ("", {}))
    meanings = {field: form["description"] for field, form in FIELDS[name].items()}
    shared = [field for field in meanings if meanings[field] == others.get(field, {}).get("description")]
    own = [field for field in meanings if field not in shared]
    rows = [(list(fields), meaning) for meaning, fields in groupby(own, key=meanings.__getitem__)]
    if shared:
        rows.insert(0, (shared, f"as of {of}"))
    lines = ["field | meaning", "---|---"]
    for fields, meaning in rows:
        escaped = meaning.replace("|", r"\|")
        lines.append(f"{', '.join(f'`{field}`' for field in fields)} | {escaped}")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """A page with its tables as they should be."""
    marked = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.S)
    return marked.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
