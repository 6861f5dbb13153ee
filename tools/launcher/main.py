# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run from its start to its end."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import checks, command, faults, options, settings, targets
from .errors import Refused
from .hydra import by_key
from .log import say
from .outcome import Outcome, sizes
from .processes import companion, exit_code, exit_on_signals, session
from .resolve import resolve
from .set_up import check_embedded, compiling, locked, prepare, set_up_venv
from .usage import help_text

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".embedded"
REFUSED, FAILED = 2, 1
DUMP_KEY = f"{settings.ACTOR}.bisect_dump_dir"
# The exit code of a run that spike_action=stop has ended: EXIT_CODE in gradloc/verl/spike_stop.py.
STOPPED = 76
# How the sentence begins that such a run ends with.
STOPPING = "Training ends after step "


@dataclass(frozen=True)
class Run:
    """A run that is about to start.

    Args:
        target: The version of verl.
        prepared: Where the set-up of the embedded profile writes model and data.
        fault: The fault to plant, in the embedded profile.
        asked_target: The version that the command line names; None if it names none.
        added: Variables on top of the environment.
        ray_directory: Ray's files, in the embedded profile.
    """

    profile: str
    target: str
    tiny: bool
    values: dict[str, str]
    overrides: list[str]
    python: str | None
    prepared: Path
    fault: str | None
    asked_target: str | None
    added: dict[str, str]
    ray_directory: str

    @property
    def interpreter(self) -> str:
        if self.python is not None:
            return self.python
        return "python3" if self.profile == "cluster" else str(self.venv / "bin/python")

    @property
    def venv(self) -> Path:
        """The embedded profile's own virtual environment."""
        return STATE / self.target / "venv"

    @property
    def command(self) -> list[str]:
        overrides = command.overrides(
            self.profile,
            self.values,
            self.ray_directory,
            ROOT,
            self.target,
            tiny=self.tiny,
            fault=self.fault,
            given=self.overrides,
        )
        return [self.interpreter, "-m", "verl.trainer.main_ppo", *overrides]

    @property
    def output(self) -> Path:
        return Path(self.values["OUTPUT_DIR"])

    @property
    def evidence(self) -> Path:
        return Path(self.values["BISECT_DUMP_DIR"])

    @property
    def usual(self) -> bool:
        """Whether the run is the embedded profile's default, whose seconds are known."""
        if self.tiny or self.fault or self.overrides or self.target != targets.default_version(ROOT):
            return False
        usual = resolve({}, {}, profile="embedded", tiny=False, remedy=False, prepared=self.prepared, now="any")
        return all(self.values[name] == usual[name] for name in usual.keys() - settings.WITHOUT_DURATION)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | self.added


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
    run = plan(asked, profile, choose_target(asked, profile))
    missing = checks.missing_paths(run.values, run.prepared if profile == "embedded" else None)
    listed = "".join(f"\n  {path}" for path in missing)
    if asked.dry_run:
        if missing:
            print(f"run_experiment.sh: these paths do not exist:{listed}", file=sys.stderr)
        print(command.printed(run.command, run.added), flush=True)
        return 0
    if missing:
        raise Refused(f"these paths do not exist; correct the settings or create them:{listed}")
    return train_on_cluster(run) if profile == "cluster" else train_embedded(run)


def choose_target(asked: options.Options, profile: str) -> str:
    """The version of verl that is asked for, or that training's Python has, or the default one."""
    if asked.target is not None:
        targets.check(asked.target, ROOT)
    python = asked.python or ("python3" if profile == "cluster" else None)
    target = targets.choose(asked.target, python, ROOT, os.environ)
    if profile == "embedded" and python is None:
        check_embedded(target, ROOT)
    return target


