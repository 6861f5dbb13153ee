# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Says which identities hold in what a trainer has written: equalities that every healthy update keeps.

    gradloc check step12.jsonl step13.jsonl     records, as JSON Lines or Parquet
    gradloc check batch.pt                      a batch of verl's, saved by torch.save or DataProto.save_to_disk
    gradloc check /runs/1/spikes                evidence: what training said of its last step

Also a folder of such files, a bundle, and a step of prime-rl's token exports. Neither a model nor a patch is needed.

exit codes: 0  all identities that could be checked hold
            1  one is broken
            2  wrong usage, or the files cannot be read
"""

import html
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..evidence.writer import jsonable
from ..report.identities import identities_of, identity_rows
from ..report.view import Column, Table
from ..tools.command_line import in_a_sentence, need, output_file
from ..tools.command_line import parser as new_parser
from ..tools.figures import short, shown, visible
from ..tools.files import write_output
from ..tools.reading import Evidence, read

_EVIDENCE = ("steps.jsonl", "spikes.jsonl", "critic.jsonl")
_NAMES = {
    **{"token_id": "token", "response_mask": "mask", "log_prob": "training", "old_log_prob": "old"},
    **{"rollout_log_prob": "rollout", "ref_log_prob": "reference"},
}
_PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>GradLoc check</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{font:16px system-ui;max-width:72rem;margin:2rem auto;padding:0 1rem}td,th{padding:.2rem .8rem .2rem 0;
text-align:left;vertical-align:top}</style>"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = new_parser("check", str(__doc__))
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file or a folder")
    parser.add_argument("--first-step", action="store_true", help="no optimizer step was taken before the first one")
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.add_argument("--html", metavar="FILE", type=output_file, help="write it as a page, too")
    options = parser.parse_args(arguments)
    is_evidence = any(map(_is_evidence, options.paths))
    if is_evidence and len(options.paths) > 1:
        parser.error("give evidence alone")
    if not options.json:
        need("gradloc check without --json", "rich")
    try:
        if is_evidence:
            return _say(*_of_evidence(options.paths[0]), options)
        need("gradloc check of records, batches and bundles", "torch", "safetensors")
        from .files import check_files

        return _say(*check_files(options.paths, options.first_step), options)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(visible(in_a_sentence(error, "standard output")), file=sys.stderr)
        return 2


def _is_evidence(path: str) -> bool:
    places = [os.path.join(path, folder, name) for folder in ("", "bisect_dump") for name in _EVIDENCE]
    return os.path.basename(path) in _EVIDENCE or any(map(os.path.exists, places))


def _of_evidence(path: str) -> tuple[str, Evidence, list[Any]]:
    """What training said of its last step, as `check_files` gives it."""
    evidence = read(path, texts=False)
    if not evidence.identities:
        raise OSError(f"{path} has no identities: an older release wrote it, or nothing has checked the run.")
    return f"step {shown(evidence.checked_in)} of {path}", evidence, []


def _say(where: str, evidence: Evidence, rows: Sequence[Mapping[str, Any]], options: Any) -> int:
    """Prints and writes what was found; returns the exit code."""
    found: Any = identities_of(evidence, where)
    states = found["states"]
    said = {name: warning for (name, _), (_, warning) in evidence.broken.items() if name in states}
    warnings = [said[name] for name in states if name in said and states[name]["state"] == "broken"]
    texts = [found["claim"], *(text for each in warnings[:1] for text in (each["sentence"], each["check"]))]
    texts, tables = [*map(visible, texts)], [_of_identities(evidence), *_of_rows(rows)]
    if options.json:
        for name in said:
            if states[name]["state"] != "broken":
                states[name]["missing"] = states[name]["missing"] or "it was broken in an earlier step"
        found = {"where": where, "identities": states, "warnings": warnings, "rows": rows}
        print(json.dumps(jsonable(found), indent=2, allow_nan=False))
    else:
        from ..report.terminal import print_texts_and_tables  # needs rich

        print_texts_and_tables(texts, tables)
    if options.html:
        body = [f"<p>{html.escape(text)}" for text in texts] + [_html(table) for table in tables]
        write_output(options.html, _PAGE + "\n".join(body))
    return int(any(state["state"] == "broken" for state in states.values()))


def _of_identities(evidence: Evidence) -> Table:
    """The report's table without lines over the run, and with what holds where nothing is to be said."""
    columns = Column("Identity", "row"), Column("State"), Column("× usual", "num"), Column("What it is")
    rows = identity_rows(evidence)
    return Table("", columns, [(name, state, times, what or holds) for holds, name, state, times, _, what in rows])


def _of_rows(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The rows, then their tokens."""
    tokens = [{"row": row["row"], **token} for row in rows for token in row.get("tokens", ())]
    bare = [{name: value for name, value in row.items() if name != "tokens"} for row in rows]
    found = {
        "Rows in which the first is most off": bare,
        "Tokens where the first is most off, with log-probs side by side": tokens,
    }
    return [_of_lines(title, lines) for title, lines in found.items() if lines and len(lines[0]) > 1]


def _of_lines(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    columns = [Column(_NAMES.get(name, name), "row" if name == "row" else "") for name in lines[0]]
    rows = [[shown(each) if isinstance(each, str) else short(each) for each in line.values()] for line in lines]
    return Table(title, columns, rows)


def _html(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column.name)}" for column in table.columns)
    rows = ("".join(f"<td>{html.escape(str(cell))}" for cell in row) for row in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}{''.join(f'<tr>{row}' for row in rows)}</table>"
