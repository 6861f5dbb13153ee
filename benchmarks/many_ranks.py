# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a search costs the host on many ranks, while all GPUs wait.

One process runs what each of W ranks runs, the search of a spike and its event; there are no other ranks and no
network:

- Simulated: what other ranks send (objects are pickled and unpickled in that time), and the norms that a pass
  measures. A token's gradient has a random direction; the time of the passes themselves is not in the figures.
- Each rank has 8 micro-batches of 4 rows of 1,024 tokens (32k); the model has 94 layers. All ranks have the same ones.
- `collapse`: the gradients of all tokens of all micro-batches are about five times τ.
- `spike`: one micro-batch is over its threshold, by three tokens that suspicion does not point at.

Seconds of one core's time: before the first pass, from the exchange of the micro-batches' norms on; of a pass, the
median and the largest of those between one pass and the next; and from the last pass to the event. At most --passes
are made. *Received* is what the collective calls bring to a rank, each object padded to the longest where torch pads;
*memory* how much more the process had at most; *line* the event without texts, as in spikes.jsonl.

    PYTHONPATH=. build/venv/bin/python benchmarks/many_ranks.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gradloc import GradLocConfig
from gradloc.evidence.event import Done, build_event
from gradloc.evidence.writer import jsonable
from gradloc.fsdp import collectives
from gradloc.lines import Where
from gradloc.measure.micro_batch import MicroBatch, MicroBatchName
from gradloc.measure.mini_batch import MiniBatch, OrdinaryGradient
from gradloc.measure.passes import LocalMeter, MakeProbe, Passes, WatchedModel
from gradloc.search.investigation import TimeLimit, investigate

Record = dict[str, Any]

KINDS = ("collapse", "spike")
LAYERS, MICRO_BATCHES, ROWS, LENGTH = 94, 8, 4, 1024
THRESHOLD = 10.0  # an ordinary token has a norm of about 1, none of 10
SPIKE: MicroBatchName = (1, 3)
CULPRITS = (100, 1500, 4000)
CPU = torch.device("cpu")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", metavar="W", default=[8, 64, 512, 2048], help="8 64 512 2048")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: both")
    parser.add_argument("--passes", type=int, default=16, help="the budget of passes (default: 16)")
    parser.add_argument("--json", type=Path, help="write all figures to this file, too")
    args = parser.parse_args()
    if min(args.ranks) < 2 or args.passes < 1:
        parser.error("--ranks must be at least 2, --passes at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    records = []
    print("| W | event | s before the first pass | s a pass (largest) | s after the last | passes | culprits ", end="")
    print("| MB received | MB memory | kB line |\n|---|---|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for kind in args.kinds:
            # A process each, for its memory.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                cost = pool.submit(cost_of_search, ranks, kind, args.passes).result()
            records.append(record := {"ranks": ranks, "kind": kind} | cost)
            between = record["between"] or [0.0]
            seconds = f"{statistics.median(between):.2f} ({max(between):.2f}) | {record['after']:.2f}"
            found = f"{record['passes']} | {record['culprits']} | {record['received'] / 1e6:.1f}"
            found += f" | {record['memory'] / 1e6:.0f} | {record['line'] / 1e3:.0f}"
            print(f"| {ranks:,} | {kind} | {record['before']:.2f} | {seconds} | {found} |", flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))


def cost_of_search(ranks: int, kind: str, passes: int) -> Record:
    """Rank 0's part of a search and its event: the host's seconds before, between and after its passes, and bytes."""
    torch.set_num_threads(1)
    with Simulation(ranks) as simulation:
        model = WatchedModel(nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(LAYERS)), _no_forward, CPU)
        of_most = micro_batches(5 * THRESHOLD if kind == "collapse" else 1.0)
        of_one = micro_batches(1.0, CULPRITS) if kind == "spike" else of_most

        def of_rank(rank: int) -> list[MicroBatch]:
            return [of_one[i] if (rank, i) == SPIKE else each for i, each in enumerate(of_most)]

        model.meter.close()
        model.meter = meter = SimulatedMeter(model.module, of_rank)
        mini_batch = MiniBatch(model, of_rank(0), 1.0, global_norm=1.0)
        mini_batch.gather("unit", torch.zeros(0, dtype=torch.float64))
        simulation.figures = [MiniBatch(model, of_rank(rank), 1.0)._own_figures() for rank in range(SPIKE[0] + 1)]
        config = GradLocConfig(grad_norm_threshold=THRESHOLD, bisect_budget_steps=passes)
        simulation.received, had = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.process_time()
        findings = investigate(mini_batch, THRESHOLD, config, 1.0, TimeLimit(3600.0))
        where: Where = {"global_step": 1, "epoch": 0, "mini_batch": 0}
        event = build_event(mini_batch, findings, OrdinaryGradient(), where, "log", Done(False), time.perf_counter())
        ended = time.process_time()
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - had)
    before, *between, after = (
        stop - start for start, stop in zip([begun, *meter.times[1::2]], [*meter.times[::2], ended], strict=True)
    )
    cost = {"before": before, "between": between, "after": after, "received": simulation.received, "memory": memory}
    found = {"passes": findings.passes, "culprits": len(findings.culprits), "diagnosis": findings.diagnosis}
    return {**cost, **found, "line": len(json.dumps(jsonable(event)))}


