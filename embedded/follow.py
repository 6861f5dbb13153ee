# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run: its phases, a line for each step that verl logs, and how much time is left."""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    sys.exit("Following a run needs rich, which is not installed: pip install rich")

# A phase ends with the line of the log that contains its mark. Its seconds are those of the default run on two idle
# cores, which the README's figures are from.
PHASES = (
    ("starting Ray", "Started a local Ray instance", 9.0),
    ("starting the workers", "Training Progress:   0%", 18.0),
)
STEP_SECONDS = 41.0
# Where there is no terminal, a line tells so often how long the current phase or step has taken.
EVERY = 60.0
SLOWER = 1.5
STEP = re.compile(r"step:(\d+) - (.*)")
TOKEN_NORM = "actor/gradloc/token_norm_max"
METRIC = re.compile(r"(\S+?):(?:np\.\w+\()?([-+.\w]+)")

# Rich assumes 80 columns where the output is not a terminal. The line of a step is longer.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def steps_in(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The step that a line of the log reports, with its metrics; most lines report none."""
    if found := STEP.search(line):
        metrics = {}
        for key, value in METRIC.findall(found[2]):
            try:
                metrics[key] = float(value)
            except ValueError:
                continue
        yield int(found[1]), metrics


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
        parts.append(f"SPIKE: {plural(int(culprits), 'culprit')} in {plural(int(passes), 'pass', 'es')}")
    if metrics.get("actor/token_clip/over"):
        over, cut = (int(metrics.get(f"actor/token_clip/{key}", 0)) for key in ("over", "cut"))
        parts.append(f"TokenClip: {cut} of {plural(over, 'outlying signal')} cut")
    if "actor/gradloc/drill_found" in metrics:
        parts.append(f"DRILL: {'found' if metrics['actor/gradloc/drill_found'] else 'NOT found'}")
    if "timing_s/step" in metrics:
        parts.append(f"{metrics['timing_s/step']:.0f} s")
    return "  ".join(parts)


def summary(logged: dict[int, dict[str, float]]) -> str:
    """One sentence on the spikes in all steps."""
    if not logged:
        return "No step was completed."
    steps = plural(len(logged), "step")
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
    """Estimates the time left: from the steps of this run as soon as there is one, before that from the usual seconds.

    Args:
        steps: How many steps the run has; None if that is unknown.
        usual: Whether the run is the one that the usual seconds are for.
    """

    def __init__(self, steps: int | None, usual: bool) -> None:
        self.steps = steps
        self.usual = usual
        self.phase = 0
        self._ended = [0.0]  # of each phase and step, in seconds since the start

    @property
    def doing(self) -> str:
        if self.phase < len(PHASES):
            return PHASES[self.phase][0]
        step = len(self._ended) - len(PHASES)
        return f"step {step}" + (f" of {self.steps}" if self.steps else "")

    @property
    def _whole(self) -> int | None:
        """The number of phases and steps."""
        return None if self.steps is None else len(PHASES) + self.steps

    def _usual_seconds(self, begin: int, end: int) -> float:
        phases = [seconds for _, _, seconds in PHASES[begin:end]]
        return sum(phases) + STEP_SECONDS * (end - begin - len(phases))

    def waiting(self, now: float) -> str:
        """What is going on, for how long, and how much time is left."""
        left = self.left(now)
        said = f"{self.doing} for {duration(now - self._ended[-1])}"
        return said if left is None else f"{said}, about {duration(left)} left in all"

    def ends(self, now: float) -> None:
        """Notes that the current phase or step has ended."""
        self._ended.append(now)
        self.phase += 1

    def slowness(self, now: float) -> float | None:
        """How many times longer this run has taken than usual; None if there is no usual time."""
        if not self.usual:
            return None
        done = self._usual_seconds(0, self.phase)
        # What the current phase has taken beyond its usual time counts as well.
        current = self._usual_seconds(self.phase, self.phase + 1)
        overdue = now - self._ended[-1] > current
        expected = done + (current if overdue else 0.0)
        taken = now if overdue else self._ended[-1]
        return max(1.0, taken / expected) if expected else 1.0

    def left(self, now: float) -> float | None:
        """The seconds left; None if they cannot be told yet."""
        whole = self._whole
        if whole is None or self.phase >= whole:
            return None
        began = self._ended[-1]
        measured = len(self._ended) - 1 - len(PHASES)
        if measured > 0:
            seconds = (began - self._ended[len(PHASES)]) / measured
            return max(seconds * (whole - self.phase) - (now - began), seconds * (whole - self.phase - 1), 0.0)
        slowness = self.slowness(now)
        if slowness is None:
            return None
        later = slowness * self._usual_seconds(self.phase + 1, whole)
        return max(slowness * self._usual_seconds(self.phase, self.phase + 1) - (now - began), 0.0) + later


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def follow(log: Path, pid: int, clock: Clock) -> None:
    """Prints the steps in the log as they are written, and a summary when the process has ended."""
    start = time.monotonic()
    warned, told = False, 0.0
    logged: dict[int, dict[str, float]] = {}

    def seconds() -> float:
        return time.monotonic() - start

    def end_of_phase() -> str:
        """Goes on to the next phase, and says what it is and how long the rest will take."""
        nonlocal warned
        clock.ends(seconds())
        left = clock.left(seconds())
        if left is None:
            return ""
        said = f"about {duration(left)} left"
        slowness = clock.slowness(seconds())
        if slowness is not None and slowness > SLOWER and not warned:
            warned = True
            said += f"; {slowness:.1f} times slower than two idle cores, which the README's figures are for"
        return said

    with open(log, errors="replace") as file, console.status(clock.doing) as status:
        while True:
            ended = not alive(pid)
            while line := file.readline():
                if clock.phase < len(PHASES) and PHASES[clock.phase][1] in line:
                    left = end_of_phase()
                    told = seconds()
                    console.print(f"{clock.doing}  ({', '.join(filter(None, [f'{seconds():.0f} s so far', left]))})")
                for step, metrics in steps_in(line):
                    logged[step] = metrics
                    left = end_of_phase()
                    told = seconds()
                    console.print(step_line(step, metrics) + (f"  ({left})" if left else ""))
            if ended:
                break
            waiting = clock.waiting(seconds())
            status.update(waiting)
            if not console.is_terminal and seconds() - told >= EVERY:
                told = seconds()
                console.print(f"  {waiting}")
            time.sleep(0.5)
    console.print(summary(logged))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="verl's output")
    parser.add_argument("pid", type=int, metavar="PID", help="id of the process that writes it")
    parser.add_argument("--steps", type=int, help="steps of the run")
    parser.add_argument("--usual", action="store_true", help="the run is the one that the README's figures are for")
    options = parser.parse_args()
    follow(options.log, options.pid, Clock(options.steps, options.usual))


if __name__ == "__main__":
    main()
