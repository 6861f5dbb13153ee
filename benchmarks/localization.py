# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What finding the tokens behind a gradient spike costs, and whether they explain it.

Verl's own update with GradLoc (0.7's actor, or 0.9's FSDP engine) searches spikes of a tiny model with random weights,
under FSDP2 on W gloo processes; passes are counted by a hook on the model. A batch is W ranks × M micro-batches × N
response tokens. `--until` says which ends of the search are tried: `explained` (few tokens, each measured alone over τ,
without which every micro-batch is under its own threshold), `exhaustive` (every token over τ).

No tokens are planted:

- `natural`: advantages of either sign, log-normal with median 1 and sigma `--sigma`. The `--over-threshold`
  micro-batches with the largest norms are x times over their thresholds, for each x of `--excess`; all others are at
  half of theirs.
- `sparse`: the same, but half of the rows of each micro-batch, and a tenth of the other tokens, have no advantage.
- `coherent`: every response of some micro-batches repeats one token to its end, with one advantage. The gradients of
  these tokens pull the same way, and none of them is over τ. Only for x from 1.5 on.
- Gradients are linear in the advantages: each micro-batch's advantages are scaled to reach x, and τ is 1.
- Truth: the gradient of every token of the micro-batches over their thresholds, on an unsharded model, and their inner
  products. From these: `needed`, the fewest tokens, largest gradient norm first, that explain the event; whether the
  named ones do; and `wrong`, those of them that are not over τ.

It needs the patched verl; after `bash tests/run.sh`:
    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/localization.py --quick
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
UNTILS = ("explained", "exhaustive")
KINDS = ("natural", "sparse", "coherent")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller settings: three minutes or so")
    parser.add_argument("--world-sizes", type=int, nargs="+", metavar="W", help="default: 1 2 4")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="M", default=[4], help="default: 4")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", default=[128], help="default: 128")
    parser.add_argument("--events", type=int, help="events of each kind (default: 20)")
    parser.add_argument("--until", nargs="+", choices=UNTILS, default=UNTILS, help="default: both")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of events (default: all)")
    parser.add_argument("--excess", type=float, nargs="+", metavar="X", default=[1.1, 1.5, 3.0], help="1.1 1.5 3")
    parser.add_argument(
        "--over-threshold", type=int, nargs="+", metavar="L", help="micro-batches over their thresholds; default: 1 2 3"
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="of the sizes of advantages (default: 1.0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file, too")
    args = parser.parse_args()
    args.world_sizes = args.world_sizes or ([2] if args.quick else [1, 2, 4])
    args.events = args.events or (2 if args.quick else 20)
    args.over_threshold = args.over_threshold or ([1] if args.quick else [1, 2, 3])
    if any(n < 2 or n % (2 if n < 512 else 256) for n in args.tokens):
        parser.error("--tokens must be even numbers, from 512 on multiples of 256")
    if min(args.world_sizes + args.micro_batches) < 1 or not min(args.excess) > 1 or not args.sigma >= 0:
        parser.error("sizes must be positive, --excess must be over 1, --sigma not negative")
    most = min(args.world_sizes) * min(args.micro_batches)
    if not 1 <= min(args.over_threshold) <= max(args.over_threshold) <= most:
        parser.error(f"--over-threshold must be between 1 and W·M, which is as small as {most} here")
    return args


def main() -> None:
    args = parse_arguments()
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None or not (Path(verl.origin).parent / "utils/spikes.py").is_file():
        sys.exit("No patched verl here: put one on PYTHONPATH (see --help), or patch with apply_patch.py --installed.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise verl uses the GPU
    if not (Path(verl.origin).parent / "workers/actor").is_dir():
        # Then verl 0.9 takes the CPU for one of its devices, here and in the processes started from here.
        os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "embedded")
        sys.path.insert(0, str(ROOT))
    records = [record for world_size in args.world_sizes for record in run_ranks(world_size, args)]
    for until in dict.fromkeys(record["until"] for record in records):
        for m, n in sorted({(e["M"], e["N"]) for e in records}):
            print(f"GradLoc until {until}, M = {m}, N = {n}: how many events end how; median (range) of the passes")
            print("beyond training, of the tokens named and of those needed.\n")
            print_table([e for e in records if (e["until"], e["M"], e["N"]) == (until, m, n)])
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_ranks(world_size: int, args: argparse.Namespace) -> list[Record]:
    """Searches all events on W processes; an error in one ends all."""
    import torch

    print(f"on {world_size} ranks", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_rank, (world_size, directory, args), nprocs=world_size)
        return [json.loads(line) for line in (Path(directory) / "records").read_text().splitlines()]


