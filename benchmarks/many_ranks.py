# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a search costs the host on many ranks, while all GPUs wait.

One process runs what each of W ranks runs, the search of a spike; there are no other ranks and no network:

- Simulated: what other ranks send (pickled here, and unpickled in time), and the norms that a pass measures. A token's
  gradient has a random direction; the time of the passes themselves is not in the figures.
- Each rank has 8 micro-batches of 4 rows of 1,024 tokens (32k); the model has 94 layers. All ranks have the same ones.
- `collapse`: the gradients of all tokens of all micro-batches are about five times τ.
- `spike`: one micro-batch is over its threshold, by three tokens that suspicion does not point at.

Seconds of one core's time: before the first pass, from the exchange of the micro-batches' norms on; of a pass, the
median and the largest of those between one pass and the next; and from the last pass to the findings. At most --passes
are made.

    PYTHONPATH=. build/venv/bin/python benchmarks/many_ranks.py
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gradloc import GradLocConfig
from gradloc.fsdp import collectives
from gradloc.measure.micro_batch import MicroBatch, MicroBatchName
from gradloc.measure.mini_batch import MiniBatch
from gradloc.measure.passes import LocalMeter, MakeProbe, Passes, WatchedModel
from gradloc.search.findings import Findings
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
    torch.set_num_threads(1)
    records = []
    print("| W | event | s before the first pass | s a pass (largest) | s after the last | passes | culprits |")
    print("|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for kind in args.kinds:
            records.append(record := {"ranks": ranks, "kind": kind} | search_seconds(ranks, kind, args.passes))
            between = record["between"] or [0.0]
            seconds = f"{statistics.median(between):.2f} ({max(between):.2f}) | {record['after']:.2f}"
            found = f"{record['passes']} | {record['culprits']}"
            print(f"| {ranks:,} | {kind} | {record['before']:.2f} | {seconds} | {found} |", flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))


def search_seconds(ranks: int, kind: str, passes: int) -> Record:
    """One search: the host's seconds before, between and after its passes, and what it found."""
    meter, findings, begun, ended = search(ranks, kind, passes)
    times = [begun, *meter.times, ended]
    before, *between, after = [stop - start for start, stop in zip(times[::2], times[1::2], strict=True)]
    found = {"passes": findings.passes, "culprits": len(findings.culprits), "diagnosis": findings.diagnosis}
    return {"before": before, "between": between, "after": after, **found}


def search(ranks: int, kind: str, passes: int) -> tuple[SimulatedMeter, Findings, float, float]:
    """Runs rank 0's part of a search; returns when it began and ended, too."""
    with simulated_collectives(ranks):
        model = WatchedModel(nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(LAYERS)), _no_forward, CPU)
        of_most = micro_batches(5 * THRESHOLD if kind == "collapse" else 1.0)
        of_one = micro_batches(1.0, CULPRITS) if kind == "spike" else of_most

        def of_rank(rank: int) -> list[MicroBatch]:
            return [of_one[i] if (rank, i) == SPIKE else each for i, each in enumerate(of_most)]

        model.meter.close()
        model.meter = meter = SimulatedMeter(model.module, of_rank)
        mini_batch = MiniBatch(model, of_rank(0), 1.0, global_norm=1.0)
        own_figures = [MiniBatch(model, of_rank(rank), 1.0)._own_figures() for rank in range(3)]
        sent = [pickle.dumps((each, None)) for each in own_figures]
        of_others = [sent[min(rank, 2)] for rank in range(1, ranks)]
        config = GradLocConfig(grad_norm_threshold=THRESHOLD, bisect_budget_steps=passes)
        with mock.patch.object(collectives, "gather_objects", lambda own: [own, *map(pickle.loads, of_others)]):
            begun = time.process_time()
            findings = investigate(mini_batch, THRESHOLD, config, 1.0, TimeLimit(3600.0))
            return meter, findings, begun, time.process_time()


def simulated_collectives(ranks: int) -> Any:
    """As if this were rank 0 of so many, all of which have the same."""
    return mock.patch.multiple(
        collectives,
        world_size=lambda: ranks,
        rank=lambda: 0,
        gather=lambda values: values.expand(ranks, *values.shape),
        broadcast=lambda make, sender: make(),
    )


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
        tokens |= {"coefficient": coefficient, "advantage": coefficient / weight}
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
        self._sent: dict[int, bytes] = {}  # by micro-batch

    def obtain(
        self, names: Sequence[MicroBatchName], own: Sequence[MicroBatch], scale: float
    ) -> dict[MicroBatchName, MicroBatch]:
        found = {}
        for rank, index in names:
            micro_batch = self._of_rank(rank)[index]
            if id(micro_batch) not in self._sent:
                self._sent[id(micro_batch)] = pickle.dumps(micro_batch.portable(scale))
            found[rank, index] = pickle.loads(self._sent[id(micro_batch)])
        return found

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        self.times.append(time.process_time())
        passes.count += 1
        squares = torch.stack([square_of(probe) for probe in probes])
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
