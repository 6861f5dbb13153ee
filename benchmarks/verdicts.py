# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often each rule holds for ordinary tokens of natural runs, and which verdict spikes with a planted cause get.

The runs are those of cause_remedy.py: a Llama of three layers, GRPO on sums with verl's patched actor, GradLoc with τ
at three times the usual token norm. Nothing is planted in natural runs (40 steps):

- natural: rollout and training are one model in one precision, and a step has one epoch;
- bf16 rollout: the rollout's log-probs are those of the model in bfloat16;
- 4 epochs: a step has four PPO epochs, so that the policy moves away from the old one.

The first table is the null distribution: a cell is the share of all ordinary tokens for which the rule holds, then the
share in the mini-batch where it is largest, and in brackets the number of mini-batches in which it is a quarter or
more, where a rule is no cause. The second one has what natural runs spike for: each name there is a false one.

In the third one, a cause of planted_causes.py comes after 19 ordinary steps, in the first mini-batch of a step. For
each rule that holds for a culprit it has the share of culprits, and of the ordinary tokens beside them, over all seeds.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/verdicts.py --results build/verdicts.json --jobs 4

Finished runs are kept in the results and not repeated. How often rules hold for a language model's tokens: causes.py.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections import Counter
from typing import Any

import torch
from grpo_run import PROMPT, Run, Samples, Settings, Usual, Variant
from planted_causes import CAUSES, Cause, Tensors, prepare, take_step
from rule_shares import RuleShares, culprit_shares, percent, print_null
from seed_jobs import Results, arguments_of, key_of, run_all
from stability import FULL, QUICK

NATURAL_STEPS = 40


@torch.no_grad()
def rollout_in_bf16(run: Run, samples: Samples, tensors: Tensors) -> None:
    """The rollout's log-probs are those of the model in bfloat16; its samples are not."""
    model: Any = copy.deepcopy(run.model)
    model.to(torch.bfloat16)
    logits = model(input_ids=tensors["input_ids"]).logits[:, PROMPT - 1 : -1].float()
    tensors["rollout_log_probs"] = logits.log_softmax(-1).gather(-1, samples.responses.unsqueeze(-1)).squeeze(-1)


# By name, what is done in every step, and the PPO epochs.
NATURAL = {
    "natural": (Cause("natural"), 1),
    "bf16 rollout": (Cause("bf16 rollout", change=rollout_in_bf16), 1),
    "4 epochs": (Cause("4 epochs"), 4),
}


def measure(
    settings: Settings, weights: Tensors, seed: int, usual: Usual, what: tuple[Cause, Cause | None, int, int]
) -> list[dict[str, Any]]:
    """The mini-batches of a run, by `RuleShares`; if a cause is planted, those of its step.

    Args:
        what (tuple): What is done in every step; what is planted after them; the number of steps; the PPO epochs.
    """
    ordinary, planted, steps, epochs = what
    settings = dataclasses.replace(settings, epochs=epochs)
    ratio_clip = planted is None or planted.ratio_clip
    run = Run(settings, weights, Variant("verdicts", "zscore", action="log", ratio_clip=ratio_clip), seed, usual)
    shares, past = RuleShares(run.actor), list[Tensors]()
    for _ in range(steps):
        past.append({name: value.clone() for name, value in run.model.state_dict().items()})
        take_step(ordinary, run, prepare(ordinary, run, past))
    if planted is not None:
        shares.found.clear()
        take_step(planted, run, prepare(planted, run, past))
    return shares.found


def print_verdicts(runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    """A row for each kind of run or cause, with its runs."""
    print("| runs | with a spike | verdicts of spikes | culprits · ordinary tokens |\n|---|---|---|---|")
    for name, of_seeds in runs.items():
        found = [one for of_seed in of_seeds for one in of_seed]
        spiked = sum(any(one["verdict"] for one in of_seed) for of_seed in of_seeds)
        verdicts = Counter(one["verdict"] for one in found if one["verdict"])
        shares = culprit_shares(found)
        cells = [f"{rule} {percent(ours)} · {percent(beside)}" for rule, (ours, beside) in shares.items()]
        texts = [f"{cause} {count}" for cause, count in verdicts.most_common()]
        print(f"| {name} | {spiked} of {len(of_seeds)} | {', '.join(texts)} | {', '.join(cells)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    arguments = arguments_of(parser)
    causes = {cause.name: cause for cause in CAUSES}
    if unknown := set(arguments.rows or ()) - {*NATURAL, *causes}:
        sys.exit(f"unknown rows {sorted(unknown)}: choose from {[*NATURAL, *causes]}")
    settings, seeds = QUICK if arguments.quick else FULL, arguments.seeds
    steps = settings.events[0][0] if arguments.quick else NATURAL_STEPS
    rows: dict[str, tuple[Cause, Cause | None, int, int]] = {
        **{name: (cause, None, steps, epochs) for name, (cause, epochs) in NATURAL.items()},
        **{name: (Cause("natural"), cause, settings.events[0][0] - 1, 1) for name, cause in causes.items()},
    }
    rows = {name: what for name, what in rows.items() if arguments.rows is None or name in arguments.rows}
    results = Results(arguments.results, dataclasses.asdict(settings))
    tasks = {key_of(seed, name): (seed, what) for name, what in rows.items() for seed in seeds}
    run_all(results, settings, tasks, measure, arguments.jobs)
    found = {name: [results.runs[key_of(seed, name)] for seed in seeds] for name in rows}
    natural = {name: runs for name, runs in found.items() if name in NATURAL}
    print(f"Seeds: {len(seeds)}.\n")
    if natural:
        print_null({name: [one for of_seed in runs for one in of_seed] for name, runs in natural.items()})
        print_verdicts(natural)
    if planted := {name: runs for name, runs in found.items() if name not in NATURAL}:
        print_verdicts(planted)


if __name__ == "__main__":
    main()