class Simulation:
    """As if this were rank 0 of so many, all of which have the same; counts the bytes that it would receive."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.received = ranks, 0
        self.figures: list[Tensor] = []  # those of the first ranks' micro-batches
        self._patch = mock.patch.multiple(
            collectives,
            world_size=lambda: ranks,
            rank=lambda: 0,
            gather=self._gather,
            gather_of_first=self._gather_of_first,
            sum_counts=self._sum_counts,
            gather_objects=self._gather_objects,
            broadcast=self._broadcast,
        )

    def __enter__(self) -> Simulation:
        self._patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()

    def _gather(self, values: Tensor) -> Tensor:
        self.received += self.ranks * values.nbytes
        gathered = values.repeat(self.ranks, *[1] * values.dim())
        if self.figures and values.shape == self.figures[0].shape:
            gathered[: len(self.figures)] = torch.stack(self.figures)
        return gathered

    def _gather_of_first(self, values: Tensor, count: int) -> Tensor:
        self.received += 2 * count * values.nbytes
        return values.repeat(count, *[1] * values.dim())

    def _sum_counts(self, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        counts = make()
        self.received += 2 * counts.nbytes
        return counts * self.ranks

    def _gather_objects(self, own: Any) -> list[Any]:
        sent = pickle.dumps(own)
        self.received += self.ranks * len(sent)
        return [own, *(pickle.loads(sent) for _ in range(1, self.ranks))]

    def _broadcast(self, make: Callable[[], Any], sender: int) -> Any:
        sent = pickle.dumps(make())
        self.received += len(sent)
        return pickle.loads(sent)


def micro_batches(size: float, culprits: Sequence[int] = ()) -> list[MicroBatch]:
    """A rank's, with ordinary tokens whose norms are about `size`; the culprits are large enough for a spike."""
    found, shape = [], (ROWS, LENGTH)
    for index in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(index)
        weight = torch.full(shape, 1 / (MICRO_BATCHES * ROWS * LENGTH))
        log_prob = torch.rand(shape, generator=generator).log()
        coefficient = size * weight * torch.randn(shape, generator=generator)
        norms = coefficient.abs() * (1 - log_prob.exp()) * (0.5 + torch.rand(shape, generator=generator))
        norms.view(-1)[list(culprits)] = 1.2 * THRESHOLD * norms.numel() ** 0.5 * weight[0, 0]
        tokens = {"response_mask": torch.ones(shape), "weight": weight, "log_prob": log_prob}
        tokens |= {"coefficient": coefficient, "advantage": coefficient / weight, "token_id": torch.ones(shape).long()}
        tokens |= {f"{kind}_log_prob": log_prob for kind in ("old", "ref", "rollout")}
        squares = (norms.double().square().sum() / LAYERS).repeat(LAYERS)
        rows, state = list(range(index * ROWS, (index + 1) * ROWS)), (torch.get_rng_state(), None)
        found.append(MicroBatch({"norms": norms}, rows, state, tokens, squares))
    return found


class SimulatedMeter(LocalMeter):
    """Returns the norms of probes without a pass, and notes when each would have begun and ended."""

    def __init__(self, module: nn.Module, of_rank: Callable[[int], list[MicroBatch]]) -> None:
        super().__init__(module, CPU)
        self.times: list[float] = []
        self._of_rank = of_rank

    def obtain(
        self, names: Sequence[MicroBatchName], own: Sequence[MicroBatch], scale: float
    ) -> dict[MicroBatchName, MicroBatch]:
        found: dict[MicroBatchName, MicroBatch] = {}
        for name in names:
            found |= super().obtain([name], self._of_rank(name[0]), scale)
        return found

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        self.times.append(time.process_time())
        passes.count += 1
        squares = torch.stack([square_of(probe) for probe in probes])
        collectives.gather_of_first(squares[:1].repeat(LAYERS), len(probes))
        self.times.append(time.process_time())
        return squares.unsqueeze(1).repeat(1, LAYERS) / LAYERS


def square_of(probe: MakeProbe) -> Tensor:
    """The squared norm of a probe's gradient."""
    (subset,) = probe().values()
    return (subset.micro_batch.inputs["norms"].double() * subset.keep).square().sum()


def _no_forward(*_: Any) -> Any:
    raise NotImplementedError("passes are simulated")


if __name__ == "__main__":
    main()
