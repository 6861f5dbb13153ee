# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run: its phases, a line for each step that verl logs, and how much time is left."""

import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from gradloc.tools.figures import count

# A phase ends with the line of the log that contains its mark.
PHASES = (
    ("starting Ray", "Started a local Ray instance"),
    ("starting the workers", "Training Progress:   0%"),
)
# Without a terminal, a line tells so often how long the current phase or step has taken.
EVERY = 60.0
TOKEN_NORM = "actor/gradloc/token_norm_max"

# Rich assumes 80 columns where the output is not a terminal. The line of a step is longer.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def step_line(step: int, metrics: dict[str, float]) -> str:
    """What is shown of a step: reward, gradient norms, spikes and seconds."""
    parts = [f"step {step}"]
    for key, name in (
        ("critic/score/mean", "reward"),
        ("actor/grad_norm", "gradient norm"),
        (TOKEN_NORM, "largest micro-batch norm per token"),
    ):
        if key in metrics:
            parts.append(f"{name} {metrics[key]:.4g}")
    if metrics.get(TOKEN_NORM) == 0:
        parts.append("(all answers to each prompt got the same reward: nothing to learn)")
    if metrics.get("actor/gradloc/triggered"):
        culprits, passes = (metrics.get(f"actor/gradloc/{key}", 0) for key in ("culprits", "passes"))
        parts.append(f"SPIKE: {count(int(culprits), 'culprit')} in {count(int(passes), 'pass', 'passes')}")
    if metrics.get("actor/token_clip/over"):
        over, cut = (int(metrics.get(f"actor/token_clip/{key}", 0)) for key in ("over", "cut"))
        parts.append(f"TokenClip: {cut} of {count(over, 'outlying signal')} cut")
    if "actor/gradloc/drill_found" in metrics:
        parts.append(f"DRILL: {'found' if metrics['actor/gradloc/drill_found'] else 'NOT found'}")
    if "timing_s/step" in metrics:
        parts.append(f"{metrics['timing_s/step']:.0f} s")
    return "  ".join(parts)


def summary(logged: dict[int, dict[str, float]]) -> str:
    """One sentence on the spikes in all steps."""
    if not logged:
        return "No step was completed."
    steps = count(len(logged), "step")
    watched = {step: metrics for step, metrics in logged.items() if TOKEN_NORM in metrics}
    if not watched:
        return f"{steps} completed, none with GradLoc's metrics."
    spiked = sum(metrics.get("actor/gradloc/triggered", 0) > 0 for metrics in watched.values())
    if spiked:
        return f"{spiked} of {steps} spiked."
    largest = max(watched, key=lambda step: watched[step][TOKEN_NORM])
    norm = watched[largest][TOKEN_NORM]
    if not norm:
        return f"No spike in {steps}: all answers to each prompt got the same reward, so no token had a gradient."
    threshold = watched[largest].get("actor/gradloc/threshold")
    against = "" if threshold is None else f", {norm / threshold:.0%} of the threshold"
    return f"No spike in {steps}. The largest micro-batch norm per token was {norm:.4g}, in step {largest}{against}."


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Clock:
    """What a run is doing, and the time left, which the steps so far tell.

    Args:
        steps: How many steps the run has; None if that is unknown.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self._ended = [0.0]  # of each phase and step, in seconds since the start

    @property
    def phase(self) -> int:
        return len(self._ended) - 1

    @property
    def doing(self) -> str:
        if self.phase < len(PHASES):
            return PHASES[self.phase][0]
        return f"step {self.phase - len(PHASES) + 1}" + (f" of {self.steps}" if self.steps else "")

    def ends(self, now: float) -> None:
        """Notes that the current phase or step has ended."""
        self._ended.append(now)

    def left(self, now: float) -> float | None:
        """The seconds left; None if they cannot be told yet."""
        measured = self.phase - len(PHASES)
        if measured <= 0 or self.steps is None or measured >= self.steps:
            return None
        began = self._ended[-1]
        seconds = (began - self._ended[len(PHASES)]) / measured
        steps = self.steps - measured
        return max(seconds * steps - (now - began), seconds * (steps - 1), 0.0)

    def waiting(self, now: float) -> str:
        """What is going on, for how long, and how much time is left."""
        left = self.left(now)
        said = f"{self.doing} for {duration(now - self._ended[-1])}"
        return said if left is None else f"{said}, about {duration(left)} left in all"


def follow(log: Path, metrics: Path, training: "subprocess.Popen[bytes]", steps: int | None) -> None:
    """Prints phases by the log and steps by the file of metrics, and a summary when training has ended."""
    start, told = time.monotonic(), 0.0
    clock = Clock(steps)
    logged: dict[int, dict[str, float]] = {}
    with (
        open(log, errors="replace") as file,
        open(metrics, "a+") as written,
        console.status(clock.doing) as status,
    ):
        written.seek(0)
        line = ""
        while True:
            ended = training.poll() is not None
            now = time.monotonic() - start
            while said := file.readline():
                if clock.phase < len(PHASES) and PHASES[clock.phase][1] in said:
                    clock.ends(now)
                    told = now
                    console.print(f"{clock.doing}  ({now:.0f} s so far)")
            line += written.readline()
            while line.endswith("\n"):  # what is not complete yet waits for its rest
                step, of_step = json.loads(line)
                line = written.readline()
                logged[step] = of_step
                clock.ends(now)
                told = now
                left = clock.left(now)
                console.print(step_line(step, of_step) + (f"  (about {duration(left)} left)" if left else ""))
            if ended:
                break
            status.update(clock.waiting(now))
            if not console.is_terminal and now - told >= EVERY:
                told = now
                console.print(f"  {clock.waiting(now)}")
            time.sleep(0.5)
    console.print(summary(logged))
