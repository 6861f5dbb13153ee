"""What moves before a spike? The early-warning figures in the runs of stability.py, on one CPU core.

The runs are those of stability.py without a clip and with a global clip, with GradLoc watching (spike_action=log), and
with its spikes later: in step 60 and in each of steps 75 to 77 of 110, so that there are steps to take a range from.
A figure leaves its range as on the report's page (gradloc/report/before_spike.py). Three tables:

- planted: for each figure, in how many first steps of planted spikes (60, and 75 after the spike of 60) it had left its
  range in one of the 20 steps before, with the leads in steps; and in how many in the step itself;
- others: the same for the first step of every other spike: one with no spike in the 20 steps before it;
- ordinary steps: of the runs without spikes, in what share of the steps, and of all windows of 20 steps, a figure is
  out of its range.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/early_warning.py --seeds 2
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import stability
import torch
import torch.distributed as dist

from gradloc.evidence.writer import STEP_FIGURES, record_events, record_step
from gradloc.report.before_spike import FIGURES, STEPS_BEFORE, StepHistory

SETTINGS = dataclasses.replace(stability.FULL, steps=110, events=((60, 60), (75, 77)))
QUICK = dataclasses.replace(stability.QUICK, steps=26, events=((23, 23), (25, 25)))
VARIANTS = [stability.Variant(rule, watch=True) for rule in ("none", "global")]


@dataclasses.dataclass
class Recording:
    """A run's figures by step, and the steps with a spike."""

    kind: str
    steps: dict[int, dict[str, Any]]
    spikes: list[int]
    history: StepHistory = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.history = StepHistory(self.steps)

    def leads(self, step: int) -> dict[str, int | None]:
        """By figure, how many steps before this one it left its range."""
        before = self.history.before(step)
        return {} if before is None else {figure["name"]: figure["lead"] for figure in before["figures"]}


def record(run: stability.Run, settings: stability.Settings, kind: str, folder: Path | None) -> Recording:
    """Trains, and records every step; also as evidence, in a folder."""
    steps = {}
    for step in range(1, settings.steps + 1):
        run.step(kind if settings.spikes_in(step) else "no")
        figures = {name: run.metrics[-1].get(f"actor/gradloc/{name}") for name in STEP_FIGURES}
        steps[step] = figures
        if folder is not None and run.actor.gradloc is not None:
            record_step(str(folder), step, figures)
            record_events(str(folder), [{**event, "global_step": step} for event in run.actor.gradloc.events])
    return Recording(kind, steps, [step for step, figures in steps.items() if figures["triggered"]])


def print_leads(title: str, found: list[dict[str, int | None]]) -> None:
    """How many spikes each figure moved before, and how many it moved with."""
    print(f"\n| {title}: {len(found)} | moved before | leads in steps | only in its own step |\n|---|---|---|---|")
    for name in FIGURES:
        leads = [each[name] for each in found if each.get(name) is not None]
        early = sorted((lead for lead in leads if lead), reverse=True)
        if any(name in each for each in found):
            print(f"| `{name}` | {len(early)} | {', '.join(map(str, early)) or '–'} | {len(leads) - len(early)} |")


def print_tables(settings: stability.Settings, recordings: list[Recording]) -> None:
    planted = {first for first, _ in settings.events}
    spiked = [recording for recording in recordings if recording.kind != "no"]
    for first in sorted(planted):
        found = [recording.leads(first) for recording in spiked if first in recording.spikes]
        print_leads(f"planted in step {first}", found)
    others = []
    for recording in recordings:
        for step in recording.spikes:
            quiet = not any(step - STEPS_BEFORE <= other < step for other in recording.spikes)
            if quiet and (recording.kind == "no" or not settings.spikes_in(step)):
                others.append(recording.leads(step))
    print_leads("others", others)
    calm = [recording for recording in recordings if recording.kind == "no"]
    print("\n| ordinary steps | out of its range | windows in which it was |\n|---|---|---|")
    for name in FIGURES:
        leads = [
            recording.leads(step)[name]
            for recording in calm
            for step in range(2 * STEPS_BEFORE + 1, settings.steps + 1)
            if name in recording.leads(step)
        ]
        if leads:
            print(
                f"| `{name}` | {sum(lead == 0 for lead in leads) / len(leads):.1%} "
                f"| {sum(lead is not None for lead in leads) / len(leads):.1%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="seeds (default: 2)")
    parser.add_argument("--evidence", type=Path, help="folder for the runs' evidence, which the report can show")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else SETTINGS
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recordings = []
    for seed in range(arguments.seeds):
        weights = stability.learn_from_examples(seed, settings)
        usual = stability.measure_usual(settings, weights, seed)
        for variant in VARIANTS:
            for kind in stability.KINDS:
                started = time.perf_counter()
                folder = arguments.evidence and arguments.evidence / f"{seed}-{variant.rule}-{kind}"
                run = stability.Run(settings, weights, variant, seed, usual)
                recordings.append(record(run, settings, kind, folder))
                print(
                    f"seed {seed}, {variant.rule}, {kind}: spikes in steps {recordings[-1].spikes}, "
                    f"{time.perf_counter() - started:.0f} s",
                    file=sys.stderr,
                )
    dist.destroy_process_group()
    print_tables(settings, recordings)


if __name__ == "__main__":
    main()
