# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The null distributions of rules that need turns, rewards or data sources: how often they hold by chance, simulated.

- misfire: mini-batches of 16 prompts with 4 or 8 responses, rewards of 0 and 1 with GRPO's advantages, two to five data
  sources. The culprits, in 3 to 12 responses, are drawn by chance, in proportion to the advantage, or nine times in ten
  from the wrong responses with the largest one.
- retokenized: responses of 2 to 6 turns of 4 to 60 tokens; each token's log-prob differs from the rollout's by over a
  nat with the same probability, 1% to 70%.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/simulated_nulls.py
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch
from verl.utils.gradloc.evidence.misfire import RewardedRow, misfire
from verl.utils.gradloc.evidence.token_facts import find_mismatch

WAYS = ("by chance", "by the advantage", "the largest wrong ones")
OFF = (0.01, 0.05, 0.2, 0.4, 0.5, 0.6, 0.7)


def mini_batch(numbers: random.Random) -> list[RewardedRow]:
    answers, sources = numbers.choice([4, 8]), numbers.randint(2, 5)
    rows = []
    for prompt in range(16):
        skill, source = numbers.random(), f"source {numbers.randrange(sources)}"
        rewards = [float(numbers.random() < skill) for _ in range(answers)]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        rows += [
            RewardedRow(f"prompt {prompt}", reward, source, abs(reward - mean) / (deviation + 1e-6))
            for reward in rewards
        ]
    return rows


def culprits(way: str, rows: list[RewardedRow], numbers: random.Random) -> list[int]:
    moving = [i for i, row in enumerate(rows) if row.advantage > 0]
    if not moving:
        return []
    largest = sorted((i for i in moving if not rows[i].reward), key=lambda i: -rows[i].advantage)[:12] or moving
    found: set[int] = set()
    for _ in range(numbers.randint(3, 12)):
        if way == "the largest wrong ones" and numbers.random() < 0.9:
            found.add(numbers.choice(largest))
        else:
            weights = [1.0 if way == "by chance" else rows[i].advantage for i in moving]
            found.add(numbers.choices(moving, weights)[0])
    return numbers.sample(sorted(found), len(found))


def misfires(way: str, runs: int, seed: int) -> int:
    """In how many mini-batches a value is named."""
    numbers, named = random.Random(f"{way} {seed}"), 0
    for _ in range(runs):
        rows = mini_batch(numbers)
        culprit = {"rank": 0, "micro_batch": 0, "share": 0.1}
        event = {"culprits": [{**culprit, "row": row} for row in culprits(way, rows, numbers)]}
        named += misfire(event, {(0, row): of for row, of in enumerate(rows)}) is not None
    return named


def retokenized(off: float, runs: int, seed: int) -> int:
    """In how many responses the mismatch begins at a turn."""
    numbers = random.Random(f"{off} {seed}")
    torch.manual_seed(seed)
    length = 400
    mask = torch.zeros(runs, length)
    for row in range(runs):
        start = 0
        for _ in range(numbers.randint(2, 6)):
            tokens = numbers.randint(4, 60)
            mask[row, start : start + tokens] = 1.0
            start += tokens + numbers.randint(1, 6)
    difference = torch.where(torch.rand(runs, length) < off, 2.0, 0.0)
    turn = find_mismatch({"response_mask": mask, "log_prob": difference, "rollout_log_prob": torch.zeros_like(mask)})[1]
    return int((turn > 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10000, help="mini-batches of each kind, and responses")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| rule | simulated | named |\n|---|---|---|")
    for way in WAYS:
        print(f"| `misfire` | culprits {way} | {misfires(way, options.runs, options.seed)} of {options.runs} |")
    for off in OFF:
        count = retokenized(off, options.runs, options.seed)
        print(f"| `retokenized` | {off:.0%} of the tokens differ | {count} of {options.runs} |")


if __name__ == "__main__":
    main()
