"""What a spike leaves, by what is done against it: GRPO on sums with a tiny model, spikes injected at known steps.

A Llama of three layers learns two-digit sums from examples until a third of its sampled answers are right. Then verl's
patched actor continues training: sampled answers, GRPO advantages, PPO's clipped loss, two mini-batches a step, AdamW.

The rows differ in what is applied between the gradient and the optimizer:

- none: nothing; global: verl's grad_clip alone, at five times the usual norm, as in runs whose norms are well under it;
  tight: at half the usual norm, so that it acts in nearly every step. All others have the loose one after theirs.
- LayerClip: with its defaults. TokenClip: drop at 4 times the usual signal; both: TokenClip, then LayerClip. "1%": with
  max_share=0.01 instead of the default 0.1: one token here, where a mini-batch has about 170.
- drop, skip: GradLoc's spike_action, at three times the usual token norm, with 64 passes at most.

The usual norms are medians over the first 10 steps of a run without spikes. Spikes come in step 20 and in each of
steps 35 to 37, in the first mini-batch; their kinds are in grpo_run.py, at `Spike`.

Each row and seed has one run without spikes, and two runs with spikes of each kind: one that samples its own answers,
and one that is replayed: it trains on the samples of the run without spikes. A changed sample changes all later ones,
so that two sampled runs are soon far apart, whatever the spike was; replayed runs differ by the spike alone.

Reward is the probability of the right answer, averaged over 128 sums that are not trained on. The figures, as mean
(standard deviation) over seeds:

- distance: between the final parameters of the replayed run and those of the run without spikes, divided by the
  distance that the latter moved; "floor": by a factor of 1.1 for one layer instead of a spike, under global;
- lost: the reward of the run without spikes, less that of the sampled run with spikes, averaged over the steps from the
  first spike on;
- step length: of the run without spikes, averaged over its optimizer steps, as a share of global's of the same seed;
- cut: the share of layers that LayerClip cuts in the run without spikes;
- signals: how many token signals TokenClip cuts in a run without spikes, and with spikes of each kind.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/stability.py --results build/stability.json --jobs 4

Finished runs are kept in the results and not repeated, so rows can be added later. One seed of one row takes half a
minute on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from grpo_run import TIGHT, Run, Samples, Settings, Usual, Variant, measure_usual
from sums_task import learn_from_examples
from torch import Tensor

KINDS = ("layer", "token", "sequence", "blow")
VARIANTS = [
    Variant("none", "none"),
    Variant("global"),
    Variant("tight", clip=TIGHT),
    Variant("LayerClip", "LayerClip"),
    Variant("TokenClip", token_clip=0.1),
    Variant("TokenClip 1%", token_clip=0.01),
    Variant("both", "LayerClip", token_clip=0.1),
    Variant("both 1%", "LayerClip", token_clip=0.01),
    Variant("drop", action="drop"),
    Variant("skip", action="skip"),
]
FULL = Settings()
QUICK = Settings(steps=9, events=((7, 7), (8, 9)), calibration=2, skill=0.06, prompts=6, answers=8, warmup=6)


def run_variant(
    settings: Settings, weights: dict[str, Tensor], seed: int, usual: Usual, variant: Variant
) -> dict[str, Any]:
    """All runs of one row and seed: "no", and by each kind the sampled and the replayed run."""

    def run(kind: str, samples: list[Samples] | None = None) -> Run:
        new = Run(settings, weights, variant, seed, usual)
        for step in range(1, settings.steps + 1):
            now = kind if settings.spikes_in(step) else "no"
            new.step(now, None if samples is None else samples[step - 1])
        return new

    start = Run(settings, weights, variant, seed, usual).parameters()
    clean = run("no")
    end = clean.parameters()

    def distance(other: Run) -> float:
        return ((other.parameters() - end).norm() / (end - start).norm()).item()

    def figures(new: Run) -> dict[str, Any]:
        token_clip = {name: new.logged(name) for name in new.metrics[-1] if name.startswith("actor/token_clip/")}
        return {
            "rewards": new.rewards,
            "moved": new.moved,
            "clipped": new.clipped,
            "events": new.logged("actor/gradloc/triggered"),
            "passes": new.logged("actor/gradloc/passes"),
            "token_clip": token_clip,
        }

    found: dict[str, Any] = {"no": figures(clean)}
    for kind in (*KINDS, "floor") if variant.name == "global" else KINDS:
        found[kind] = figures(run(kind)) | {"distance": distance(run(kind, clean.samples))}
    return found


def spread(values: list[float], digits: int, percent: bool = False) -> str:
    """Mean and standard deviation, without a sign before a rounded zero."""

    def text(value: float) -> str:
        return f"{value:.{digits}%}" if percent else f"{round(value, digits) + 0.0:.{digits}f}"

    return text(mean(values)) + (f" ({text(stdev(values))})" if len(values) > 1 else "")


def lost(settings: Settings, runs: dict[str, Any], kind: str) -> float:
    """The mean reward that a kind of spike costs. `rewards[i]` is the reward after step i."""
    first = settings.events[0][0]
    return mean(runs["no"]["rewards"][first:]) - mean(runs[kind]["rewards"][first:])


def signals_cut(run: dict[str, Any]) -> float:
    return sum(run["token_clip"].get("actor/token_clip/cut", [0]))


def key_of(seed: int, variant: Variant) -> str:
    return f"{seed} | {variant.name}"


def run_all(path: Path, settings: Settings, seeds: list[int], variants: list[Variant], jobs: int) -> dict[str, Any]:
    """The runs of each seed and row, by `key_of`: those that the file has, and the others, which it gets.

    The seeds' start weights and usual norms are kept beside the file.
    """
    size = json.loads(json.dumps(dataclasses.asdict(settings)))
    kept = json.loads(path.read_text()) if path.exists() else {"settings": size, "runs": {}}
    if kept["settings"] != size:
        sys.exit(f"{path} holds runs of other settings: give another file, or remove it")
    runs = kept["runs"]
    missing = [(seed, variant) for seed in seeds for variant in variants if key_of(seed, variant) not in runs]
    starts = path.with_suffix(".starts")
    starts.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker) as pool:
        for learned in [pool.submit(_learn, starts, seed, settings) for seed in {seed for seed, _ in missing}]:
            learned.result()
        futures = {pool.submit(_work, starts, settings, *task): key_of(*task) for task in missing}
        for done, future in enumerate(as_completed(futures), 1):
            runs[futures[future]] = future.result()
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(kept))
            unfinished.replace(path)
            print(f"{done} of {len(futures)}: {futures[future]}", file=sys.stderr, flush=True)
    return runs


def _start_worker() -> None:
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _learn(folder: Path, seed: int, settings: Settings) -> None:
    path = folder / f"{seed}.pt"
    if not path.exists():
        weights = learn_from_examples(seed, settings.skill)
        usual = measure_usual(settings, weights, seed)
        torch.save((weights, dataclasses.asdict(usual)), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


def _work(folder: Path, settings: Settings, seed: int, variant: Variant) -> dict[str, Any]:
    weights, usual = torch.load(folder / f"{seed}.pt", weights_only=True)
    return run_variant(settings, weights, seed, Usual(**usual), variant)


def print_tables(settings: Settings, kept: dict[str, Any], seeds: list[int], variants: list[Variant]) -> None:
    """Prints the figures over the seeds, as tables in Markdown."""
    runs = {variant.name: [kept[key_of(seed, variant)] for seed in seeds] for variant in variants}
    keys = [key_of(seed, Variant("global")) for seed in seeds]
    # Empty where global has not been run.
    reference: list[dict[str, Any]] = [kept[key] for key in keys] if set(keys) <= set(kept) else []

    def table(columns: list[str], cells: Callable[[list[dict[str, Any]]], list[str]]) -> None:
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for name, of_seeds in runs.items():
            print(f"| {name} | {' | '.join(cells(of_seeds))} |")
        print()

    print(f"Seeds: {len(seeds)}. Mean (standard deviation).\n")

    def step_length(of_seeds: list[dict[str, Any]]) -> str:
        if not reference:
            return "?"
        pairs = zip(of_seeds, reference, strict=True)
        return f"{mean(mean(run['no']['moved']) / mean(base['no']['moved']) for run, base in pairs):.0%}"

    def both_figures(of_seeds: list[dict[str, Any]], kind: str) -> str:
        costs = [lost(settings, run, kind) for run in of_seeds]
        deviation = f"±{stdev(costs):.3f}" if len(costs) > 1 else ""
        return f"{mean(run[kind]['distance'] for run in of_seeds):.2f} · {round(mean(costs), 3) + 0.0:+.3f}{deviation}"

    table(
        ["distance · lost", "step length", *KINDS],
        lambda of_seeds: [step_length(of_seeds), *(both_figures(of_seeds, kind) for kind in KINDS)],
    )

    def ordinary(of_seeds: list[dict[str, Any]]) -> list[str]:
        gains = [
            mean(run["no"]["rewards"]) - mean(base["no"]["rewards"])
            for run, base in zip(of_seeds, reference, strict=bool(reference))
        ]
        shares = [mean(run["no"]["clipped"]) for run in of_seeds if run["no"]["clipped"]]
        return [
            step_length(of_seeds),
            spread(gains, 4) if gains else "?",
            spread(shares, 2, percent=True) if shares else "–",
            f"{mean(sum(run['no']['events']) for run in of_seeds):.1f}",
            " · ".join(f"{mean(sum(run[kind]['passes']) for run in of_seeds):.0f}" for kind in KINDS),
            " · ".join(f"{mean(signals_cut(run[kind]) for run in of_seeds):.1f}" for kind in ("no", *KINDS)),
        ]

    columns = ["no spikes", "step length", "mean reward less global's", "cut", "GradLoc's events"]
    table([*columns, "passes by kind", "signals"], ordinary)
    if reference:
        before = mean(base["no"]["rewards"][settings.events[0][0] - 1] for base in reference)
        floor = [base["floor"] for base in reference]
        print(f"Reward before the first spike (global): {before:.3f}.")
        print(f"Distance of a factor of 1.1, which is no spike: {spread([run['distance'] for run in floor], 3)}.")


def main() -> None:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON file of the runs; read first if it exists")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds (default: 0 1 2 3 4)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on one core (default: 1)")
    parser.add_argument("--rows", nargs="+", metavar="ROW", default=names, help="rows of the table (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in names]:
        sys.exit(f"unknown rows {unknown}: choose from {names}")
    settings = QUICK if arguments.quick else FULL
    variants = [variant for variant in VARIANTS if variant.name in arguments.rows]
    runs = run_all(arguments.results, settings, arguments.seeds, variants, arguments.jobs)
    print_tables(settings, runs, arguments.seeds, variants)


if __name__ == "__main__":
    main()
