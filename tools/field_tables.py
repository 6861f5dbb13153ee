# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of fields in docs/reference from the comments in gradloc/lines.py.

    python tools/field_tables.py [--check]

With --check, nothing is written.

exit codes: 0  the tables are, or are now, those of the comments
            1  with --check: some are not; each page is named
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The class of each table, by what stands over it, in the order in which a reader meets them.
TABLES = {
    "event": "Event",
    "unit": "Unit",
    "culprit": "Culprit",
    "step": "Step",
    "note": "Note",
}
_MARKED = re.compile(r"(?<=<!-- fields: )(\w+) -->\n.*?(?=\n\n<!-- end -->)", re.S)


def tables() -> dict[str, str]:
    """The tables by name. What a base class of an earlier table has is there; here it is "as of" that."""
    source = (ROOT / "gradloc/lines.py").read_text()
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    told: dict[str, str] = {}  # by base class, the table that has it

    def rows_of(name: str, table: str) -> list[tuple[str, str]]:
        node, found = classes[name], []
        for base in (each.id for each in node.bases if isinstance(each, ast.Name) and each.id in classes):
            of_base = rows_of(base, table)
            if told.setdefault(base, table) != table:
                article = "an" if told[base][0] in "aeiou" else "a"
                of_base = [(field, f"as of {article} {told[base]}") for field, _ in of_base]
            found += of_base
        for field in (each for each in node.body if isinstance(each, ast.AnnAssign)):
            first = field.lineno - 1
            above: list[str] = []
            while lines[first - 1].startswith("    # "):
                first -= 1
                above.insert(0, lines[first].removeprefix("    # "))
            beside = lines[field.lineno - 1].partition("  # ")[2]
            found.append((ast.unparse(field.target), beside or " ".join(above)))
        return found

    return {name: _table(rows_of(of, name)) for name, of in TABLES.items()}


def _table(rows: list[tuple[str, str]]) -> str:
    """Fields without a meaning have that of the next one, and neighbours with the same meaning share a row."""
    found: list[tuple[list[str], str]] = []
    waiting: list[str] = []
    for field, meaning in rows:
        waiting.append(f"`{field}`")
        if meaning and found and found[-1][1] == meaning:
            found[-1][0].extend(waiting)
        elif meaning:
            found.append((waiting, meaning))
        waiting = waiting if not meaning else []
    return "\n".join(
        ["field | meaning", "---|---"] + [f"{', '.join(of)} | {said.replace('|', chr(92) + '|')}" for of, said in found]
    )


def main(arguments: list[str]) -> int:
    """The command line."""
    made, stale = tables(), []
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        text = page.read_text()
        now = _MARKED.sub(lambda found: f"{found[1]} -->\n\n{made[found[1]]}", text)
        if now != text:
            stale.append(page)
            if "--check" not in arguments:
                page.write_text(now)
    if stale and "--check" in arguments:
        print(f"Run python tools/field_tables.py: {', '.join(page.name for page in stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
