"""Collapses without any injected spike, over a grid of learning rates, by what is done against them.

The model, the task and the actor are those of stability.py. Two regimes, each with four PPO epochs a step (eight
optimizer steps on the same samples) and without PPO's ratio clip: "four epochs", and "false positives", in which the
verifier also takes every tenth wrong answer for right.

The rows differ in what is applied between the gradient and the optimizer, as in stability.py: none, global, tight,
zscore, TokenClip, both, and the rules of four papers. "ratio clip" is global with PPO's ratio clip in the loss (0.2).

A run has 30 steps. Its reward is the mean over the last five; a run under half of the reward that it started with has
collapsed. The tables have, as means over seeds:

- for each learning rate: reward (standard deviation) · step length · collapsed seeds. The step length is the mean over
  the run's optimizer steps, in thousandths: rows are comparable at equal step length only;
- best: the best reward over the grid, and its learning rate;
- survives: the largest learning rate at which most seeds do not collapse.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/collapse.py --results build/collapse.json --jobs 4

Finished runs are kept in the results and not repeated, so rows and learning rates can be added later.
"""

from __future__ import annotations

import argparse
import dataclasses
from statistics import mean
from typing import Any

from grpo_run import TIGHT, Run, Settings, Usual, Variant
from seed_jobs import Results, arguments_of, key_of, run_all
from stability import QUICK, spread
from torch import Tensor

REGIMES = {"four epochs": 0.0, "false positives": 0.1}
RATES = (5e-5, 1e-4, 2e-4, 3e-4)
VARIANTS = [
    Variant("none", "none", ratio_clip=False),
    Variant("global", ratio_clip=False),
    Variant("ratio clip"),
    Variant("tight", clip=TIGHT, ratio_clip=False),
    Variant("zscore", "zscore", ratio_clip=False),
    Variant("TokenClip", token_clip=0.1, ratio_clip=False),
    Variant("both", "zscore", token_clip=0.1, ratio_clip=False),
    *(Variant(rule, rule, ratio_clip=False) for rule in ("adagc", "zclip", "spam", "aggc")),
]
FULL = Settings(steps=30, events=(), epochs=4)
LAST = 5  # steps that the reward is the mean of


def run_at_rate(
    settings: Settings, weights: dict[str, Tensor], seed: int, usual: Usual, what: tuple[Variant, str, float]
) -> dict[str, Any]:
    """One run: its rewards, and the length of each optimizer step."""
    variant, regime, rate = what
    settings = dataclasses.replace(settings, learning_rate=rate, false_positives=REGIMES[regime])
    run = Run(settings, weights, variant, seed, usual)
    for _ in range(settings.steps):
        run.step("no")
    return {"rewards": run.rewards, "moved": run.moved, "clipped": run.clipped}


def collapsed(run: dict[str, Any]) -> bool:
    return mean(run["rewards"][-LAST:]) < run["rewards"][0] / 2


def row_of(of_rates: dict[float, list[dict[str, Any]]]) -> list[str]:
    """A row's cells.

    Args:
        of_rates (dict): By learning rate, the runs of all seeds.
    """
    cells, rewards = [], {}
    for rate, runs in of_rates.items():
        values = [mean(run["rewards"][-LAST:]) for run in runs]
        rewards[rate] = mean(values)
        step = 1000 * mean(mean(run["moved"]) for run in runs)
        cells.append(f"{spread(values, 3)} · {step:.1f} · {sum(map(collapsed, runs))}")
    best = max(rewards, key=lambda rate: rewards[rate])
    surviving = [rate for rate, runs in of_rates.items() if sum(map(collapsed, runs)) < len(runs) / 2]
    return [*cells, f"{rewards[best]:.3f} ({best:g})", f"{max(surviving):g}" if surviving else "none"]


def print_tables(results: Results, seeds: list[int], variants: list[Variant], rates: list[float]) -> None:
    """Prints a table for each regime, in Markdown."""
    print(f"Seeds: {len(seeds)}. Reward (standard deviation) · step length in thousandths · collapsed seeds.\n")
    for regime in REGIMES:
        columns = [regime, *(f"{rate:g}" for rate in rates), "best", "survives"]
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for variant in variants:
            of_rates = {
                rate: [results.runs[key_of(seed, regime, variant.name, rate)] for seed in seeds] for rate in rates
            }
            print(f"| {variant.name} | {' | '.join(row_of(of_rates))} |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=FULL.steps, help="GRPO steps (default: 30)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help=f"learning rates (default: {RATES})"
    )
    arguments = arguments_of(parser, [variant.name for variant in VARIANTS])
    settings = dataclasses.replace(FULL, steps=arguments.steps)
    if arguments.quick:
        settings = dataclasses.replace(QUICK, steps=6, events=(), epochs=4)
    variants = [variant for variant in VARIANTS if variant.name in arguments.rows]
    results = Results(arguments.results, dataclasses.asdict(settings))
    tasks = {
        key_of(seed, regime, variant.name, rate): (seed, (variant, regime, rate))
        for seed in arguments.seeds
        for regime in REGIMES
        for variant in variants
        for rate in arguments.rates
    }
    run_all(results, settings, tasks, run_at_rate, arguments.jobs)
    print_tables(results, arguments.seeds, variants, arguments.rates)


if __name__ == "__main__":
    main()
