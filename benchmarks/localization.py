"""What finding the tokens behind a gradient spike costs: GradLoc against the published schedule.

Real part: verl's own update with GradLoc (0.7's actor, or 0.9's FSDP engine), on a tiny model with random weights,
under FSDP on W processes. Each event is solved in the same run by GradLoc and by the published schedule
(`published_schedule.py`), with the same forward and loss; passes are counted by a hook on the model. A batch is W ranks
× M micro-batches × N response tokens. `--until` says which ends of GradLoc's search are tried: `explained` (few tokens,
each measured alone over τ, without which every micro-batch is under its own threshold), `exhaustive` (every token
over τ).

Natural events (`--parts natural`) have no planted tokens:

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

Planted events (`--parts events`):

- Ordinary tokens have advantages of either sign, log-normal with median 1 (sigma 0.5), and random token ids. The
  threshold τ is `--level` times the median of their gradient norms.
- A planted token is `suspected` (its advantage is scaled, which the prior of the search sees) or `unsuspected` (its
  gradient is scaled behind the LM head, which the prior cannot see).
- Its gradient norm is drawn log-uniformly: `clear` 1.5 to 15 τ·sqrt(W N), so that it lifts its micro-batch over the
  threshold by itself, on its rank and in the mean over the ranks; `diluted` 1.1 τ·sqrt(N) to 0.95 τ·sqrt(W N): on its
  rank only; `hidden` 1.2 τ to τ·sqrt(N)/1.2: on neither.
- Events: `suspected` and `unsuspected` are one clear token; `several` 2 to 5 clear ones, each suspected or not at
  random; `mixed` one clear, two hidden in the same micro-batch of the same rank, one diluted in another (if W > 1).
- Truth: brute force, one backward pass on an unsharded model for each token: all tokens up to N = 64, for larger N the
  planted ones, a sample of the others, and every other token that either method names. Whether an event is explained is
  checked by a backward pass for each micro-batch over its threshold, without the named tokens.

Then it measures the cost of the local norms without a spike (`timings`), the time of the reduction in a pass
(`reduction`), and `memory`.
`--simulate` runs the search without a model, for sizes up to W = 1024 and N = 32768: `localization_simulation.py`.
`--planning` measures the time that the search takes to decide what to measure next, also without a model.

The real part needs the patched verl, for instance that of the tests:
    bash tests/run.sh -k published_schedule
    PYTHONPATH=build/verl build/venv/bin/python benchmarks/localization.py --base-tree build/base

`--device cuda` uses NCCL and one GPU for each rank. It has not been tested on a GPU.
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

from target_actor import prepare_cpu

Record = dict[str, Any]

WAYS = ("gradloc", "published")
EVENTS = {"suspected": 2, "unsuspected": 3, "several": 1, "mixed": 1}
# (hidden, intermediate, layers, heads, key-value heads, vocabulary, rows, length): a small Llama, and SmolLM2-135M with
# 8 of its 30 layers and 8192 of its 49152 token ids.
SMALL = (256, 768, 4, 4, 2, 4096)
MEDIUM = (576, 1536, 8, 9, 3, 8192)
COST_ROWS = {256: (2, 128), 1024: (4, 256)}
UNTILS = ("explained", "exhaustive")
KINDS = ("natural", "sparse", "coherent")
# Coherent events start here: closer to the threshold, leaving out a few tokens would explain them.
COHERENT_EXCESS = 1.5
COSTS = ("timings", "reduction", "memory")
PARTS = ("natural", "events", *COSTS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller settings: three minutes or so")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--strategy", choices=["fsdp2", "fsdp"], default="fsdp2", help="verl's name of the sharding")
    parser.add_argument("--world-sizes", type=int, nargs="+", metavar="W", help="default: 1 2 4")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="M", help="default: 1 4 8; natural: 4")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="default: 64 512 4096; natural: 128")
    parser.add_argument("--events", type=int, help="events of each kind (default: 2, 3, 1, 1; natural: 20)")
    parser.add_argument("--until", nargs="+", choices=UNTILS, default=UNTILS, help="default: both")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of natural events (default: all)")
    parser.add_argument("--excess", type=float, nargs="+", metavar="X", help="of natural events; default: 1.1 1.5 3")
    parser.add_argument(
        "--over-threshold",
        type=int,
        nargs="+",
        metavar="L",
        help="micro-batches over their thresholds in natural events; default: 1 2 3",
    )
    parser.add_argument("--gradloc-only", action="store_true", help="natural events without the published schedule")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the sizes of natural advantages (default: 1.0)")
    parser.add_argument("--level", type=float, default=18.0, help="τ in medians of the ordinary tokens (default: 18)")
    parser.add_argument(
        "--sample", type=int, default=64, help="ordinary tokens of each rank in the sample (default: 64)"
    )
    parser.add_argument("--rounds", type=int, help="rounds of the timings (default: 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-tree", type=Path, help="a tree with the unpatched verl, to time its actor as well")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="write all figures to this file, too")
    parser.add_argument("--simulate", action="store_true", help="the simulation instead of the real part")
    parser.add_argument("--planning", action="store_true", help="the time of the search's planning alone")
    args = parser.parse_args()
    small = args.quick
    args.world_sizes = args.world_sizes or ([2] if small else [1, 2, 4])
    args.natural_micro_batches = args.micro_batches or [4]
    args.natural_tokens = args.tokens or [128]
    args.natural_events = args.events or (2 if small else 20)
    args.micro_batches = args.micro_batches or ([4] if small else [1, 4, 8])
    args.tokens = args.tokens or ([64, 512] if small else [64, 512, 4096])
    args.excess = args.excess or [1.1, 1.5, 3.0]
    args.over_threshold = args.over_threshold or ([1] if small else [1, 2, 3])
    args.rounds = args.rounds or (5 if small else 15)
    if any(n < 2 or n % (2 if n < 512 else 256) for n in args.tokens):
        parser.error("--tokens must be even numbers, from 512 on multiples of 256")
    if min(args.world_sizes + args.micro_batches + [args.sample]) < 1 or not args.level > 0:
        parser.error("sizes must be positive")
    if not min(args.excess) > 1 or not args.sigma >= 0:
        parser.error("--excess must be over 1, --sigma not negative")
    most = min(args.world_sizes) * min(args.natural_micro_batches)
    if "natural" in args.parts and not (1 <= min(args.over_threshold) and max(args.over_threshold) <= most):
        parser.error(f"--over-threshold must be between 1 and W·M, which is as small as {most} here")
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more")
    if args.base_tree and not (args.base_tree / "verl/__init__.py").is_file():
        parser.error(f"{args.base_tree} has no verl/__init__.py")
    return args


def main() -> None:
    args = parse_arguments()
    if args.simulate:
        from localization_simulation import simulate

        simulate(args.quick, args.seed, args.until)
        return
    if args.planning:
        from localization_simulation import time_planning

        time_planning(args.quick, args.seed)
        return
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None or not (Path(verl.origin).parent / "utils/gradloc").is_dir():
        sys.exit("No patched verl here: put one on PYTHONPATH (see --help), or patch with apply_patch.py --installed.")
    records: list[Record] = []
    for part, print_part in {"natural": print_natural, "events": print_events}.items():
        if part in args.parts:
            found = [record for world_size in args.world_sizes for record in run_ranks(part, world_size, args)]
            print_part(found)
            records += found
    world_size = 2 if 2 in args.world_sizes else args.world_sizes[0]
    for part in (part for part in COSTS if part in args.parts):
        if part == "memory":
            # Otherwise the peak of resident memory would include freed memory that malloc keeps.
            os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        found = run_ranks(part, world_size, args)
        print_costs(part, found)
        records += found
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_ranks(part: str, world_size: int, args: argparse.Namespace) -> list[Record]:
    """Runs a part on W processes; an error in one ends all."""
    import torch

    if args.device == "cuda" and torch.cuda.device_count() < world_size:
        sys.exit(f"{world_size} ranks need as many GPUs; there are {torch.cuda.device_count()}: lower --world-sizes.")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise verl uses the GPU
        prepare_cpu()
    print(f"{part} on {world_size} ranks", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_rank, (part, world_size, directory, args), nprocs=world_size)
        return [json.loads(line) for line in (Path(directory) / "records").read_text().splitlines()]


def _rank(rank: int, part: str, world_size: int, directory: str, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    sys.stdout = sys.stderr  # verl prints
    warnings.simplefilter("ignore")
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[args.device],
        store=dist.FileStore(f"{directory}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=10),
    )
    import verl
    from localization_actor import Ranks

    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device(args.device)
    ranks = Ranks(device, args.strategy)
    with open(f"{directory}/records" if rank == 0 else os.devnull, "w") as file:
        for record in PART_OF_RANK[part](ranks, args):
            print(json.dumps({"verl": verl.__version__} | record), file=file, flush=True)
    dist.destroy_process_group()


def _events(ranks: Any, args: argparse.Namespace) -> Iterable[Record]:
    from localization_actor import solve_events

    for micro_batches in args.micro_batches:
        for tokens in args.tokens:
            counts = dict.fromkeys(EVENTS, args.events) if args.events else EVENTS
            if ranks.rank == 0:
                print(f"  M = {micro_batches}, N = {tokens}", file=sys.stderr, flush=True)
            sample = args.sample if tokens > 64 else micro_batches * tokens
            yield from solve_events(ranks, micro_batches, tokens, counts, args.until, sample, 1 / args.level, args.seed)


def _natural(ranks: Any, args: argparse.Namespace) -> Iterable[Record]:
    from localization_natural import Setting, solve_natural_events

    setting = Setting(
        kinds=args.kinds,
        excess=args.excess,
        coherent_excess=COHERENT_EXCESS,
        over_threshold=args.over_threshold,
        sigma=args.sigma,
        events=args.natural_events,
        untils=args.until,
        published=not args.gradloc_only,
        seed=args.seed,
    )
    for micro_batches in args.natural_micro_batches:
        for tokens in args.natural_tokens:
            if ranks.rank == 0:
                print(f"  M = {micro_batches}, N = {tokens}", file=sys.stderr, flush=True)
            yield from solve_natural_events(ranks, micro_batches, tokens, setting)


def _shapes(ranks: Any, quick: bool) -> Iterable[Any]:
    from localization_actor import Shape

    settings = [(SMALL, 256), (SMALL, 1024)] + [(MEDIUM, 256)] * (not quick)
    for model, tokens in settings:
        if ranks.rank == 0:
            print(f"  hidden size {model[0]}, {tokens} tokens", file=sys.stderr, flush=True)
        yield Shape(*model, *COST_ROWS[tokens])


def _timings(ranks: Any, args: argparse.Namespace) -> Iterable[Record]:
    from localization_actor import measure_local_norms

    for shape in _shapes(ranks, args.quick):
        yield {"part": "timings"} | measure_local_norms(ranks, shape, 2, args.rounds, args.base_tree)


def _reduction(ranks: Any, args: argparse.Namespace) -> Iterable[Record]:
    from localization_actor import measure_reduction

    for shape in _shapes(ranks, args.quick):
        yield {"part": "reduction"} | measure_reduction(ranks, shape, args.rounds)


def _memory(ranks: Any, args: argparse.Namespace) -> Iterable[Record]:
    from localization_actor import Shape, measure_memory

    for micro_batches in (1, 2):
        shape = Shape(*(SMALL if args.quick else MEDIUM), *COST_ROWS[256])
        yield {"part": "memory"} | measure_memory(ranks, shape, micro_batches)


PART_OF_RANK = {
    "natural": _natural,
    "events": _events,
    "timings": _timings,
    "reduction": _reduction,
    "memory": _memory,
}


def table(head: list[str], rows: list[list[str]]) -> None:
    for row in [head, ["---"] * len(head), *rows]:
        print(f"| {' | '.join(row)} |")
    print()


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def middle_and_worst(values: list[int]) -> str:
    return f"{median(values):g} ({max(values)})"


def middle_and_range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{median(values):g}" if low == high else f"{median(values):g} ({low:g} to {high:g})"


def untils_of(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(record["until"] for record in records))


def print_natural(records: list[Record]) -> None:
    for until in untils_of(records):
        for m, n in sorted({(e["M"], e["N"]) for e in records}):
            print(f"Natural events, GradLoc until {until}, M = {m}, N = {n}: how many end how; median (range) of the")
            print("passes beyond training, of the tokens named and of those needed.\n")
            _print_natural([e for e in records if (e["until"], e["M"], e["N"]) == (until, m, n)])


def _print_natural(records: list[Record]) -> None:
    def cell_of(record: Record) -> tuple[Any, ...]:
        return tuple(record[name] for name in ("kind", "x", "over_threshold", "W"))

    rows = []
    for cell in sorted({cell_of(e) for e in records}, key=lambda cell: (KINDS.index(cell[0]), *cell[1:])):
        events = [e for e in records if cell_of(e) == cell]
        ours, theirs = ([e[way] for e in events if way in e] for way in WAYS)
        ratios = [e["gradloc"]["named"] / e["needed"] for e in events if end_of(e) == "explained"]
        row = [cell[0], *(f"{value:g}" for value in cell[1:]), str(len(events))]
        row += [middle_and_range([result["passes"] for result in ours])]
        row += [str(sum(end_of(e) == end for e in events)) for end in ("explained", "diffuse", "neither")]
        row += [str(sum(e["explainable"] for e in events))]
        row += [middle_and_range([result["named"] for result in ours]), middle_and_range([e["needed"] for e in events])]
        row += [f"{median(ratios):.2f}" if ratios else "–", str(sum(result["wrong"] for result in ours))]
        if theirs:
            row += [middle_and_range([result[figure] for result in theirs]) for figure in ("passes", "named")]
            row += [str(sum(result["explained_truth"] for result in theirs))]
        rows.append(row)
    heads = ["events", "x", "micro-batches over", "W", "number", "passes", "explained", "diffuse", "neither"]
    heads += ["explainable", "named", "needed", "named/needed", "wrong"]
    heads += ["published: passes", "published: named", "published: explained"]
    table(heads[: len(rows[0])], rows)
    print("explainable: the needed tokens are each over τ. named/needed: median of the explained events.")
    mistaken = sum(end_of(e) == "explained" and not e["gradloc"]["explained_truth"] for e in records)
    print(f"Called explained, but by brute force they are not: {mistaken}.")
    diffuse = [e for e in records if end_of(e) == "diffuse" and e["explainable"]]
    few = sum(e["needed_at_most"] <= e["N"] / 8 for e in diffuse)
    print(f"Called diffuse, though N/8 tokens or fewer of each micro-batch explain them: {few}; though those that are")
    print(f"named do: {sum(e['gradloc']['explained_truth'] for e in diffuse)}.")
    spent = sum(e["gradloc"]["budget_spent"] for e in records)
    error = max(e["gradloc"]["norm_error"] for e in records)
    print(f"Used up their budget: {spent}. Largest relative error of a norm in an event: {error:.1e}.\n")


def end_of(record: Record) -> str:
    """How a natural event ended by its own word: "explained", "diffuse" or "neither".

    An exhaustive search does not measure whether its tokens explain the event: there, brute force says it.
    """
    result = record["gradloc"]
    if result["explained_truth"] if result["explained"] is None else result["explained"]:
        return "explained"
    return "diffuse" if result["diagnosis"] == "diffuse" else "neither"


def print_events(records: list[Record]) -> None:
    for until in untils_of(records):
        print(f"Planted events, GradLoc until {until}\n")
        _print_events([record for record in records if record["until"] == until], until)


def _print_events(records: list[Record], until: str) -> None:
    cells = list(dict.fromkeys((e["W"], e["M"], e["N"]) for e in records))
    print(f"Passes beyond training, median (worst): GradLoc until {until} / published schedule\n")
    rows = []
    for cell in cells:
        row = [*map(str, cell)]
        for kind in EVENTS:
            events = [e for e in records if (e["W"], e["M"], e["N"]) == cell and e["kind"] == kind]
            row.append(" / ".join(middle_and_worst([e[way]["passes"] for e in events]) for way in WAYS))
        rows.append(row)
    table(["W", "M", "N", *EVENTS], rows)

    rows = []
    for kind in EVENTS:
        events = [e for e in records if e["kind"] == kind]
        row = [kind, str(len(events))]
        for figure in "passes", "seconds":
            ratios = [e["published"][figure] / e["gradloc"][figure] for e in events if e["gradloc"]["passes"]]
            row.append(f"{median(ratios):.1f}× ({min(ratios):.1f}×)" if ratios else "–")
        rows.append(row + [_accuracy(events, way) for way in WAYS])
        rows[-1] += [f"{sum(e[way]['explained_truth'] for e in events)} of {len(events)}" for way in WAYS]
    print(
        "Published schedule over GradLoc in the same event, median (least); over all settings recall and precision, and"
    )
    print("how many events the named tokens explain (by brute force):\n")
    heads = ["GradLoc", "published", "GradLoc explains", "published explains"]
    table(["events", "number", "passes", "wall time", *heads], rows)

    rows = []
    for name in ("clear", "diluted", "hidden"):
        planted = sum(e["planted"].count(name) for e in records)
        if planted:
            missed = [sum(e[way]["missed"].count(name) for e in records) for way in WAYS]
            rows.append([name, str(planted), *(f"{1 - number / planted:.3f}" for number in missed)])
    print("Recall by the size of the token, over all settings:\n")
    table(["token", "planted", "GradLoc", "published"], rows)
    gap = max(e["published"]["restored"] for e in records)
    # An exhaustive search does not measure whether its tokens explain the event.
    words = {"explained": ("complete", "explained"), "exhaustive": ("complete",)}[until]
    for word in words:
        number = sum(e["gradloc"][word] is True for e in records)
        print(f"Searches that GradLoc called {word}: {number} of {len(records)}.")
    print(f"Largest relative error of a gradient restored by recomputation: {gap:.1e}.\n")


def _accuracy(events: list[Record], way: str) -> str:
    culprits = sum(e["culprits"] for e in events)
    missed = sum(len(e[way]["missed"]) for e in events)
    found, wrong = (sum(e[way][name] for e in events) for name in ("found", "wrong"))
    precision = f"{1 - wrong / found:.3f}" if found else "–"
    return f"{1 - missed / culprits:.3f}, {precision}"


def middle_half(shares: list[float]) -> str:
    low, middle, high = statistics.quantiles(shares, n=4)
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


def tokens_of(record: Record) -> str:
    return str(record["shape"]["rows"] * record["shape"]["length"])


def print_costs(part: str, records: list[Record]) -> None:
    {"timings": print_timings, "reduction": print_reduction, "memory": print_memory}[part](records)


def print_timings(records: list[Record]) -> None:
    rows = []
    for record in records:
        model = f"{record['parameters'] / 1e6:.1f}M, {record['shape']['layers']} layers of {record['shape']['hidden']}"
        row = [model, tokens_of(record), *(f"{median(record['times'][way]):.3f}" for way in ("off", "on"))]
        for times in record["times"], record["processor"]:
            for base in "off", "stock":
                pairs = zip(times["on"], times[base], strict=True) if base in times else []
                added = [on / other - 1 for on, other in pairs]
                row.append(middle_half(added) if added else "–")
        rows.append(row)
    print(
        "Seconds of an update with two micro-batches a rank, and what detection adds without a spike, against off and"
    )
    print("against the unpatched actor; median of the rounds (quartiles):\n")
    heads = ["wall: on / off", "on / stock", "processor: on / off", "on / stock"]
    table(["model", "tokens a micro-batch", "off", "on", *heads], rows)


def print_reduction(records: list[Record]) -> None:
    rows = []
    for record in records:
        times = record["times"]
        shares = [1 - without / whole for whole, without in zip(times["with"], times["without"], strict=True)]
        seconds = f"{median(times['with']):.3f}"
        rows.append([str(record["shape"]["hidden"]), tokens_of(record), seconds, middle_half(shares)])
    print("Share of the gradient reduction in a pass, median (quartiles):\n")
    table(["hidden size", "tokens", "seconds of a pass", "share"], rows)


def print_memory(records: list[Record]) -> None:
    rows = []
    for record in records:
        sizes = {name: value / 1e6 for name, value in record["bytes"].items()}
        extra = (sizes["search"] - sizes["off"]) / sizes["sharded gradient"]
        row = [f"{sizes[name]:.0f}" for name in ("sharded gradient", "off", "on", "search")]
        rows.append([str(record["M"]), *row, f"{extra:.2f}"])
    print("Peak memory of an update over what is held before it, in MB a rank:\n")
    table(["M", "sharded gradient", "off", "on", "with a search", "(search − off) / gradient"], rows)


if __name__ == "__main__":
    main()
