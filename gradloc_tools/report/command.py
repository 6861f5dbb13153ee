# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows what the spikes of a run come from: a summary in the terminal, and one HTML file that opens offline.

    gradloc report /runs/1/spikes --html report.html

The evidence may be read while training writes it. Rotated files are read as well; a line that is still being
written is skipped.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from gradloc.evidence.writer import jsonable

from ..command_line import need
from .build import DETAILED
from .comparison import compare
from .comparison_table import remarks, tables
from .figures import visible
from .page import write_page
from .reading import read
from .summary import summarize

TABLE_ROWS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        int: The exit code: 0; 1 where spikes are missing from the evidence; 2 where it cannot be read or the page not
            be written.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.other is not None and (options.top or options.html):
        parser.error("--top and --html are for the evidence of one run")
    if options.html and not os.path.isdir(folder := os.path.dirname(os.path.abspath(options.html))):
        print(
            visible(f"--html {options.html}: there is no folder {folder}. Make it, or name another."), file=sys.stderr
        )
        return 2
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the report
    if not options.json:
        need("The summary in the terminal", "rich")
    try:
        return 1 if _report(options) else 0
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        said = f"{error.strerror}: {error.filename2 or error.filename}" if error.strerror else str(error)
        print(visible(said), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradloc report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="the directory with spikes.jsonl, or a file; or a run's directory")
    parser.add_argument(
        "other", metavar="PATH_B", nargs="?", help="the same of another run: shows the two runs side by side"
    )
    parser.add_argument("--html", metavar="OUT", help="write a page for the browser to OUT")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--since", metavar="STEP", type=int, help="leave out earlier steps")
    parser.add_argument(
        "--top",
        metavar="K",
        type=_positive,
        help=f"the K largest culprits in the summary ({TABLE_ROWS}), and with all details on the page ({DETAILED})",
    )
    return parser


def _report(options: argparse.Namespace) -> bool:
    """Reports, and returns whether spikes are missing from the evidence."""
    if options.other is None:
        evidence = read(options.path, options.since)
        figures = summarize(evidence, options.top or TABLE_ROWS)
    else:
        figures = compare(*(read(path, options.since) for path in (options.path, options.other)))
    if options.json:
        print(json.dumps(jsonable(figures), indent=2, allow_nan=False))
    else:
        from .terminal import print_report, print_texts_and_tables  # needs rich

        if options.other is None:
            print_report(evidence, options.top or TABLE_ROWS)
        else:
            print_texts_and_tables(remarks(figures), tables(figures))
    if options.html:
        write_page(evidence, options.html, options.top or DETAILED)
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)
    return any(run["lost_spikes"] for run in figures.get("runs", [figures]))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
