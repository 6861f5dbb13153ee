# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the bundle of a recorded spike: its micro-batches, before anything was searched. It needs safetensors."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import limits
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..measure.token_weights import movable, square_weight
from . import layout, naming
from .bundle_files import bundle_files, bundles_in, bytes_of_bundles, write_bundle_files
from .layout import NotReplayableError, Row, SavedMicroBatch


class NothingMovesError(NotReplayableError):
    """No token has a gradient, as where all responses of each prompt have the same reward: nothing is missing."""


def write_recorded_bundle(
    directory: Path,
    event: Mapping[str, Any],
    micro_batches: Mapping[MicroBatchName, MicroBatch],
    rows_of: Callable[[Mapping[str, Any]], list[Row]],
    context: Mapping[str, Any],
    suffix: str = "",
    most: int | None = None,
) -> str:
    """Writes `<directory>/replay/<stem><suffix>`, whole or not at all. No collective call.

    Where there are more micro-batches than a bundle may have, it gets those with the largest suspicion for their
    weights, which is an estimate of their norms over their thresholds; `left_out` counts the others. Micro-batches
    without a token that can move are not among them: their gradients are zero.

    Args:
        micro_batches (Mapping[MicroBatchName, MicroBatch]): The micro-batches; their tokens have `suspicion`.
        suffix (str): The end of the folder's name, by which the parts of several ranks differ.
        most (int, optional): How many bundles with this suffix there may be.

    Returns:
        str: The bundle's folder, relative to the evidence.

    Raises:
        NothingMovesError: No token has a gradient.
        NotReplayableError: It would be over a limit, or a replay could not compute it.
        OSError: It cannot be written.
    """
    folder = directory / naming.FOLDER
    kept_before = [path for path in bundles_in(folder) if path.name.endswith(suffix)]
    if most is not None and len(kept_before) >= most:
        raise NotReplayableError(
            f"{folder} has {len(kept_before)} of this rank, of {most} (spike_replay): move some away"
        )
    moving = {
        name: SavedMicroBatch(rows_of(each.inputs), each.tokens, each.rng_state)
        for name, each in micro_batches.items()
        if bool(movable(each.tokens).any())
    }
    if not moving:
        raise NothingMovesError("it has no token with a gradient")
    # Ranks write at the same time, so each has a share of its own.
    share = limits.TOTAL_BYTES // event["world_size"] if suffix else limits.TOTAL_BYTES
    if bytes_of_bundles(folder, suffix) >= share:
        raise NotReplayableError(f"the bundles {folder}/*{suffix} take {share:,} bytes already: move some away")
    kept = _largest(moving)
    entries = {
        name: {
            "rows": micro_batches[name].rows,
            "norm": None,
            "layer_norms": {},
            "threshold": event["threshold"] * math.sqrt(float(square_weight(saved.tokens))),
        }
        for name, saved in kept.items()
    }
    findings = {"layers": [], "left_out": len(moving) - len(kept), "measured": []}
    return write_bundle_files(folder, bundle_files(event, kept, entries, findings, context), event, suffix)


def _largest(micro_batches: Mapping[MicroBatchName, SavedMicroBatch]) -> dict[MicroBatchName, SavedMicroBatch]:
    """As many as a bundle may have, in their order."""
    ranked = sorted(micro_batches, key=lambda name: -_estimate(micro_batches[name].tokens))
    kept: set[MicroBatchName] = set()
    size = 0
    for name in ranked[: limits.RECORDED_MICRO_BATCHES]:
        size += sum(tensor.nbytes for tensor in layout.to_tensors(micro_batches[name]).values())
        if kept and size > limits.BUNDLE_BYTES:
            break
        kept.add(name)
    return {name: saved for name, saved in micro_batches.items() if name in kept}


def _estimate(tokens: Mapping[str, Tensor]) -> float:
    """An estimate of ‖g‖/sqrt(Σ w²) in units of the model's own; infinite where a token is not finite."""
    suspicion = torch.where(movable(tokens), tokens["suspicion"].double(), 0.0)
    found = math.sqrt(float(suspicion.square().sum())) / math.sqrt(float(square_weight(tokens)))
    return found if math.isfinite(found) else math.inf
