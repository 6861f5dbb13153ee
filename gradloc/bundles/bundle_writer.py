# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps a bundle of each event while training runs. It needs safetensors, which comes with transformers."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import limits
from ..evidence.patient_disk import PATIENCE, PatientDisk
from ..fsdp import collectives
from ..guarded import guarded, warn_once
from ..layers.layer_clip import LayerClip
from ..measure.figures import AllFigures, suspects
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..measure.mini_batch import MiniBatch
from ..search.findings import Findings
from ..token_clip.token_clip import TokenClip
from . import naming
from .bundle_files import bundle_files, bundles_in, bytes_of_bundles, write_bundle_files
from .layout import Row, SavedMicroBatch


class BundleWriter:
    """Writes bundles to `<directory>/replay`, on rank 0 alone.

    With the local meter, the search has already sent these micro-batches to every rank, so a bundle takes no more
    communication. With the reduced meter, their owners send them. So a bundle is complete on the node of rank 0,
    whether or not the nodes share a folder. A disk that does not answer keeps the other ranks waiting for `PATIENCE`
    seconds at most.

    Args:
        most (int): The maximum number of bundles in it. The first ones are kept: later spikes may be consequences.
        rows_of (Callable): Converts the inputs of a micro-batch to its samples. Raises `NotReplayableError` if a
            replay could not compute them.
        context (Callable): Returns what the trainer knows, ready for `jsonable`: `model`, `dtype`, `actor`,
            `checkpoint`, `grad_clip`, `versions`. Called on rank 0.
        layer_clip (LayerClip, optional): LayerClip with the bounds that it has learned, also if it is off.
        token_clip (TokenClip, optional): TokenClip, if it is on.
    """

    def __init__(
        self,
        directory: str,
        most: int,
        rows_of: Callable[[Mapping[str, Any]], list[Row]],
        context: Callable[[], Mapping[str, Any]],
        layer_clip: LayerClip | None = None,
        token_clip: TokenClip | None = None,
    ) -> None:
        self._directory = Path(directory) / naming.FOLDER
        self._most = most
        self._rows_of = rows_of
        self._context = context
        self._layer_clip = layer_clip
        self._token_clip = token_clip
        self._said: set[str] = set()
        self._disk = PatientDisk(self._directory)

    def keep(self, event: Mapping[str, Any], mini_batch: MiniBatch, findings: Findings) -> str | None:
        """Keeps the micro-batches of an event that `worth_keeping` names. A collective call.

        Returns:
            str | None: The bundle's folder relative to the evidence, the same on every rank; None if there is none.

        Raises:
            RankFailedError: A rank could not send its micro-batch.
        """
        if not collectives.broadcast(self._has_room, 0):
            return None
        with collectives.raised_on_all_ranks(mini_batch.model.device):
            names = worth_keeping(event, findings.figures, findings.threshold)
        micro_batches = {}
        for name in names[: limits.MICRO_BATCHES]:
            if event["search"] == "local" and name in findings.micro_batches:
                micro_batches[name] = findings.micro_batches[name]
            else:
                owner = name[0] * mini_batch.model.sequence_parallel_size
                micro_batches[name] = collectives.broadcast(partial(_sent, mini_batch, name), owner)
        left_out, norms = len(names) - len(micro_batches), mini_batch.squared_norms
        return collectives.broadcast(partial(self._try, event, norms, findings, micro_batches, left_out), 0)

    def _try(
        self,
        event: Mapping[str, Any],
        squared_norms: Tensor | None,
        findings: Findings,
        micro_batches: Mapping[MicroBatchName, MicroBatch],
        left_out: int,
    ) -> str | None:
        """Writes the bundle; whatever the disk or the inputs do, training goes on, and one warning says so."""
        if not micro_batches:
            return None
        with guarded("no replay bundle is kept of a gradient spike", self._said):
            context = self._disk.run(self._context, PATIENCE)  # it looks for the last checkpoint
            layers = None
            if self._layer_clip is not None and squared_norms is not None:
                layers = self._layer_clip.preview(squared_norms)
            tokens = None if self._token_clip is None else self._token_clip.bounds_in_force()
            saved = {
                name: SavedMicroBatch(self._rows_of(micro_batch.inputs), micro_batch.tokens, micro_batch.rng_state)
                for name, micro_batch in micro_batches.items()
            }
            entries = {
                name: {
                    "rows": micro_batch.rows,
                    "norm": findings.figures[name].norm,
                    "layer_norms": findings.figures[name].layer_norms,
                    "threshold": findings.threshold * findings.figures[name].root_square_weight,
                }
                for name, micro_batch in micro_batches.items()
            }
            searched = {
                "layers": findings.layers,
                "left_out": left_out,
                "measured": measured_tokens(findings, micro_batches),
                "clips": {"layer_clip": layers, "token_clip": tokens},
            }
            files = bundle_files(event, saved, entries, searched, context)
            return self._disk.run(partial(write_bundle_files, self._directory, files, event), PATIENCE)
        return None

    def _has_room(self) -> bool:
        try:
            folder = self._directory
            bundles, used = self._disk.run(lambda: (bundles_in(folder), bytes_of_bundles(folder)), PATIENCE)
        except OSError:
            return True  # the write will say what is wrong
        if len(bundles) < self._most and used < limits.TOTAL_BYTES:
            return True
        full = f"{self._directory} has {len(bundles)} of {self._most} (spike_replay), {used} bytes; move some away"
        warn_once(self._said, f"no more replay bundles are kept: {full}", about="full")
        return False


def worth_keeping(event: Mapping[str, Any], figures: AllFigures, threshold: float) -> list[MicroBatchName]:
    """The micro-batches worth keeping: those with culprits, then those over their threshold, or else the largest."""
    with_culprits = [(culprit["rank"], culprit["micro_batch"]) for culprit in event["culprits"]]
    found = list(dict.fromkeys([*with_culprits, *suspects(figures, threshold)]))
    if not found:
        found = sorted((name for name in figures if figures[name].norm), key=lambda n: -figures[n].token_equivalent)[:1]
    return found


def measured_tokens(findings: Findings, among: Mapping[MicroBatchName, Any]) -> list[dict[str, Any]]:
    """The largest tokens that the search measured alone: their norms, as a culprit's are, divided by their weights."""
    found: list[dict[str, Any]] = [
        {
            "rank": token[0][0],
            "micro_batch": token[0][1],
            "row": findings.row(token),
            "position": token[2],
            "grad_norm": alone.grad_norm,
            "layer_norms": alone.layer_norms,
        }
        for token, alone in findings.measured.items()
        if token[0] in among
    ]
    # NaN is larger than any number.
    found.sort(key=lambda token: -token["grad_norm"] if token["grad_norm"] == token["grad_norm"] else -math.inf)
    return found[: limits.MEASURED_TOKENS]


def _sent(mini_batch: MiniBatch, name: MicroBatchName) -> MicroBatch:
    micro_batch = mini_batch.micro_batches[name[1]].portable(mini_batch.scale)
    micro_batch.tokens.pop("cut", None)  # nothing is cut in a replay
    return micro_batch
