# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of a benchmark in parallel processes, each on one core, and the file that keeps what they found."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from grpo_run import Settings, Usual, measure_usual
from sums_task import learn_from_examples
from torch import Tensor


def arguments_of(parser: argparse.ArgumentParser, rows: Collection[str]) -> argparse.Namespace:
    """The command's arguments, with those that all benchmarks of this kind have; `rows` are those of the table."""
    parser.add_argument("--results", type=Path, required=True, help="JSON file of the runs; read first if it exists")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds (default: 0 1 2 3 4)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on one core (default: 1)")
    parser.add_argument("--rows", nargs="+", metavar="ROW", default=[*rows], help="rows of the table (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in rows]:
        sys.exit(f"unknown rows {unknown}: choose from {[*rows]}")
    return arguments


class Results:
    """Finished runs, in a JSON file that is written after each of them.

    Args:
        path (Path): The file; the seeds' start weights are kept beside it.
        settings (dict): What the runs were made with.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        settings = json.loads(json.dumps(settings))
        self.runs: dict[str, Any] = {}
        self._settings = settings
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["settings"] != settings:
                sys.exit(f"{path} holds runs of other settings: give another file, or remove it")
            self.runs = kept["runs"]
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, found: Any) -> None:
        self.runs[name] = found
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps({"settings": self._settings, "runs": self.runs}))
        unfinished.replace(self.path)


def key_of(*parts: Any) -> str:
    return " | ".join(map(str, parts))


def run_all(
    results: Results, settings: Settings, tasks: dict[str, tuple[int, Any]], work: Callable[..., Any], jobs: int
) -> None:
    """Runs those tasks that `results` does not have.

    Args:
        results (Results): Gets what each task found.
        settings (Settings): Those of the start weights and the usual norms.
        tasks (dict): By name the seed and what else `work` gets.
        work (Callable): Called in another process with (start weights, seed, usual norms, that); importable.
        jobs (int): Processes.
    """
    missing = {name: task for name, task in tasks.items() if name not in results.runs}
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    starts = results.path.with_suffix(".starts")
    starts.mkdir(exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool:
        _wait(pool.submit(_learn, starts, seed, settings) for seed in {seed for seed, _ in missing.values()})
        futures = {
            pool.submit(_work, work, starts, seed, settings, what): name for name, (seed, what) in missing.items()
        }
        try:
            for done, future in enumerate(as_completed(futures), 1):
                results.add(futures[future], future.result())
                print(f"{done} of {len(futures)}: {futures[future]}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _wait(futures: Iterable[Any]) -> None:
    for future in list(futures):
        future.result()


def _start_worker() -> None:
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _learn(folder: Path, seed: int, settings: Settings) -> None:
    path = folder / f"{seed}.pt"
    if not path.exists():
        weights = learn_from_examples(seed, settings.skill)
        usual = measure_usual(settings, weights, seed)
        torch.save((weights, dataclasses.asdict(usual)), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


@cache
def _start(folder: Path, seed: int) -> tuple[dict[str, Tensor], Usual]:
    weights, usual = torch.load(folder / f"{seed}.pt", weights_only=True)
    return weights, Usual(**usual)


def _work(work: Callable[..., Any], folder: Path, seed: int, settings: Settings, what: Any) -> Any:
    weights, usual = _start(folder, seed)
    return work(settings, weights, seed, usual, what)
