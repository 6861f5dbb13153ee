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

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..evidence.writer import jsonable
from ..report.identities import held_and_broken, identity_rows, remarks_of
from ..report.page import assemble, packed
from ..report.spike_view import Spec, figure, index, of_field, of_fields, table_of
from ..report.view import Column, Table, View
from ..tools.command_line import in_a_sentence, need, output_file
from ..tools.command_line import parser as new_parser
from ..tools.figures import shown, visible
from ..tools.files import write_output
from ..tools.reading import Evidence, evidence_at, read

_IDENTITIES = (Column("Identity", "row"), Column("State"), Column("× usual", "num"), Column("What it is"))
_ROW: Spec = (Column("Row", "row"), lambda row: str(row["row"]))
_ROWS = (
    *(_ROW, index("Prompt", "prompt"), index("Response", "response"), *of_fields("uid reward advantage")),
    index("Length", "length"),
)
# In a narrow terminal, what is compared stays.
_TOKENS = (
    *(_ROW, of_field("position"), index("Token", "token_id", 2), figure("Mask", "response_mask")),
    *(figure("Training", "log_prob"), figure("Old", "old_log_prob"), figure("Rollout", "rollout_log_prob")),
    *(figure("Reference", "ref_log_prob"), of_field("advantage", 1)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = new_parser("check", str(__doc__))
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file or a folder")
    parser.add_argument("--first-step", action="store_true", help="no optimizer step was taken before the first one")
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.add_argument("--html", metavar="FILE", type=output_file, help="write it as a page, too")
    options = parser.parse_args(arguments)
    path, *others = options.paths
    has_evidence = any(map(evidence_at, options.paths))
    if has_evidence and others:
        parser.error("give evidence alone")
    if not options.json:
        need("gradloc check without --json", "rich")
    try:
        if has_evidence:  # what training said of its last step
            evidence = read(path, texts=False)
            if not evidence.identities:
                raise OSError(f"{path} has no identities: an older release wrote it, or nothing has checked the run.")
            return _say(f"step {shown(evidence.checked_in)} of {path}", evidence, [], options)
        need("gradloc check of records, batches and bundles", "torch", "safetensors")
        from .files import check_files

        return _say(*check_files(options.paths, options.first_step), options)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(visible(in_a_sentence(error, "standard output")), file=sys.stderr)
        return 2


def _say(where: str, evidence: Evidence, rows: Sequence[Mapping[str, Any]], options: Any) -> int:
    """Prints and writes what was found; returns the exit code."""
    states, view = evidence.identities, _view(where, evidence, rows)
    broken = [name for name in states if states[name]["state"] == "broken"]
    if options.json:
        said = {name: warning for (name, _), (_, warning) in evidence.broken.items() if name in states}
        for name in said.keys() - set(broken):
            states[name]["missing"] = states[name]["missing"] or "it was broken in an earlier step"
        warnings = [said[name] for name in broken if name in said]
        found = {"where": where, "identities": states, "warnings": warnings, "rows": rows}
        print(json.dumps(jsonable(found), indent=2, allow_nan=False))
    else:
        from ..report.terminal import print_report  # needs rich

        print_report(view, everything=False)
    if options.html:
        write_output(options.html, assemble(packed(view)))
    return int(bool(broken))


def _view(where: str, evidence: Evidence, rows: Sequence[Mapping[str, Any]]) -> View:
    """What was found as the report draws it: the identities, then the rows and their tokens."""
    claim = visible(held_and_broken(evidence.identities, where))
    states = [(name, state, times, what or holds) for holds, name, state, times, _, what in identity_rows(evidence)]
    tokens = [{"row": row["row"], **token} for row in rows for token in row.get("tokens", ())]
    told = [row for row in rows if "uid" in row]
    tables = {
        "identities": Table("The identities", _IDENTITIES, states),
        "worst": table_of("Rows in which the first is most off", _ROWS, told),
        "beside": table_of("Tokens where the first is most off, with log-probs side by side", _TOKENS, tokens),
    }
    return View(claim, identities=[claim], warnings=remarks_of(evidence), tables=tables)
