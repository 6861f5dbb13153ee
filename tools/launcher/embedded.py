# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run of the embedded profile: set-up, training in the background with its progress, and the report."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

from . import checks, faults
from .errors import Refused
from .hydra import by_key
from .log import say
from .outcome import Outcome, sizes
from .processes import companion, exit_code, session
from .run import ROOT, Run
from .set_up import compiling, locked, prepare, set_up_venv

# The exit code of a run that spike_action=stop has ended: EXIT_CODE in gradloc/adapters/spike_stop.py.
STOPPED = 76
# How the sentence begins that such a run ends with.
STOPPING = "Training ends after step "


def check_output(run: Run) -> None:
    """Raises Refused if the run would add to the evidence of another one, which it does not go on with."""
    resumes = by_key(run.overrides).get("trainer.resume_mode") in ("auto", "resume_path")
    if not resumes and any(sizes(run.evidence).values()):
        raise Refused(
            f"{run.evidence} has the evidence of another run, and the report would count both as one: give another "
            "OUTPUT_DIR, or leave it out"
        )


def train(run: Run) -> int:
    run.state.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(run.state / "lock"))
        if run.asked.python is None:
            set_up_venv(run.venv, run.target, ROOT, os.environ, plugin=run.asked.plugin)
            stack.enter_context(compiling(run.venv, os.environ))
        checks.check_verl(run.interpreter, ROOT, run.environment, run.asked.target, run.asked.plugin)
        if run.asked.python is not None:
            checks.check_packages(run.asked.python, ROOT, run.environment, run.target)
        prepare(run.prepared, run.asked.tiny, run.interpreter, ROOT, run.environment)

    run.output.mkdir(parents=True, exist_ok=True)  # only now, so that a run that cannot start leaves no empty folder
    log = run.output / "train.log"
    evidence_before = sizes(run.evidence)
    say(f"Training; the full log is {log}")
    environment = {name: value for name, value in run.environment.items() if name != "RAY_ADDRESS"}
    if run.asked.fault is not None:
        say(f"FAULT '{run.asked.fault}' IS PLANTED IN THIS RUN ON PURPOSE: {faults.find(run.asked.fault).meaning}")
    follow = [run.interpreter, str(ROOT / "embedded/follow.py")]
    if run.values["TOTAL_STEPS"] != "null":
        follow += ["--steps", run.values["TOTAL_STEPS"]]
    if run.usual:
        follow += ["--usual"]
    with contextlib.ExitStack() as stack:
        os.mkdir(run.ray_directory, mode=0o700)
        stack.callback(shutil.rmtree, run.ray_directory, ignore_errors=True)
        output = stack.enter_context(open(log, "wb"))
        training = stack.enter_context(session(run.command, environment, output))
        follower = stack.enter_context(companion([*follow, "--", str(log), str(training.pid)], environment))
        status = exit_code(training.wait())
        follower.wait()
        outcome = Outcome.of(run.evidence, evidence_before)
        if outcome.has_evidence:
            report = [run.interpreter, "-m", "gradloc_tools", "report", str(run.evidence)]
            page = run.output / "report.html"
            # Without a spike or a clipped token there is no table to show, and the drill has a line of its own.
            tables = outcome.spikes or outcome.clips
            stdout = None if tables else subprocess.DEVNULL
            subprocess.run([*report, "--html", str(page)], env=environment, stdout=stdout)
            if not tables and page.is_file():
                print(f"The report: {page}", flush=True)
        if status:
            _print_why(status, log)
        else:
            asked = run.asked
            for line in outcome.last_words(run.values["SPIKE_DRILL_STEP"], asked.fault, asked.target, asked.plugin):
                print(line, flush=True)
    return status


def _print_why(status: int, log: Path) -> None:
    """Says why a run has ended: the sentence of spike_action=stop, otherwise the end of its log."""
    sentence = _stopping_sentence(log) if status == STOPPED else None
    if sentence is not None:
        say(f"Training was stopped after repeated spikes (exit code {status}).")
        print(sentence, flush=True)
    else:
        say(f"Training failed (exit code {status}). The end of {log}:")
        _print_end(log)


def _stopping_sentence(log: Path) -> str | None:
    """What training says at the end of its log where spike_action=stop has ended it; None if it does not."""
    with open(log, errors="surrogateescape") as lines:
        sentences = deque((line for line in lines if line.startswith(STOPPING)), 1)
    return sentences[0].rstrip("\n") if sentences else None


def _print_end(log: Path, lines: int = 30) -> None:
    if sys.stdout is None:  # closed
        return
    with open(log, "rb") as file:
        sys.stdout.buffer.writelines(deque(file, lines))
    sys.stdout.buffer.flush()
