# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The event of a recorded spike: the tokens' figures are known, and nothing was searched."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from ..judge.rules import Medians, classify
from ..measure.alignment import alignment_warning
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..measure.token_weights import movable
from .event import whole_event
from .ordinary import medians_of
from .token_facts import response_evidence, token_evidence

# How many suspected tokens an event lists.
SUSPECTED = 16


def recorded_event(
    micro_batches: Mapping[MicroBatchName, MicroBatch],
    *,
    where: Mapping[str, Any],
    threshold: float,
    global_norm: float,
    global_threshold: float,
    world_size: int,
    loss_scale: float = 1.0,
    warnings: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The event of a spike of which the tokens' figures were recorded. No collective call.

    Args:
        micro_batches (Mapping[MicroBatchName, MicroBatch]): What `MicroBatch.portable` returned for each; the medians
            are those of their tokens alone.
        where (Mapping): `global_step`, `epoch`, `mini_batch` and, if known, `steps_since_resume`.
        threshold (float): τ.
        global_norm (float): The norm of the reduced gradient; NaN if it is not known.
        global_threshold (float): The threshold of that norm.
        world_size (int): The number of data-parallel ranks.
        loss_scale (float): The loss scale of fp16 in training.
        warnings (Sequence[Mapping]): What `RunChecks.warnings` returned. Positions of log-probs are checked here.
    """
    medians = medians_of(list(micro_batches.values()))
    found = alignment_warning([each.tokens for each in micro_batches.values()])
    fields = {
        "time": datetime.now(timezone.utc).isoformat(),
        "steps_since_resume": None,
        **where,
        "passes": 0,
        "action": "log",
        "applied": False,
        "trigger": {"kind": "global", "norm": global_norm, "threshold": global_threshold},
        "threshold": threshold,
        "global_norm": global_norm,
        "global_threshold": global_threshold,
        "until": "explained",
        "diagnosis": "unsearched",
        "explained": False,
        "more_tokens": None,
        "micro_batches": sum(bool(movable(each.tokens).any()) for each in micro_batches.values()),
        "units": [],
        "culprits": [],
        "diffuse": [],
        "without_tokens": None,
        "complete": False,
        "open_segments": [],
        "ordinary_layer_norms": None,
        "error": None,
        **medians,
        "suspected": suspected_tokens(micro_batches, medians),
        "suspected_ranks": sorted({rank for rank, _ in micro_batches}),
        "budget": 0,
        "budget_seconds": None,
        "out_of_time": False,
        "seconds": 0.0,
        "search": "recorded",
        "world_size": world_size,
        "loss_scale": loss_scale,
    }
    return whole_event(fields, {}, [*warnings, *([] if found is None else [found])])


def suspected_tokens(micro_batches: Mapping[MicroBatchName, MicroBatch], medians: Medians) -> list[dict[str, Any]]:
    """The tokens with the largest suspicion, largest first; one that is not finite counts as infinite.

    Args:
        micro_batches (Mapping[MicroBatchName, MicroBatch]): As `recorded_event` takes them.
        medians (Mapping): What `medians_of` returned.
    """
    found: list[tuple[float, MicroBatchName, int, int]] = []
    for name, micro_batch in micro_batches.items():
        tokens = micro_batch.tokens
        values = torch.where(tokens["suspicion"].isfinite(), tokens["suspicion"].double(), math.inf)
        values = torch.where(movable(tokens), values, -math.inf)
        most, places = values.flatten().topk(min(SUSPECTED, values.numel()))
        width = values.shape[1]
        found += [
            (value, name, place // width, place % width)
            for value, place in zip(most.tolist(), places.tolist(), strict=True)
            if value > -math.inf
        ]
    found.sort(key=lambda each: -each[0])
    return [
        _suspected(micro_batches[name], name, row, position, medians) for _, name, row, position in found[:SUSPECTED]
    ]


def _suspected(
    micro_batch: MicroBatch, name: MicroBatchName, row: int, position: int, medians: Medians
) -> dict[str, Any]:
    found = {
        "rank": name[0],
        "micro_batch": name[1],
        "row": micro_batch.rows[row],
        "position": position,
        **token_evidence(micro_batch.tokens, row, position),
        **response_evidence(micro_batch.tokens, row, position),
    }
    # Suspicion is not finite where the log-prob or the coefficient is not, and then no gradient is. Of the layers
    # nothing is known.
    sources = classify({**found, "grad_norm": found["suspicion"], "layer_norms": {}}, medians)
    return {**found, "source": sources[0], "sources": sources}