def _rank(rank: int, world_size: int, directory: str, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    sys.stdout = sys.stderr  # verl prints
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world_size)
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    import verl
    from localization_natural import NaturalEvents

    with open(f"{directory}/records" if rank == 0 else os.devnull, "w") as file:
        for micro_batches in args.micro_batches:
            for tokens in args.tokens:
                for record in NaturalEvents(micro_batches, tokens, args).records():
                    print(json.dumps({"verl": verl.__version__} | record), file=file, flush=True)
    dist.destroy_process_group()


def middle_and_range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):g}" + ("" if low == high else f" ({low:g} to {high:g})")


def print_table(records: list[Record]) -> None:
    def cell_of(record: Record) -> tuple[Any, ...]:
        return tuple(record[name] for name in ("kind", "x", "over_threshold", "W"))

    def numbers(events: Iterable[Record], name: str) -> list[float]:
        return [e["gradloc"][name] for e in events]

    heads = ["events", "x", "micro-batches over", "W", "number", "passes", "explained", "diffuse", "neither"]
    heads += ["explainable", "named", "needed", "named/needed", "wrong"]
    rows = [heads, ["---"] * len(heads)]
    for cell in sorted({cell_of(e) for e in records}, key=lambda cell: (KINDS.index(cell[0]), *cell[1:])):
        events = [e for e in records if cell_of(e) == cell]
        ratios = [e["gradloc"]["named"] / e["needed"] for e in events if end_of(e) == "explained"]
        row = [cell[0], *(f"{value:g}" for value in cell[1:]), str(len(events))]
        row += [middle_and_range(numbers(events, "passes"))]
        row += [str(sum(end_of(e) == end for e in events)) for end in ("explained", "diffuse", "neither")]
        row += [str(sum(e["explainable"] for e in events))]
        row += [middle_and_range(numbers(events, "named")), middle_and_range([e["needed"] for e in events])]
        rows.append([*row, f"{statistics.median(ratios):.2f}" if ratios else "–", f"{sum(numbers(events, 'wrong')):g}"])
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print("\nexplainable: the needed tokens are each over τ. named/needed: median of the explained events.")
    mistaken = sum(end_of(e) == "explained" and not e["gradloc"]["explained_truth"] for e in records)
    print(f"Called explained, but by brute force they are not: {mistaken}.")
    diffuse = [e for e in records if end_of(e) == "diffuse" and e["explainable"]]
    few = sum(e["needed_at_most"] <= e["N"] / 8 for e in diffuse)
    print(f"Called diffuse, though N/8 tokens or fewer of each micro-batch explain them: {few}; though those that are")
    print(f"named do: {sum(e['gradloc']['explained_truth'] for e in diffuse)}.")
    spent, error = sum(numbers(records, "budget_spent")), max(numbers(records, "norm_error"))
    print(f"Used up their budget: {spent:g}. Largest relative error of a norm in an event: {error:.1e}.\n")


def end_of(record: Record) -> str:
    """How an event ended by its own word: "explained", "diffuse" or "neither".

    An exhaustive search does not measure whether its tokens explain the event: there, brute force says it.
    """
    result = record["gradloc"]
    if result["explained_truth"] if result["explained"] is None else result["explained"]:
        return "explained"
    return "diffuse" if result["diagnosis"] == "diffuse" else "neither"


if __name__ == "__main__":
    main()
