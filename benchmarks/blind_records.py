# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What blind.py records of a run, so that other rules can be tried on it without training again.

A recording is a list of updates: what the sums of each mini-batch are made of, the optimizer's figures, the update's
rows, and the events before they were judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from blind_world import World

from gradloc.adapters import update_evidence
from gradloc.metrics import RunFacts


@contextlib.contextmanager
def recorded(world: World, path: Path | None) -> Iterator[None]:
    """Records the updates of a world within this context; nothing where there is no path."""
    if path is None:
        yield
        return
    updates: list[dict[str, Any]] = []
    own_figures, take_in, start_update = RunFacts.own_figures, RunFacts.take_in, RunFacts.start_update
    judged, take_in_rows = update_evidence.judged, update_evidence.UpdateEvidence.take_in_rows
    step = world.optimizer.step

    def start(self: Any, global_step: int | None, is_current: bool = False) -> None:
        updates.append({"step": global_step, "mini_batches": [], "rows": [], "events": [], "is_current": is_current})
        start_update(self, global_step, is_current)

    def figures(self: Any, gradient: Any, where: Any) -> Any:
        found = own_figures(self, gradient, where)
        norms, micro_batches = gradient.model.reduced_norms, gradient.micro_batches
        updates[-1]["mini_batches"].append(
            {
                "tokens": [{name: value.clone() for name, value in each.tokens.items()} for each in micro_batches],
                "modes": [each.loss_agg_mode for each in micro_batches],
                "scale": gradient.scale,
                "squares": torch.stack([each.squares for each in micro_batches]),
                "layers": norms.layers,
                "numels": norms.numels,
                "weights": norms.own_squares(with_weights=True)[: len(norms.layers)],
                "rate": None,
            }
        )
        return found

    def take(self: Any, of_ranks: Any, where: Any, gradient: Any) -> None:
        take_in(self, of_ranks, where, gradient)
        of = updates[-1]["mini_batches"][-1]
        squares = gradient.squared_norms
        of |= {"where": dict(where), "reduced": None if squares is None else squares.clone()}

    def stepped(*args: Any, **options: Any) -> Any:
        one_dimensional = {name: each for name, each in world.model.named_parameters() if each.dim() == 1}
        before = {name: each.detach().clone() for name, each in one_dimensional.items()}
        gradients = {name: each.grad.clone() for name, each in one_dimensional.items() if each.grad is not None}
        found = step(*args, **options)
        after = {name: each.detach().clone() for name, each in one_dimensional.items()}
        rate = world.optimizer.param_groups[0]["lr"]
        updates[-1]["mini_batches"][-1] |= {"rate": rate, "before": before, "gradients": gradients, "after": after}
        return found

    def judge(line: Any, answer: Any = None, rows: Any = None) -> Any:
        updates[-1]["events"].append((dict(line), answer, rows))
        return judged(line, answer, rows)

    def rows_in(self: Any, data: Any) -> None:
        take_in_rows(self, data)
        updates[-1]["rows"] += data.rows
        names = ("uid", "input_ids", "responses", "attention_mask", "token_level_scores", "token_level_rewards")
        updates[-1].setdefault("data", []).append({n: data.columns[n] for n in names if n in data.columns})

    with (
        mock.patch.object(RunFacts, "start_update", start),
        mock.patch.object(RunFacts, "own_figures", figures),
        mock.patch.object(RunFacts, "take_in", take),
        mock.patch.object(update_evidence, "judged", judge),
        mock.patch.object(update_evidence.UpdateEvidence, "take_in_rows", rows_in),
        mock.patch.object(world.optimizer, "step", stepped),
    ):
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(updates, path)
