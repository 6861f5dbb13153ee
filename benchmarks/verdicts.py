# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often each rule holds for ordinary tokens of natural runs, and which verdict spikes of such runs get.

The runs are those of cause_remedy.py: a Llama of three layers, GRPO on sums with verl's patched actor, GradLoc with τ
at three times the usual token norm. Nothing is planted (40 steps):

- natural: rollout and training are one model in one precision, and a step has one epoch;
- bf16 rollout: the rollout's log-probs are those of the model in bfloat16;
- 4 epochs: a step has four PPO epochs, so that the policy moves away from the old one;
- spiking: τ is the usual token norm, so that the largest ordinary gradients are spikes; also with 4 epochs.

The first table is the null distribution: a cell is the share of all ordinary tokens for which the rule holds, then the
share in the mini-batch where it is largest, and in brackets the number of mini-batches in which it is a quarter or
more, where a rule is no cause. The second one has the verdicts of spikes and, for each rule that holds for a culprit,
the share of culprits and of the ordinary tokens beside them. What is named there is no fault: `advantage` and
`unlikely` say which tokens have the largest gradients, every other name is a false one. Below it are the quantiles of
what `layer` and `unlikely` look at.

Verdicts on planted causes: blind.py.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/verdicts.py --results build/verdicts.json --jobs 4

Finished runs are kept in the results and not repeated. How often rules hold for a language model's tokens: causes.py;
what has no ordinary tokens in this task: simulated_nulls.py; checks that need no spike: run_warnings.py.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections import Counter
from typing import Any

import torch
from grpo_run import PROMPT, TOKEN_THRESHOLD, Run, Samples, Settings, Usual, Variant
from planted_causes import Cause, Tensors, prepare, take_step
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


# By name, what is done in every step, the PPO epochs, and τ in usual token norms.
NATURAL = {
    "natural": (Cause("natural"), 1, TOKEN_THRESHOLD),
    "bf16 rollout": (Cause("bf16 rollout", change=rollout_in_bf16), 1, TOKEN_THRESHOLD),
    "4 epochs": (Cause("4 epochs"), 4, TOKEN_THRESHOLD),
    "spiking": (Cause("spiking"), 1, 1.0),
    "spiking, 4 epochs": (Cause("spiking, 4 epochs"), 4, 1.0),
}


def measure(
    settings: Settings, weights: Tensors, seed: int, usual: Usual, what: tuple[Cause, int, float, int]
) -> list[dict[str, Any]]:
    """The mini-batches of a run, by `RuleShares`.

    Args:
        what (tuple): What is done in every step; the PPO epochs; τ in usual token norms; the number of steps.
    """
    cause, epochs, threshold, steps = what
    settings = dataclasses.replace(settings, epochs=epochs)
    usual = dataclasses.replace(usual, token_norm=usual.token_norm * threshold / TOKEN_THRESHOLD)
    run = Run(settings, weights, Variant("verdicts", "zscore", action="log"), seed, usual)
    shares = RuleShares(run.actor)
    for _ in range(steps):
        take_step(cause, run, prepare(cause, run, []))
    return shares.found


def print_verdicts(runs: dict[str, list[dict[str, Any]]]) -> None:
    """A row for each kind of run, with the mini-batches of its runs."""
    print("| runs | spikes, of mini-batches | verdicts | culprits · ordinary tokens |\n|---|---|---|---|")
    for name, found in runs.items():
        verdicts = Counter(one["verdict"] for one in found if one["verdict"])
        shares = culprit_shares(found)
        cells = [f"{rule} {percent(ours)} · {percent(beside)}" for rule, (ours, beside) in shares.items()]
        texts = [f"{cause} {count}" for cause, count in verdicts.most_common()]
        print(f"| {name} | {verdicts.total()} of {len(found)} | {', '.join(texts)} | {', '.join(cells)} |")
    print("\n| runs | figure of culprits | 50% | 90% | 99% | largest |\n|---|---|---|---|---|---|")
    for name, found in runs.items():
        spikes = [one for one in found if one["culprits"]]
        rare = [
            norm
            for one in spikes
            for norm, sources in zip(one["norms"], one["culprits"], strict=True)
            if "unlikely" in sources
        ]
        odds = [value for one in spikes for value in one["layer_odds"] or ()]
        for figure, values in (("norm of rare ones, in τ", rare), ("odds of the largest layer, in usual ones", odds)):
            if values:
                quantiles = torch.tensor(values).quantile(torch.tensor([0.5, 0.9, 0.99, 1.0])).tolist()
                print(f"| {name} | {figure} | {' | '.join(f'{value:.2g}' for value in quantiles)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser, NATURAL)
    settings, seeds = QUICK if arguments.quick else FULL, arguments.seeds
    steps = settings.events[0][0] if arguments.quick else NATURAL_STEPS
    rows = arguments.rows
    results = Results(arguments.results, dataclasses.asdict(settings))
    tasks = {key_of(seed, name): (seed, (*NATURAL[name], steps)) for name in rows for seed in seeds}
    run_all(results, settings, tasks, measure, arguments.jobs)
    found = {name: [one for seed in seeds for one in results.runs[key_of(seed, name)]] for name in rows}
    print(f"Seeds: {len(seeds)}.\n")
    print_null(found)
    print_verdicts(found)


if __name__ == "__main__":
    main()