def plan(asked: options.Options, profile: str, target: str) -> Run:
    prepared = STATE / target / ("tiny" if asked.tiny else "smollm2")
    overrides = [targets.translated(override, target) for override in asked.overrides]
    for override, used in zip(asked.overrides, overrides, strict=True):
        if override != used:
            print(f"run_experiment.sh: for verl {target}, {override} is {used}", file=sys.stderr)
    given = by_key(asked.overrides)
    if directory := given.get(DUMP_KEY):
        raise Refused(f"bisect_dump_dir is the setting BISECT_DUMP_DIR here: give BISECT_DUMP_DIR={directory}")
    values = resolve(
        asked.settings,
        os.environ,
        profile=profile,
        tiny=asked.tiny,
        remedy=asked.remedy,
        prepared=prepared,
        drill=asked.drill,
        fault=asked.fault,
        overrides=given,
        now=time.strftime("%Y%m%d-%H%M%S"),
    )
    return Run(
        profile=profile,
        target=target,
        asked_target=asked.target,
        tiny=asked.tiny,
        values=values,
        overrides=overrides,
        python=asked.python,
        prepared=prepared,
        fault=asked.fault,
        added=command.added_environment(profile, values, os.environ, ROOT, asked.fault),
        # Unix sockets lie in Ray's directory, and their names may have no more than 107 characters: keep it short.
        ray_directory=f"/tmp/gradloc-{os.getpid()}",
    )


def train_on_cluster(run: Run) -> int:
    checks.check_verl(run.interpreter, ROOT, run.environment, run.asked_target)
    latest = run.output / "latest_checkpointed_iteration.txt"  # verl's note of its last checkpoint
    given = by_key(run.overrides)
    resumes = given.get("trainer.resume_mode") not in ("disable", "resume_path")
    drill_step = run.values["SPIKE_DRILL_STEP"]
    if latest.is_file() and resumes and "trainer.default_local_dir" not in given:
        step = latest.read_text().strip()
        say(
            f"Resuming from step {step} in {run.output} "
            "(to start from scratch: another OUTPUT_DIR, or trainer.resume_mode=disable)"
        )
        if step.isdecimal() and drill_step != "null" and int(drill_step) <= int(step):
            say(f"There will be no drill: its step {drill_step} is past (for one: SPIKE_DRILL_STEP={int(step) + 1})")
            drill_step = "null"
    before = sizes(run.evidence)
    with session(run.command, run.environment) as training:
        status = exit_code(training.wait())
        if not status and drill_step != "null":
            say(Outcome.of(run.evidence, before).verdict(drill_step))
        _name_evidence(run)
    return status


def _name_evidence(run: Run) -> None:
    """Says where a run's evidence is, and how to look at it."""
    spikes, steps = (run.evidence / f"{name}.jsonl" for name in ("spikes", "steps"))
    if spikes.is_file():
        say(f"The evidence of spikes is in {spikes}. To look at it:")
    elif steps.is_file():
        say(f"No spike was recorded. The figures of each step are in {steps}. To look at them:")
    else:
        say(f"There is no spikes.jsonl in {run.evidence}: no spike was recorded, or it was written on another node")
        return
    report = ["-m", "verl.utils.gradloc.report", str(run.evidence), "--html", "report.html"]
    print(command.for_shell([run.interpreter, *report]), flush=True)


def train_embedded(run: Run) -> int:
    (STATE / run.target).mkdir(parents=True, exist_ok=True)
    run.output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(STATE / run.target / "lock"))
        if run.python is None:
            set_up_venv(run.venv, run.target, ROOT, os.environ)
            stack.enter_context(compiling(run.venv, os.environ))
        checks.check_verl(run.interpreter, ROOT, run.environment, run.asked_target)
        if run.python is not None:
            checks.check_packages(run.python, ROOT, run.environment, run.target)
        prepare(run.prepared, run.tiny, run.interpreter, ROOT, run.environment)

    log = run.output / "train.log"
    evidence_before = sizes(run.evidence)
    say(f"Training; the full log is {log}")
    environment = {name: value for name, value in run.environment.items() if name != "RAY_ADDRESS"}
    if run.fault is not None:
        say(f"FAULT '{run.fault}' IS PLANTED IN THIS RUN ON PURPOSE: {faults.find(run.fault).meaning}")
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
            report = [run.interpreter, "-m", "gradloc.report", str(run.evidence)]
            page = run.output / "report.html"
            # Without a spike there is no table to show, and the drill has a line of its own.
            stdout = None if outcome.spikes else subprocess.DEVNULL
            subprocess.run([*report, "--html", str(page)], env=environment, stdout=stdout)
            if not outcome.spikes and page.is_file():
                print(f"The report: {page}", flush=True)
        if not status:
            for line in outcome.last_words(run.values["SPIKE_DRILL_STEP"], run.fault, run.asked_target):
                print(line, flush=True)
        if status:
            _print_why(status, log)
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
