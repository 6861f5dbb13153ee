# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the verdict names the cause of a run that it knows nothing about: docs/lab/blind.md.

Faults and healthy settings are in blind_faults.py, the small RL stack in which they run in blind_world.py. Rules may be
tuned on runs of even seeds, the half "tuning"; those of odd ones, "test", are run once. Printed: for each kind the
names that were said, faults of which nothing was said, and totals. Finished runs are kept in the results and not
repeated; with --record, what the judge was told in them, and with --again, it is asked again without training.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/blind.py --results build/tuning.json --seeds 0 2 4

With verl 0.9.1, VERL_USE_EXTERNAL_MODULES=embedded makes it take the CPU for one of its devices.

One run, in benchmarks/ with that path:

    observed = run_case("rollout shifted", (1, 1.0), seed=4)       # a kind of FAULTS, one of its strengths
    observed = run_case("2 steps late", None, seed=4)              # a key of HEALTHY
    observed.name, observed.said, observed.why
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blind_faults import FAULTS, HEALTHY, can_be_planted
from blind_records import judged_again, recorded
from blind_world import NATURAL_TAU, TAU, Setting, World, lines_in, said_in, start_of, times_in

STEPS_BEFORE, STEPS_AFTER = 4, 8
STARTS = Path(__file__).resolve().parent.parent / "build/blind.starts"


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a user has seen."""

    said: list[tuple[int, str, str, str]]  # what `said_in` gives, from the fault's first step on
    name: str | None  # what the run's lines say most often; "" is "no known cause", None: nothing was said
    begin: int  # the fault's first step, from 1
    why: str  # what there was to see, for runs of which nothing is said
    over_natural: bool
    times: dict[str, float]  # the largest residual of each identity, in times of the usual


def run_case(kind: str, strength: Any, seed: int, starts: Path = STARTS, record: Path | None = None) -> Observed:
    """One run of 9 to 13 updates.

    Args:
        kind (str): A key of FAULTS or of HEALTHY.
        strength (Any): One of the fault's; None for a healthy setting.
        seed (int): Draws the rest: the setting around a fault, its first step, the model, and whether there is a
            natural spike.
        starts (Path): Where trained start models are kept.
        record (Path, optional): The file in which what the judge is told is kept.
    """
    prepare_process()
    drawn = random.Random(f"{kind} {strength} {seed}")
    fault = FAULTS.get(kind)
    begin, natural = 0, -1
    if fault is None:
        setting, steps = HEALTHY[kind], STEPS_BEFORE + STEPS_AFTER
        natural = drawn.choice([-1, 3] if "tasks" not in setting.stages else [-1])  # rare rows are chosen by prompt
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
    start = start_of(seed, setting.length, starts)
    tau = TAU if natural < 0 else NATURAL_TAU
    with tempfile.TemporaryDirectory() as folder:
        world = World(setting, start, seed, fault, strength, begin, tau, natural, folder)
        with recorded(record):
            for _ in range(steps):
                world.step()
        lines = lines_in(Path(folder))
    largest = max((norm for norm in world.token_norms[begin:] if norm == norm), default=0.0)
    why = f"norms up to {largest / start.token_norm / tau:.2g} τ, a gap of {max(world.gaps[begin:]):.2g} nats"
    return Observed(**observed(lines, begin + 1), begin=begin + 1, why=why, over_natural=natural >= 0)


def observed(lines: Sequence[dict[str, Any]], begin: int) -> dict[str, Any]:
    """What a user has seen in the lines of a run, but for what no line says."""
    said = [line for line in said_in(lines) if line[0] >= begin]
    return {"said": said, "name": name_of(said), "times": times_in(lines)}


def name_of(said: Sequence[Sequence[Any]], what: int = 2) -> str | None:
    """What the lines of most steps say: a step says its first warning, else its first verdict that has a name.

    Args:
        what (int): 2 for the name, 3 for the identity, which old runs lack.
    """
    by_step: dict[int, str] = {}
    said = [line for line in said if line[1] in ("warning", "verdict")]
    for step, _, *names in sorted(said, key=lambda line: (line[1] == "verdict", line[2] == "")):
        name = [*names, ""][what - 2]
        by_step[step] = by_step.get(step) or name
    named = Counter(name for name in by_step.values() if name)
    return named.most_common(1)[0][0] if named else "" if by_step else None


def prepare_process() -> None:
    """One thread, a process group of one, and a CPU that verl can ask for its number."""
    if not dist.is_initialized():
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        torch.cpu.current_device = lambda: "cpu"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def judged(kind: str, name: str | None) -> str:
    """ "right", "defensible", "wrong", "unknown" (no known cause) or "silent"; of a healthy run "right" or "wrong"."""
    if kind in HEALTHY:
        return "wrong" if name else "right"
    fault = FAULTS[kind]
    if not name:
        return "right" if not (fault.right or fault.identity) else "silent" if name is None else "unknown"
    if name in fault.right.split() or (not fault.right and name in fault.identity.split()):
        return "right"
    return "defensible" if name in fault.defensible.split() + fault.identity.split() else "wrong"


def print_tables(runs: dict[str, dict[str, Any]]) -> None:
    """The confusion table, faults of which nothing is said, and totals; `runs` by "kind | strength | seed"."""
    by_kind: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for key, run in runs.items():
        by_kind.setdefault(key.split(" | ")[0], []).append((key, run))
    largest: defaultdict[str, list[float]] = defaultdict(list)
    verdicts, totals, silent = {True: Counter[str](), False: Counter[str]()}, Counter[str](), []
    print("| planted | must be named | right | defensible | wrong name | no known cause | nothing | placed |")
    print("|---" * 8 + "|")
    for kind, found in sorted(by_kind.items(), key=lambda item: [*FAULTS, *HEALTHY].index(item[0])):
        fault, counts, at_place = FAULTS.get(kind), Counter[str](), 0
        names: dict[str, Counter[str]] = {"right": Counter(), "defensible": Counter(), "wrong": Counter()}
        for key, run in found:
            name, said = run["name"], run["said"]
            noted = {line[3] for line in said if line[1] in ("change", "fact")}
            said = [line for line in said if line[1] in ("warning", "verdict")]
            if fault is None:  # one wrong line is enough
                name = next((line[2] for line in said if line[2]), name)
                for identity, times in run.get("times", {}).items():
                    largest[identity].append(times)
                totals["warned"] += any(line[1] == "warning" for line in said)
            verdict = judged(kind, name)
            counts[verdict] += 1
            if verdict in names:
                names[verdict][name or "-"] += 1
            if fault is None:
                continue
            at_place += bool({name_of(said, 3), *noted} & {*fault.identity.split()})
            is_named = verdict in ("right", "defensible")
            totals["over_natural"] += run["over_natural"]
            totals["named_over_natural"] += run["over_natural"] and is_named
            totals["also"] += is_named and any(judged(kind, line[2]) == "wrong" for line in said if line[2])
            if verdict in ("silent", "unknown"):
                silent.append(f"{key}: {'nothing' if verdict == 'silent' else 'no known cause'}; {run['why']}")
        verdicts[fault is not None] += counts
        totals["placed"] += at_place
        cells = [", ".join(f"{name} {times}" for name, times in names[each].most_common()) for each in names]
        cells += [str(count or "") for count in (counts["unknown"], counts["silent"], at_place)]
        print(f"| {kind} | {fault and (fault.right or fault.identity) or 'nothing'} | {' | '.join(cells)} |")
    print("\nOf which nothing is said:", *silent, sep="\n- ")
    faults, healthy = verdicts[True], verdicts[False]
    print(f"\nFaults: {faults.total()}; {', '.join(f'{name} {count}' for name, count in faults.most_common())}.")
    print(f"Placed at an identity that breaks: {totals['placed']}.")
    print(f"Of those right or defensible, {totals['also']} have a line with a wrong name as well.")
    named = totals["named_over_natural"]
    print(f"Over a natural spike: {totals['over_natural']}, of which {named} right or defensible.")
    print("\n| identity | healthy runs | median | 95% | largest |\n|---|---|---|---|---|")
    for identity, of_runs in sorted(largest.items()):
        of_runs.sort()
        middle, high = (of_runs[int(share * (len(of_runs) - 1))] for share in (0.5, 0.95))
        print(f"| `{identity}` | {len(of_runs)} | {middle:.2g} | {high:.2g} | {of_runs[-1]:.2g} |")
    print(f"\nHealthy: {healthy.total()}, {healthy['wrong']} with a bug's name, {totals['warned']} with any warning.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON file of the runs; those in it are not made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each takes the next strength (default: 0)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="faults and healthy settings (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each on one core (default: 2)")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep what the judge is told in each run")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="ask the judge again of the runs recorded there")
    arguments = parser.parse_args()
    kinds = arguments.kinds or [kind for kind in [*FAULTS, *HEALTHY] if can_be_planted(kind)]
    if unknown := [kind for kind in kinds if kind not in FAULTS and kind not in HEALTHY]:
        sys.exit(f"unknown kinds {unknown}: choose from {[*FAULTS, *HEALTHY]}")
    path = arguments.results
    kept = json.loads(path.read_text()) if path.exists() else {}
    tasks = {}
    for seed in arguments.seeds:
        for kind in kinds:
            strengths = FAULTS[kind].strengths if kind in FAULTS else (None,)
            strength = strengths[([*FAULTS, *HEALTHY].index(kind) + seed // 2) % len(strengths)]
            tasks[f"{kind} | {strength} | {seed}"] = kind, strength, seed
    os.environ["OMP_NUM_THREADS"] = "1"
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        if arguments.again:
            tasks = {key: task for key, task in tasks.items() if key in kept}
            answers = {key: pool.submit(judged_again, arguments.again / f"{key}.pickle") for key in tasks}
            for key, lines in answers.items():
                now = observed(lines.result(), kept[key]["begin"])
                if now["name"] != kept[key]["name"]:
                    print(f"{key}: {kept[key]['name']} before, and now {now['name']}", file=sys.stderr, flush=True)
                kept[key] |= now
        # In any order, so that a benchmark that is stopped has a sample of all kinds.
        keys = random.Random(0).sample([key for key in tasks if key not in kept], len(tasks.keys() - kept.keys()))
        files = {key: arguments.record and arguments.record / f"{key}.pickle" for key in keys}
        missing = {pool.submit(run_case, *tasks[key], record=files[key]): key for key in keys}
        for done, future in enumerate(as_completed(missing), 1):
            if error := future.exception():
                print(f"{missing[future]} failed: {error!r}", file=sys.stderr, flush=True)
                continue
            kept[missing[future]] = dataclasses.asdict(future.result())
            path.write_text(json.dumps(kept, indent=0))
            print(f"{done} of {len(missing)}: {missing[future]}", file=sys.stderr, flush=True)
    print_tables({key: kept[key] for key in tasks if key in kept})


if __name__ == "__main__":
    main()
