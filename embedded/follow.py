# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run: a line for each step that verl logs, until the process ends."""

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

MILESTONES = {
    "Started a local Ray instance": "Ray is up; starting the workers",
    "Training Progress:   0%": "The workers are ready; the first step begins",
}
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
        (TOKEN_NORM, "largest token norm"),
    ):
        if key in metrics:
            parts.append(f"{name} {metrics[key]:.4g}")
    if metrics.get("actor/gradloc/triggered"):
        culprits, passes = (metrics.get(f"actor/gradloc/{key}", 0) for key in ("culprits", "passes"))
        parts.append(f"SPIKE: {plural(int(culprits), 'culprit')} in {plural(int(passes), 'pass', 'es')}")
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
    norm = f"{watched[largest][TOKEN_NORM]:.4g}"
    return f"No spike in {steps}. The largest token norm was {norm}, in step {largest}: choose the threshold from it."


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def follow(log: Path, pid: int) -> None:
    """Prints the steps in the log as they are written, and a summary when the process has ended."""
    start = time.monotonic()
    told = set()
    logged: dict[int, dict[str, float]] = {}
    with open(log, errors="replace") as file, console.status("starting Ray") as status:
        while True:
            ended = not alive(pid)
            while line := file.readline():
                for step, metrics in steps_in(line):
                    console.print(step_line(step, metrics))
                    logged[step] = metrics
                for mark, message in MILESTONES.items():
                    if mark in line and mark not in told:
                        told.add(mark)
                        console.print(f"{message} ({time.monotonic() - start:.0f} s)")
            if ended:
                break
            status.update(f"{time.monotonic() - start:.0f} s")
            time.sleep(0.5)
    console.print(summary(logged))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="verl's output")
    parser.add_argument("pid", type=int, metavar="PID", help="id of the process that writes it")
    options = parser.parse_args()
    follow(options.log, options.pid)


if __name__ == "__main__":
    main()
