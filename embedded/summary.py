"""Show a run: its steps while it goes on, and the spikes and their culprits when it has ended.

python embedded/summary.py follow LOG PID          a line for each step that verl logs, until the process ends
python embedded/summary.py report DUMP_DIR [LOG]   where the evidence is, and the culprits in a table
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    sys.exit("The summary needs rich, which is not installed: pip install rich")

MOST_ROWS = 30
MILESTONES = {
    "Started a local Ray instance": "Ray is up; starting the workers",
    "Training Progress:   0%": "The workers are ready; the first step begins",
}
STEP = re.compile(r"step:(\d+) - (.*)")
METRIC = re.compile(r"(\S+?):(?:np\.\w+\()?([-+.\w]+)")

# Rich takes an output that is no terminal for one of 80 columns: too few for the table.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def number(value: float | str | None) -> float | None:
    """A number of the evidence, where NaN and infinity are strings."""
    return None if value is None else float(value)


def short(value: float | str | None) -> str:
    value = number(value)
    return "-" if value is None else f"{value:.4g}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def steps_in(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    if found := STEP.search(line):
        metrics = {}
        for key, value in METRIC.findall(found[2]):
            try:
                metrics[key] = float(value)
            except ValueError:
                continue
        yield int(found[1]), metrics


def step_line(step: int, metrics: dict[str, float]) -> str:
    parts = [f"step {step}"]
    for key, name in (
        ("critic/score/mean", "reward"),
        ("actor/grad_norm", "gradient norm"),
        ("actor/gradloc/token_norm_max", "largest token norm"),
    ):
        if key in metrics:
            parts.append(f"{name} {metrics[key]:.4g}")
    if metrics.get("actor/gradloc/triggered"):
        culprits, passes = (metrics.get(f"actor/gradloc/{key}", 0) for key in ("culprits", "passes"))
        parts.append(f"SPIKE: {plural(int(culprits), 'culprit')} in {plural(int(passes), 'pass', 'es')}")
    if "timing_s/step" in metrics:
        parts.append(f"{metrics['timing_s/step']:.0f} s")
    return "  ".join(parts)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def follow(log: Path, pid: int) -> None:
    start = time.monotonic()
    told = set()
    with open(log, errors="replace") as file, console.status("starting Ray") as status:
        while True:
            ended = not alive(pid)
            while line := file.readline():
                for step, metrics in steps_in(line):
                    console.print(step_line(step, metrics))
                for mark, message in MILESTONES.items():
                    if mark in line and mark not in told:
                        told.add(mark)
                        console.print(f"{message} ({time.monotonic() - start:.0f} s)")
            if ended:
                return
            status.update(f"{time.monotonic() - start:.0f} s")
            time.sleep(0.5)


def read_events(file: Path) -> list[dict]:
    events = []
    for line in file.read_text().splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            console.print(f"{file} has a line that is not JSON; a run that was cut off may leave one.")
            continue
        if "note" not in event:  # a note says what was left out
            events.append(event)
    return events


def in_context(culprit: dict) -> Text:
    """The text around the culprit, which the evidence marks by «»."""
    context = culprit.get("context") or culprit.get("token") or f"token {culprit.get('token_id')}"
    text = Text(context.replace("\n", "\\n"))
    text.highlight_regex("«.*»", "bold red")
    return text


def severity(row: tuple[dict, dict]) -> float:
    norm = number(row[1].get("grad_norm"))
    return math.inf if norm is None or math.isnan(norm) else norm


def culprit_table(rows: list[tuple[dict, dict]]) -> Table:
    table = Table(title="Tokens behind the spikes")
    for name in ("step", "rank"):
        table.add_column(name, justify="right")
    table.add_column("token in its context", overflow="fold")
    for name in ("gradient norm", "threshold", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("source")
    for event, culprit in rows:
        table.add_row(
            str(event.get("global_step")),
            str(culprit.get("rank")),
            in_context(culprit),
            short(culprit.get("grad_norm")),
            short(culprit.get("threshold")),
            short(culprit.get("ratio")),
            culprit.get("source") or "-",
        )
    return table


def report(dump_dir: Path, log: Path | None) -> None:
    steps = 0
    largest: dict[int, float] = {}
    if log is not None and log.exists():
        for line in log.read_text(errors="replace").splitlines():
            for step, metrics in steps_in(line):
                steps += 1
                if "actor/gradloc/token_norm_max" in metrics:
                    largest[step] = metrics["actor/gradloc/token_norm_max"]
    file = dump_dir / "spikes.jsonl"
    events = read_events(file) if file.exists() else []
    if not events:
        if largest:
            step = max(largest, key=largest.__getitem__)
            console.print(f"No spike in {plural(steps, 'step')}: no micro-batch was over its threshold.")
            console.print(f"The largest token norm was {largest[step]:.4g}, in step {step}: set the threshold from it.")
        elif log is not None:
            console.print(f"No evidence: {plural(steps, 'step')} completed, and none with GradLoc's metrics.")
        else:
            console.print(f"No evidence: there is no {file}", soft_wrap=True)
        return

    rows = [(event, culprit) for event in events for culprit in event.get("culprits", [])]
    shown = sorted(rows, key=severity, reverse=True)[:MOST_ROWS]
    shown.sort(key=lambda row: row[0].get("global_step") or 0)
    console.print(culprit_table(shown))
    if len(shown) < len(rows):
        console.print(f"The {len(shown)} largest of {len(rows)} culprits are shown.")
    cut_short = sum(not event.get("complete", True) for event in events)
    if cut_short:
        console.print(f"In {cut_short} of the events the search ran out of passes: there may be more culprits.")
    counts = f"{plural(len(events), 'event')}, {plural(len(rows), 'culprit')}"
    console.print(f"{counts}. The evidence: {file}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    following = commands.add_parser("follow")
    following.add_argument("log", type=Path)
    following.add_argument("pid", type=int)
    reporting = commands.add_parser("report")
    reporting.add_argument("dump_dir", type=Path)
    reporting.add_argument("log", type=Path, nargs="?")
    args = parser.parse_args()
    if args.command == "follow":
        follow(args.log, args.pid)
    else:
        report(args.dump_dir, args.log)


if __name__ == "__main__":
    main()
