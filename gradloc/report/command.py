# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows what the spikes of a run come from: a summary in the terminal, and one HTML file that opens offline.

    gradloc report /runs/1/spikes --html report.html

The evidence may be read while training writes it; a line that is still being written is skipped.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from ..evidence.writer import jsonable
from ..tools.command_line import argument, in_a_sentence, need, output_file
from ..tools.command_line import parser as new_parser
from ..tools.figures import visible
from ..tools.reading import Evidence, read
from .build import DETAILED, TABLE_ROWS, build
from .comparison import compare, remarks, tables
from .page import write_page
from .summary import lost_spikes, summarize


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        int: The exit code: 0; 1 where spikes are missing from the evidence; 2 where it cannot be read or the page not
            be written.
    """
    parser = new_parser("report", str(__doc__))
    parser.add_argument("path", metavar="PATH", help="the directory with spikes.jsonl, or a file; or a run's directory")
    parser.add_argument(
        "other", metavar="PATH_B", nargs="?", help="the same of another run: shows the two runs side by side"
    )
    parser.add_argument("--html", metavar="OUT", type=output_file, help="write a page for the browser to OUT")
    parser.add_argument("--all", action="store_true", help="print all that is known, not only what is to be done")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--since", metavar="STEP", type=int, help="leave out earlier steps")
    parser.add_argument(
        "--top",
        metavar="K",
        type=argument(int, lambda value: value > 0, "must be at least 1"),
        help=f"the K largest culprits in the summary ({TABLE_ROWS}), and with all details on the page ({DETAILED})",
    )
    options = parser.parse_args(arguments)
    if options.other is not None and (options.top or options.html):
        parser.error("--top and --html are for the evidence of one run")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the report
    if not options.json:
        need("The summary in the terminal", "rich")
    try:
        runs = [read(path, options.since) for path in (options.path, options.other) if path is not None]
        _report(runs, options)
        return int(any(map(lost_spikes, runs)))
    except BrokenPipeError:
        raise  # the reader of the output has seen enough
    except OSError as error:
        print(visible(in_a_sentence(error, "standard output")), file=sys.stderr)
        return 2


def _report(runs: Sequence[Evidence], options: Namespace) -> None:
    if options.json:
        figures = summarize(runs[0], options.top or TABLE_ROWS) if len(runs) == 1 else compare(*runs)
        print(json.dumps(jsonable(figures), indent=2, allow_nan=False))
    else:
        from .terminal import print_report, print_texts_and_tables  # needs rich

        if len(runs) == 1:
            print_report(build(runs[0], options.top or TABLE_ROWS, details=0), options.all, short=not options.top)
        else:
            figures = compare(*runs)
            print_texts_and_tables(remarks(figures), tables(figures))
    if options.html:
        write_page(runs[0], options.html, options.top or DETAILED)
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)
