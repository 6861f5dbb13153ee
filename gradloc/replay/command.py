# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the spike of a bundle: its micro-batches again, unsharded in one process, against the recorded norms.

    gradloc replay /runs/1/spikes/replay/step7-epoch0-mini_batch0 --remedies

The coefficients of the loss are those of training. So with the weights of training, the gradients are those of
training but for rounding; with other weights, the log-probs show how far they are.

exit codes: 0  it was replayed, or searched
            2  wrong usage, or the bundle or the model cannot be used
            1  a package is missing, or an error that is none of these
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..evidence.writer import evidence_files, jsonable
from ..report.page import write_page
from ..report.replays import replay_tables
from ..tools.command_line import AT_LEAST_ONE, POSITIVE, in_a_sentence, need, output_file
from ..tools.command_line import parser as new_parser
from ..tools.figures import visible
from ..tools.opening import Bundle, BundleError, open_bundle
from ..tools.reading import read
from .model import ATTENTIONS, DTYPES, CannotReplayError
from .replaying import Replay, write_result
from .search_command import given, processes, run_search
from .searched_event import evidence_of, with_findings

TOKENS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 where the bundle or the model cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    need("gradloc replay", *([] if options.json else ["rich"]))
    try:
        run_search(options) if options.search else _run(options)
    except (BundleError, CannotReplayError, OSError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(visible(in_a_sentence(error, options.bundle)), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("replay", str(__doc__))
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder, <bisect_dump_dir>/replay/<name>")
    parser.add_argument("--model", metavar="PATH", help="a folder or a name on the hub (default: the bundle's path)")
    parser.add_argument("--adapter", metavar="PATH", help="the folder of the LoRA adapter that was trained")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="what to compute in (default: as in training)")
    parser.add_argument("--attention", choices=ATTENTIONS, help="its implementation (default: as in training)")
    parser.add_argument("--only", action="store_true", help="no comparison with float32 and another attention")
    parser.add_argument("--tokens", metavar="K", type=int, default=TOKENS, help=f"measure K tokens alone ({TOKENS})")
    parser.add_argument("--remedies", action="store_true", help="measure what each remedy leaves of the spike")
    parser.add_argument(
        "--switches", action="store_true", help="switch attention, precision, RMSNorm and rotary embedding one by one"
    )
    parser.add_argument(
        "--search", action="store_true", help="search the bundle for the tokens behind the spike, and do nothing else"
    )
    parser.add_argument("--threshold", metavar="τ", type=POSITIVE, help="for --search: τ (default: the event's)")
    parser.add_argument(
        "--budget", metavar="N", type=AT_LEAST_ONE, help="for --search: at most N passes (default: as in training)"
    )
    parser.add_argument("--html", metavar="FILE", type=output_file, help="write a report with the replay to FILE")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's folder run its own code")
    return parser


def _problem(options: argparse.Namespace) -> str | None:
    """Which options do not fit together; None if all do."""
    if options.search:
        others, why = ("remedies", "switches"), "of a replay without"
    else:
        others, why = ("threshold", "budget"), "for"
    wrong = [f"--{name}" for name in others if getattr(options, name)]
    if processes() > 1 and not options.search:
        wrong.append("torchrun")
    return f"{wrong[0]} is {why} --search" if wrong else None


def _run(options: argparse.Namespace) -> None:
    """Replays the bundle, and writes and prints the result."""
    bundle = with_findings(open_bundle(options.bundle))
    said = ""
    for result in Replay(bundle, options).results():
        try:
            text = f"The result: {visible(str(write_result(bundle, result)))}"
        except OSError as error:
            text = f"The result cannot be written beside the bundle: {error.strerror}"
        if text != said:
            print(text, file=sys.stderr)
        said = text
    if options.json:
        print(json.dumps(jsonable(result), indent=2, allow_nan=False))
    else:
        from ..report.terminal import print_texts_and_tables  # needs rich

        shown = replay_tables(result)
        texts = [f"Replay of {shown['title']}", shown["where"], "", *shown["sentences"]]
        print_texts_and_tables(texts, shown["tables"], shown["notes"])
    if options.html:
        _write_page(bundle, result, options)
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)


def _write_page(bundle: Bundle, result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Writes the report on the evidence that the bundle lies in, or on its event alone where there is none."""
    directory = str(bundle.path.parent.parent)
    evidence = read(directory) if evidence_files(directory) else evidence_of(bundle.event, bundle, given(options))
    # Its own result may not have been written beside the bundle.
    plain = jsonable(result)
    evidence.replays = [plain, *(other for other in evidence.replays if other["bundle"] != plain["bundle"])]
    write_page(evidence, options.html)
