"""What a spike leaves, by what is done against it: GRPO on sums with a tiny model, spikes injected at known steps.

A Llama of three layers learns two-digit sums from examples until a third of its sampled answers are right. Then verl's
patched actor continues training: sampled answers, GRPO advantages, PPO's clipped loss, two mini-batches a step, AdamW.

The rows differ in what is applied between the gradient and the optimizer:

- none: nothing; global: verl's grad_clip alone, at five times the usual norm, as in runs whose norms are well under it;
  tight: at half the usual norm, so that it acts in nearly every step. All others have the loose one after theirs.
- zscore bound, zscore: LayerClip with target=bound and with its default, reciprocal.
- TokenClip: drop at 4 times the usual signal; both: TokenClip, then zscore. "1%": with max_share=0.01 instead of the
  default 0.1: one token here, where a mini-batch has about 170.
- drop, skip: GradLoc's spike_action, at three times the usual token norm, with 64 passes at most.
- adagc, zclip, spam, aggc: the rules of four papers (rival_clips.py). "aggc limited" has the limits to a step's factor
  that are in its authors' code and not in its formulas.

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
- end: the reward after the last step;
- step length: of the run without spikes, averaged over its optimizer steps, as a share of global's of the same seed;
- cut: the share of layers (adagc: tensors; aggc: groups; spam: elements; zclip: steps) cut in the run without spikes,
  grad_clip apart; of "both", zscore's;
- signals: how many token signals TokenClip cuts in a run without spikes, and with spikes of each kind.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/stability.py --results build/stability.json --jobs 4

Finished runs are kept in the results and not repeated, so rows can be added later. One seed of one row takes half a
minute on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from grpo_run import RIVALS, TIGHT, Run, Samples, Settings, Usual, Variant
from seed_jobs import Results, arguments_of, key_of, run_all
from torch import Tensor

KINDS = ("layer", "token", "sequence", "blow")
VARIANTS = [
    Variant("none", "none"),
    Variant("global"),
    Variant("tight", clip=TIGHT),
    Variant("zscore bound", "zscore", target="bound"),
    Variant("zscore", "zscore"),
    Variant("TokenClip", token_clip=0.1),
    Variant("TokenClip 1%", token_clip=0.01),
    Variant("both", "zscore", token_clip=0.1),
    Variant("both 1%", "zscore", token_clip=0.01),
    Variant("drop", action="drop"),
    Variant("skip", action="skip"),
    *(Variant(rule, rule) for rule in RIVALS),
]
FULL = Settings()
QUICK = Settings(steps=9, events=((7, 7), (8, 9)), calibration=2, skill=0.06, prompts=6, answers=8, warmup=6, reset=8)


def run_variant(
    settings: Settings, weights: dict[str, Tensor], seed: int, usual: Usual, variant: Variant
) -> dict[str, Any]:
    """All runs of one row and seed: "no", and by each kind the sampled and the replayed run."""
    started = time.perf_counter()

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
        sampled = run(kind)
        found[kind] = figures(sampled) | {
            "distance": distance(run(kind, clean.samples)),
            "sampled_distance": distance(sampled),
        }
    if variant.name == "global":
        other = dataclasses.replace(variant, other_samples=True)
        beside = Run(settings, weights, other, seed, usual)
        for _ in range(settings.steps):
            beside.step("no")
        found["other samples"] = figures(beside) | {"sampled_distance": distance(beside)}
    return found | {"seconds": time.perf_counter() - started}


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


def print_tables(settings: Settings, results: Results, seeds: list[int], variants: list[Variant]) -> None:
    """Prints the figures over the seeds, as tables in Markdown."""
    runs = {variant.name: [results.runs[key_of(seed, variant.name)] for seed in seeds] for variant in variants}
    keys = [key_of(seed, "global") for seed in seeds]
    # Empty where global has not been run.
    reference: list[dict[str, Any]] = [results.runs[key] for key in keys] if set(keys) <= set(results.runs) else []

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
    table(
        ["distance", "step length", *KINDS],
        lambda of_seeds: [
            step_length(of_seeds),
            *(spread([run[kind]["distance"] for run in of_seeds], 2) for kind in KINDS),
        ],
    )
    table(
        ["end", "step length", "no spikes", *KINDS],
        lambda of_seeds: [
            step_length(of_seeds),
            *(spread([run[kind]["rewards"][-1] for run in of_seeds], 3) for kind in ("no", *KINDS)),
        ],
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

    columns = [
        "no spikes",
        "step length",
        "mean reward less global's",
        "cut",
        "GradLoc's events",
        "passes by kind",
        "signals",
    ]
    table(columns, ordinary)
    if reference:
        before = mean(base["no"]["rewards"][settings.events[0][0] - 1] for base in reference)
        floor = [base["floor"] for base in reference]
        print(f"Reward before the first spike (global): {before:.3f}.")
        print(f"Floor, by a factor of 1.1: replayed {spread([run['distance'] for run in floor], 3)}, ", end="")
        print(f"sampled {spread([run['sampled_distance'] for run in floor], 2)}.")
        others = [base["other samples"]["sampled_distance"] for base in reference]
        print(f"Two runs without spikes that draw other samples: {spread(others, 2)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="GRPO steps, at least 38 (default: 60)")
    parser.add_argument("--plot", type=Path, help="picture (PNG) of the reward curves; needs Chromium")
    arguments = arguments_of(parser, [variant.name for variant in VARIANTS])
    settings = QUICK if arguments.quick else FULL
    if arguments.steps is not None:
        if arguments.steps <= settings.events[-1][1]:
            parser.error(f"--steps must be over {settings.events[-1][1]}, the step of the last spike")
        settings = dataclasses.replace(settings, steps=arguments.steps)
    variants = [variant for variant in VARIANTS if variant.name in arguments.rows]
    results = Results(arguments.results, dataclasses.asdict(settings))
    tasks = {key_of(seed, variant.name): (seed, variant) for seed in arguments.seeds for variant in variants}
    run_all(results, settings, tasks, run_variant, arguments.jobs)
    print_tables(settings, results, arguments.seeds, variants)
    if arguments.plot:
        from stability_picture import draw

        draw(settings, results, arguments.seeds, variants, arguments.plot)


if __name__ == "__main__":
    main()
