"""How fast the math_verify reward scores: its pool, a fresh process per answer, and plain calls in this process.

Ordinary answers are fractions, decimals, roots, sets and polynomials in a few sentences of text, half of them right.
For each way of scoring them the table gives

- answers/s: by wall time;
- of plain: answers/s divided by that of plain calls and by the number of cores that the workers can use;
- CPU ms: CPU time per answer, over all processes;
- CPU of plain: the CPU time of plain calls divided by that of this way. Other load on the machine does not affect it.

Rounds of all ways are interleaved, and the median over the rounds is printed. A fresh process is measured on fewer
answers: by spawn (each imports Math-Verify again), and by fork of this process, which has imported Math-Verify, but
also torch.

Then 1% of the answers hang. The table gives the time of the batch, the least time for the hanging answers alone
(hangs x limit / workers), the time of the batch without them, the rest, and how many other answers ran over the limit.

--base-tree names an unpatched verl 0.9, whose own scorer has a pool of 4 processes: it is measured in the same run, and
last with answers that hang, because it does not end a process that is over the limit. (What verl 0.7's own scorer does
is what the plain calls do.) Two more tables say how all score the pairs of tests/rewards/public_pairs.py, which people
reported in public threads, and the answers of tests/rewards/answer_forms.py, which we wrote.

Usage: PYTHONPATH=<patched verl> python benchmarks/scoring.py [--answers N] [--rounds N] [--workers N]
           [--limit SECONDS] [--hanging LATEX] [--fresh N] [--base-tree DIR]
"""

import argparse
import importlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

HANGING = "9^{9^{9^{9}}}"
THREADS = 16
Pair = tuple[str, str]


