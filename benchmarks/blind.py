# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the verdict names the cause of a run that it knows nothing about.

One run, as `python -c` in benchmarks/ or from a test:

    observed = run_case("rollout shifted", (1, 1.0), seed=4)       # a kind of FAULTS, one of its strengths
    observed = run_case("2 steps late", None, seed=4)              # a key of HEALTHY
    observed.name, observed.said, observed.why
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blind_faults import FAULTS, HEALTHY
from blind_world import NATURAL_TAU, TAU, Setting, World, said_in, start_of

STEPS_BEFORE, STEPS_AFTER = 4, 8
STARTS = Path(__file__).resolve().parent.parent / "build/blind.starts"
# What is said of tokens that are as they should be.
NATURAL_NAMES = frozenset(["", "unlikely", "advantage", "punished", "weight"])


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a user has seen.

    Args:
        said (list): (step, "warning" or "verdict", name), from the fault's first step on; "" is "no known cause".
        name (str | None): What the run's lines say most often, a warning before a verdict; None: nothing was said.
        begin (int): The fault's first step, from 1.
        why (str): What there was to see, for runs of which nothing is said.
    """

    said: list[tuple[int, str, str]]
    name: str | None
    begin: int
    why: str


def run_case(kind: str, strength: Any, seed: int, starts: Path = STARTS, **changes: Any) -> Observed:
    """One run of 9 to 13 updates.

    Args:
        kind (str): A key of FAULTS or of HEALTHY.
        strength (Any): One of the fault's; None for a healthy setting.
        seed (int): Draws the rest: the setting around a fault, its first step, the model, and whether there is a
            natural spike.
        starts (Path): Where trained start models are kept.
        changes (Any): Fields of the setting to set.
    """
    prepare_process()
    drawn = random.Random(f"{kind} {strength} {seed}")
    fault = FAULTS.get(kind)
    begin, natural = 0, -1
    if fault is None:
        setting, steps = HEALTHY[kind], STEPS_BEFORE + STEPS_AFTER
        natural = drawn.choice([-1, 3])
    else:
        setting = Setting(
            rate=drawn.choice([2e-4, 4e-4, 1e-3]),
            engine=drawn.choice(["fp32", "bf16", "bf16", "fp8"]),
            behind=drawn.choice([0, 0, 0, 1]),
            length=drawn.choice([8, 16]),
            reference=drawn.random() < 0.8,
        )
        needed = {key: value(strength) if callable(value) else value for key, value in fault.setting.items()}
        setting = dataclasses.replace(setting, **needed)
        late = {"any": drawn.random() < 0.4, "start": False, "later": True}[fault.begins]
        begin = drawn.randint(2, STEPS_BEFORE) if late else 0
        natural = begin + 2 if drawn.random() < 0.3 else -1
        steps = begin + STEPS_AFTER
    setting = dataclasses.replace(setting, **changes)
    start = start_of(seed, setting.length, starts)
    tau = TAU if natural < 0 else NATURAL_TAU
    with tempfile.TemporaryDirectory() as folder:
        world = World(setting, start, seed, fault, strength, begin, tau, natural, folder)
        for _ in range(steps):
            world.step()
        said = [line for line in said_in(Path(folder)) if line[0] > begin]
    largest = max((norm for norm in world.token_norms[begin:] if norm == norm), default=0.0)
    why = f"norms up to {largest / start.token_norm / tau:.2g} τ, a gap of {max(world.gaps[begin:]):.2g} nats"
    return Observed(said, name_of(said), begin + 1, why)


def name_of(said: list[tuple[int, str, str]]) -> str | None:
    """What the lines of most steps say: a step says its first warning, else its first verdict that has a name."""
    by_step: dict[int, str] = {}
    for step, _, name in sorted(said, key=lambda line: (line[1] == "verdict", line[2] == "")):
        by_step.setdefault(step, name)
    named = Counter(name for name in by_step.values() if name)
    return named.most_common(1)[0][0] if named else "" if by_step else None


def prepare_process() -> None:
    """One thread, a process group of one, and a CPU that verl can ask for its number."""
    if not dist.is_initialized():
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        torch.cpu.current_device = lambda: "cpu"  # type: ignore[method-assign,assignment]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[*FAULTS, *HEALTHY])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        for strength in FAULTS[kind].strengths if kind in FAULTS else [None]:
            found = run_case(kind, strength, arguments.seed)
            names = dict(Counter(name for _, _, name in found.said))
            print(f"{kind} {strength}: {found.name!r} from step {found.begin}; {names}; {found.why}", flush=True)


if __name__ == "__main__":
    main()
