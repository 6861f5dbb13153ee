# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Does grad_norm_threshold=auto alarm at spikes only? A natural GRPO run of a real model, with faults planted in it.

The embedded profile's SmolLM2-135M (embedded/prepare.py) answers sums of two one-digit numbers ("Question: What is
4 - 1?\\nAnswer:") at temperature 1, at most 12 tokens. The reward is 1 if the last whole number in the answer is the
right one. Advantages are GRPO's over 8 answers to each of 4 sums. The 32 answers of a step are shuffled and cut into
mini-batches of 4 of one micro-batch each, and verl's patched actor trains on them: PPO's clipped loss against the
rollout's log-probs, token-mean, AdamW with a learning rate of 1e-6, grad_clip 1, one process, float32. GradLoc runs
with grad_norm_threshold=auto and spike_action=log: the optimizer steps after every mini-batch, with a fault or not, and
norms of faults enter the window of the threshold like all others. A search has 6 passes at most, as only the alarm
matters here.

Faults are planted in single mini-batches after the warm-up, spaced evenly. Where a mini-batch has no place for a fault
(all its advantages are zero, say), the next one is taken:

- sequence ×10, ×100: the advantages of one answer are multiplied; ×100 is a reward of 100 instead of 1;
- token ×100, ×1000: the advantage of one token is multiplied, of those with a probability under 0.5;
- end: behind each answer that was cut off at the longest length, an end token that was not sampled;
- bit: the highest exponent bit of one random weight of a random layer is flipped, and after the update put back;
- nan: the advantage of one token is NaN;
- stale: the rollout's log-probs are those of the weights of three steps before;
- shifted: the rollout's log-probs are those of the positions before.

How it is judged (stated before the first run):

- A mini-batch without a fault is checked if it comes after the warm-up and its norm is not zero. An alarm there is a
  false alarm, also where an earlier fault may have caused it. The bound of their rate is the upper end of its one-sided
  95% interval (Clopper-Pearson).
- A fault is a spike if its largest token-equivalent norm is not finite, or is over the largest norm of the mini-batches
  without a fault among the 256 before it. A spike is caught if it alarmed, otherwise missed. A fault that is not a
  spike has no effect that one could see among ordinary mini-batches; it is listed with its norm.

The replay passes the recorded norms through the rule again, without a model: in other orders (the mini-batches without
a fault are shuffled, with 20 seeds, or reversed), with other windows and warm-ups, and as the largest of k mini-batches
in a row, as in a run with k times as many micro-batches.

The patched verl must be importable; after `bash tests/run.sh`:

    build/venv/bin/python embedded/prepare.py build/embedded
    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/auto_threshold.py --prepared build/embedded \\
        --folder build/auto_threshold --json build/auto_threshold.json

On one free core, 800 mini-batches take about 30 minutes. The run can be stopped and goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from auto_threshold_replay import Replayed, in_place, norms_of, replay, replays, upper_bound
from auto_threshold_run import Run, Settings
from verl.utils.gradloc.auto_threshold import WARMUP

# Steps between checkpoints, which take 1.6 GB each.
CHECKPOINT_STEPS = 20


def train(folder: Path, prepared: Path, settings: Settings, minutes: float) -> None:
    """Runs until the end, or for some minutes."""
    run = Run(folder, prepared, settings)
    stop = time.monotonic() + 60 * minutes
    while run.step < settings.steps and time.monotonic() < stop:
        started = time.monotonic()
        records = run.train_step()
        if run.step % CHECKPOINT_STEPS == 0:
            run.save()
        print(
            f"step {run.step}: reward {mean(record['reward'] for record in records):.2f}, "
            f"{sum(record['alarm'] for record in records)} alarms, {time.monotonic() - started:.0f} s",
            file=sys.stderr,
        )
    run.save()


