# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The program: reads the command line, and trains, or prints what it would do."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from . import checks, cluster, command, embedded, options
from .errors import Refused
from .processes import exit_code, exit_on_signals
from .run import plan
from .usage import help_text

REFUSED, FAILED = 2, 1


def main(arguments: Sequence[str]) -> int:
    """Runs the program and returns its exit code, which is training's own once that has started."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed one is None
            stream.reconfigure(errors="surrogateescape")  # paths come out as they came in
    exit_on_signals()
    try:
        return launch(arguments)
    except Refused as error:
        print(f"run_experiment.sh: {error}", file=sys.stderr)
        return REFUSED
    except subprocess.CalledProcessError as error:
        return exit_code(error.returncode)  # the command has said itself what is wrong
    except BrokenPipeError:
        # Python would fail again when it flushes what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"run_experiment.sh: {error}", file=sys.stderr)
        return FAILED


def launch(arguments: Sequence[str]) -> int:
    asked = options.parse(arguments)
    profile = options.choose_profile(asked)
    if asked.help:
        print(help_text(asked.remedy, os.environ), end="", flush=True)
        return 0
    if sys.platform != "linux":
        raise Refused("this needs Linux")
    run = plan(asked, profile)
    if profile == "embedded":
        embedded.check_output(run)
    missing = checks.missing_paths(run.values, run.prepared if profile == "embedded" else None)
    listed = "".join(f"\n  {path}" for path in missing)
    if asked.dry_run:
        if missing:
            print(f"run_experiment.sh: these paths do not exist:{listed}", file=sys.stderr)
        print(command.printed(run.command, run.added), flush=True)
        return 0
    if missing:
        raise Refused(f"these paths do not exist; correct the settings or create them:{listed}")
    return cluster.train(run) if profile == "cluster" else embedded.train(run)