def ordinary_answers(n: int, seed: int = 0) -> tuple[list[Pair], list[float]]:
    """Responses with their truths, and the scores."""
    numbers = random.Random(seed)
    pairs, scores = [], []
    for i in range(n):
        a, b, c = numbers.randint(2, 999), numbers.randint(2, 99), numbers.randint(2, 99)
        right = i % 2
        d = a + 1 - right
        answer, truth = (
            (f"{a}", f"{d}"),
            (f"\\frac{{{a}}}{{{1000 + b}}}", f"\\frac{{{d}}}{{{1000 + b}}}"),
            (f"{a}.{b}", f"{d}.{b}"),
            (f"{a}\\sqrt{{{b}}}", f"{d}\\sqrt{{{b}}}"),
            (f"\\{{{a + 2000}, {b}\\}}", f"\\{{{b}, {d + 2000}\\}}"),
            (f"{a}x^2 + {b}x + {c}", f"{d}x^2 + {b}x + {c}"),
        )[i // 2 % 6]
        text = f"First we find {b} and {c}. With these, step {i} gives the rest."
        pairs.append((f"{text} The final answer is $\\boxed{{{answer}}}$.", truth))
        scores.append(float(right))
    return pairs, scores


def plain(pair: Pair) -> float:
    """What verl's own scorer does, without the limits of Math-Verify's that are for main threads only."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    answer = parse(pair[0], (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
    truth = parse(f"\\boxed{{{pair[1]}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    return float(verify(truth, answer, timeout_seconds=None))


def send_plain(pair: Pair, pipe: Connection) -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pipe.send(plain(pair))


def fresh_process(method: str, pair: Pair) -> float:
    """A process that scores one answer and ends."""
    context: Any = multiprocessing.get_context(method)  # of a type that is known from a literal name only
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_plain, args=(pair, sender))
    process.start()
    sender.close()
    score = receiver.recv()
    process.join()
    return score


def upstream_scorer(base_tree: Path, directory: str) -> ModuleType:
    """The scorer of an unpatched verl, in a module that its processes can import without all of verl."""
    shutil.copy(base_tree / "verl/utils/reward_score/math_verify.py", f"{directory}/upstream_math_verify.py")
    sys.path.insert(0, directory)
    return importlib.import_module("upstream_math_verify")


def end_processes(scorer: ModuleType) -> None:
    """Ends the processes of verl's own scorer; those with an answer that hangs would keep this one from ending."""
    for process in list(scorer._get_pool()._processes.values()):
        process.kill()


def print_answers(ways: dict[str, Callable[[list[Pair]], list[float]]]) -> None:
    """How each way scores pairs from public threads, and answers in the forms in which models write them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/rewards"))
    from answer_forms import FORMS, QUIRKS, REPAIRED
    from public_pairs import PAIRS

    forms = [form for group in (FORMS | REPAIRED).values() for form in group]
    forms += [(answer, truth, deserved) for answer, truth, deserved, *_ in QUIRKS]
    public = [(f"\\boxed{{{answer}}}", truth, deserved) for answer, truth, deserved, _ in PAIRS]
    for kind, entries in ("pairs from public threads", public), ("of our own answer forms", forms):
        found = {name: way([(answer, truth) for answer, truth, _ in entries]) for name, way in ways.items()}
        print(f"\n{len(entries)} {kind}\n| scored by | right answers with 1 | wrong answers with 0 |\n|---|---|---|")
        for name, scores in found.items():
            cells = []
            for deserved in 1, 0:
                given = [score for score, (_, _, due) in zip(scores, entries, strict=True) if due == deserved]
                cells.append(f"{given.count(deserved)} of {len(given)}")
            print(f"| {name} | {' | '.join(cells)} |")
        for (answer, truth, deserved), *scores in zip(entries, *found.values(), strict=True):
            if len(set(scores)) > 1:
                differing = " and ".join(f"{score:g}" for score in scores)
                print(f"{answer!r} for {truth!r}, which deserves {deserved:g}, gets {differing}")


def processor_time() -> float:
    """Of this process and all its children, living and dead, in seconds."""
    import psutil

    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + dead.ru_utime + dead.ru_stime + sum(t.user + t.system for t in living)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=2.0, help="seconds, for the hanging answers")
    parser.add_argument("--hanging", default=HANGING, help=f"what is in the box of an answer that hangs: {HANGING}")
    parser.add_argument("--fresh", type=int, default=20, help="answers scored by a fresh process each; 0: not measured")
    parser.add_argument("--base-tree", type=Path, help="an unpatched verl 0.9: its own scorer is measured, too")
    arguments = parser.parse_args()
    if min(arguments.answers, arguments.rounds, arguments.workers, arguments.limit) <= 0:
        parser.error("all numbers but --fresh must be greater than 0")

    from verl.utils.reward_score import guarded_math_verify

    directory = tempfile.TemporaryDirectory()
    upstream = None if arguments.base_tree is None else upstream_scorer(arguments.base_tree, directory.name)
    if upstream is not None and not hasattr(upstream, "_get_pool"):
        parser.error(f"the scorer in {arguments.base_tree} has no pool: it is not that of verl 0.9")

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    options = {"workers": arguments.workers, "timeout": arguments.limit}
    cores = min(arguments.workers, len(os.sched_getaffinity(0)))
    pairs, expected = ordinary_answers(arguments.answers)

    def in_batches(chosen: list[Pair]) -> list[float]:
        answers, truths = zip(*chosen, strict=True)
        return guarded_math_verify.compute_score_batch([], list(answers), list(truths), **options)

    def from_threads(chosen: list[Pair]) -> list[float]:
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda pair: guarded_math_verify.compute_score(*pair, **options), chosen))

    def by_upstream(chosen: list[Pair]) -> list[float]:
        assert upstream is not None  # else it is not a way
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda pair: upstream.compute_score(*pair, timeout=arguments.limit), chosen))

    def in_fresh_processes(method: str, chosen: list[Pair]) -> list[float]:
        return [fresh_process(method, pair) for pair in chosen]

    plain_name = "plain calls in this process"
    ways: dict[str, tuple[Callable[[list[Pair]], list[float]], int, int]] = {
        plain_name: (lambda chosen: [plain(pair) for pair in chosen], len(pairs), 1),
        "pool, as a batch": (in_batches, len(pairs), cores),
        f"pool, one by one from {THREADS} threads": (from_threads, len(pairs), cores),
    }
    pools = list(ways)[1:]
    if upstream is not None:
        size = upstream._get_pool()._max_workers
        name = f"verl's own pool of {size}, one by one from {THREADS} threads"
        ways[name] = (by_upstream, len(pairs), min(size, len(os.sched_getaffinity(0))))
        pools.append(name)
    if arguments.fresh > 0:
        for method, name in ("spawn", "spawned"), ("fork", "forked"):
            ways[f"a fresh process, {name}"] = (
                partial(in_fresh_processes, method),
                min(arguments.fresh, len(pairs)),
                1,
            )
    for way, n, _ in ways.values():
        way(pairs[: min(n, 500)])
    wall: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, (way, n, _) in ways.items():
            begun, begun_work = time.perf_counter(), processor_time()
            scores = way(pairs[:n])
            wall[name].append((time.perf_counter() - begun) / len(scores))
            work[name].append((processor_time() - begun_work) / len(scores))
            if scores != expected[:n]:
                raise SystemExit(f"{name}: wrong scores")

    print(
        f"{arguments.answers} ordinary answers, {arguments.workers} workers, {cores} cores, {arguments.rounds} rounds"
    )
    print("| scored by | answers/s | of plain | CPU ms | CPU of plain |\n|---|---|---|---|---|")
    for name, (_, _, used) in ways.items():
        of_plain = median(p / (w * used) for p, w in zip(wall[plain_name], wall[name], strict=True))
        of_work = median(p / w for p, w in zip(work[plain_name], work[name], strict=True))
        speed, cost = 1 / median(wall[name]), 1000 * median(work[name])
        print(f"| {name} | {speed:.1f} | {of_plain:.1%} | {cost:.2f} | {of_work:.1%} |", flush=True)
    if upstream is not None:
        ours, theirs = pools[1:]
        faster = median(t / o for t, o in zip(wall[theirs], wall[ours], strict=True))
        cheaper = median(o / t for t, o in zip(work[theirs], work[ours], strict=True))
        print(
            f"One by one, the pool is {faster:.2f} times as fast as verl's own, at {cheaper:.2f} of the processor time."
        )
    print_answers({name: ways[name][0] for name in (plain_name, *pools[1:])})
    for fresh in [name for name in ways if name not in (plain_name, *pools)]:
        faster = median(f / w for f, w in zip(wall[fresh], wall["pool, as a batch"], strict=True))
        cheaper = median(f / w for f, w in zip(work[fresh], work["pool, as a batch"], strict=True))
        print(f"The batch is {faster:.0f} times as fast as {fresh}, at 1/{cheaper:.0f} of the processor time.")

    hangs = range(50, len(pairs), 100)
    for index in hangs:
        pairs[index], expected[index] = (f"The answer is \\boxed{{{arguments.hanging}}}.", "7"), 0.0
    bound = len(hangs) * arguments.limit / arguments.workers
    print(f"\nWith {len(hangs)} answers that hang, limit {arguments.limit:g} s")
    print("| scored by | seconds | hangs x limit / workers | without the hangs | the rest | others over the limit |")
    print("|---|---|---|---|---|---|")
    for name in pools:
        begun = time.perf_counter()
        scores = ways[name][0](pairs)
        seconds = time.perf_counter() - begun
        over = sum(score != right for score, right in zip(scores, expected, strict=True))
        without = median(wall[name]) * len(pairs)
        rest = seconds - bound - without
        print(f"| {name} | {seconds:.1f} | {bound:.1f} | {without:.1f} | {rest:.1f} | {over} |", flush=True)
    if upstream is not None:
        end_processes(upstream)


if __name__ == "__main__":
    main()