def summary(records: list[dict[str, Any]], found: Replayed) -> dict[str, Any]:
    """The figures of the run.

    Args:
        records (list): Of all mini-batches.
        found (Replayed): The recorded alarms.
    """
    ordinary = [record["norm"] for record in records if record["fault"] is None and record["norm"] != 0]
    finite = [norm for norm in ordinary if not isinstance(norm, str)]
    part = max(1, len(finite) // 5)
    # Margins of the checked mini-batches that have a threshold.
    margins = [
        record["norm"] / record["threshold"]
        for record in records
        if record["fault"] is None and record["threshold"] and not isinstance(record["norm"], str)
    ]
    rewards = [record["reward"] for record in records]
    fifth = max(1, len(rewards) // 5)
    return {
        "steps": len({record["step"] for record in records}),
        "mini_batches": len(records),
        "zero_norm": sum(record["norm"] == 0 for record in records),
        "checked": found.checked,
        "false_alarms": found.false_alarms,
        "rate_bound": upper_bound(found.false_alarms, found.checked),
        "largest_margin": max(margins, default=None),
        "reward_first_fifth": mean(rewards[:fifth]),
        "reward_last_fifth": mean(rewards[-fifth:]),
        "median_norm_first_fifth": median(finite[:part]) if finite else None,
        "median_norm_last_fifth": median(finite[-part:]) if finite else None,
        "faults": found.faults,
        "spikes": found.spikes,
        "caught": found.caught,
        "seconds": sum(record["seconds"] + record.get("rollout_seconds", 0.0) for record in records),
    }


def fault_list(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each fault with its verdict: "caught", "missed", or "no spike"."""
    faults = []
    for batch, record in zip(in_place(norms_of(records)), records, strict=True):
        if record["fault"] is None:
            continue
        largest = batch.largest_ordinary
        norm = float(record["norm"])
        faults.append(
            {
                **record["fault"],
                "number": record["number"],
                "norm": record["norm"],
                "threshold": record["threshold"],
                "over_threshold": norm / record["threshold"] if record["threshold"] else None,
                "over_largest_ordinary": norm / largest if largest else None,
                "verdict": ("caught" if record["alarm"] else "missed") if batch.is_spike else "no spike",
                "alarm": record["alarm"],
                "diagnosis": record["diagnosis"],
                "sources": record["sources"],
            }
        )
    return faults


def number(value: float | None) -> str:
    """Three digits, or what is not finite."""
    return "–" if value is None else "∞" if not math.isfinite(value) else f"{value:.3g}"


def print_tables(figures: dict[str, Any], faults: list[dict[str, Any]], replayed: dict[str, Replayed]) -> None:
    """Prints everything in Markdown."""
    print("| figure | value |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {number(value)} |" if isinstance(value, float) else f"| {name} | {value} |")
    print("\n| fault | mini-batch | what | norm | over τ | over the largest ordinary | verdict | diagnosis | sources |")
    print("|---|---|---|---|---|---|---|---|---|")
    for fault in sorted(faults, key=lambda fault: (fault["name"], fault["number"])):
        cells = [fault["name"], str(fault["number"]), fault["what"]]
        cells += [number(float(fault["norm"])), number(fault["over_threshold"])]
        cells += [number(fault["over_largest_ordinary"]), fault["verdict"]]
        cells += [fault["diagnosis"] or "–", ", ".join(fault["sources"]) or "–"]
        print(f"| {' | '.join(cells)} |")
    print("\n| replay | checked | false alarms | in 1,000 | spikes caught |\n|---|---|---|---|---|")
    for name, row in replayed.items():
        rate = f"{1000 * row.false_alarms / row.checked:.2f}" if row.checked else "–"
        print(f"| {name} | {row.checked} | {row.false_alarms} | {rate} | {row.caught} of {row.spikes} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the run's records and its checkpoint")
    parser.add_argument("--prepared", type=Path, help="what embedded/prepare.py made; without it, only the report")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long (default: at the end)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    for field in dataclasses.fields(Settings):
        kind = type(field.default)
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=kind, default=field.default, help=f"(default: {field.default})")
    arguments = parser.parse_args()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)

    size_file = arguments.folder / "settings.json"
    if arguments.prepared is not None:
        if settings.first_fault <= WARMUP:
            parser.error(f"--first-fault must be over the warm-up of {WARMUP} mini-batches, got {settings.first_fault}")
        arguments.folder.mkdir(parents=True, exist_ok=True)
        size = dataclasses.asdict(settings)
        if size_file.exists() and json.loads(size_file.read_text()) != size:
            sys.exit(f"{arguments.folder} holds a run of other settings: give another folder, or remove it")
        size_file.write_text(json.dumps(size))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        train(arguments.folder, arguments.prepared, settings, arguments.minutes)
        dist.destroy_process_group()

    records_file = arguments.folder / "records.jsonl"
    records = [json.loads(line) for line in records_file.open()] if records_file.exists() else []
    if not records:
        sys.exit(f"{arguments.folder} holds no step of a run: give --prepared, and more --minutes")
    norms = norms_of(records)
    figures = summary(records, replay(norms, [record["alarm"] for record in records]))
    faults, replayed = fault_list(records), replays(norms)
    print_tables(figures, faults, replayed)
    if arguments.json is not None:
        found = {
            "settings": json.loads(size_file.read_text()),
            "run": figures,
            "faults": faults,
            "replays": {name: vars(row) for name, row in replayed.items()},
        }
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
