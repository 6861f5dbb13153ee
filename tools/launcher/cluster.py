# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run on a cluster: training with the user's own verl, and where its evidence is."""

from . import checks
from .command import for_shell
from .hydra import by_key
from .log import say
from .outcome import Outcome, sizes
from .processes import exit_code, session
from .run import ROOT, Run


def train(run: Run) -> int:
    checks.check_verl(run.interpreter, ROOT, run.environment, run.asked.target, run.asked.plugin)
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
            say(f"No drill: step {drill_step} is already done (for a drill: SPIKE_DRILL_STEP={int(step) + 1})")
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
        say(f"The evidence is in {spikes}. To read it:")
    elif steps.is_file():
        say(f"No spike was recorded. The figures of each step are in {steps}. To read them:")
    else:
        say(f"There is no spikes.jsonl in {run.evidence}: no spike was recorded, or it was written on another node")
        return
    report = ["-m", "gradloc_tools", "report", str(run.evidence), "--html", "report.html"]
    print(for_shell([run.interpreter, *report]), flush=True)
