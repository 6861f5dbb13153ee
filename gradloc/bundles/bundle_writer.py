# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps bundles of events and of converted spikes. It needs safetensors, which comes with transformers."""

import hashlib
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..evidence.event import place_of
from ..evidence.writer import jsonable
from ..fsdp import collectives
from ..guarded import PatientThread, guarded, warn_once
from ..layers.layer_clip import LayerClip
from ..measure.micro_batch import AllFigures, MicroBatch, MicroBatchName, movable, square_weights, suspects
from ..measure.mini_batch import MiniBatch
from ..search.findings import Findings
from ..threshold import largest_first
from ..token_clip.token_clip import TokenClip
from ..version import __version__
from . import layout, limits
from .layout import NotReplayableError, Row, SavedMicroBatch


@dataclass
class BundleWriter:
    """Writes bundles to `<directory>/replay`, on rank 0 alone.

    With the local meter, the search has already sent these micro-batches to every rank, so a bundle takes no more
    communication. With the reduced meter, their owners send them. So a bundle is complete on the node of rank 0,
    whether or not the nodes share a folder. A disk that does not answer keeps the other ranks waiting for no longer
    than `PatientThread` does.
    """

    directory: str
    most: int  # the maximum number of bundles; the first ones are kept: later spikes may be consequences
    # Converts the inputs of a micro-batch to its samples. Raises `NotReplayableError` if a replay could not compute
    # them.
    rows_of: Callable[[Mapping[str, Any]], list[Row]]
    # Returns what the trainer knows, ready for `jsonable`: `model`, `dtype`, `actor`, `checkpoint`, `grad_clip`,
    # `versions`. Called on rank 0.
    context: Callable[[], Mapping[str, Any]]
    layer_clip: LayerClip | None = None  # with the bounds that it has learned, also if it is off
    token_clip: TokenClip | None = None

    def __post_init__(self) -> None:
        self._folder = Path(self.directory) / limits.FOLDER
        self._said: set[str] = set()
        self._disk = PatientThread(self._folder)

    def keep(self, event: Mapping[str, Any], mini_batch: MiniBatch, findings: Findings) -> str | None:
        """Keeps the micro-batches of an event that `worth_keeping` names. A collective call.

        Returns:
            str | None: On rank 0, the bundle's folder relative to the evidence; None if there is none.

        Raises:
            RankFailedError: A rank could not send its micro-batch.
        """

        def choose() -> list[MicroBatchName]:
            full = None
            with suppress(OSError):  # the write will say what is wrong
                full = self._disk.run(partial(_no_room, self._folder, self.most))
            if full is None:
                return worth_keeping(event, findings.figures, findings.threshold)
            warn_once(self._said, f"no more replay bundles are kept: {full}", about="full")
            return []

        names = collectives.broadcast(choose, 0)
        if not names:
            return None
        kept = {name: name[0] * mini_batch.model.sequence_parallel_size for name in names[: limits.MICRO_BATCHES]}
        own: dict[MicroBatchName, MicroBatch] = {}
        with collectives.raised_on_all_ranks(mini_batch.model.device):
            for name, owner in kept.items():
                if owner == collectives.rank():
                    own[name] = mini_batch.micro_batches[name[1]].portable(mini_batch.scale)
        # The search has copies, but without the columns that it does not read.
        by_rank = collectives.gather_on_first(own)
        if by_rank is None:
            return None
        with guarded("no replay bundle is kept of a gradient spike", self._said):
            layers = None
            if self.layer_clip is not None and mini_batch.squared_norms is not None:
                layers = self.layer_clip.preview(mini_batch.squared_norms)
            tokens = None if self.token_clip is None else self.token_clip.bounds_in_force()
            micro_batches = {name: by_rank[owner][name] for name, owner in kept.items()}
            saved = {name: _saved(micro_batch, self.rows_of) for name, micro_batch in micro_batches.items()}
            searched = {
                "layers": findings.layers,
                "left_out": len(names) - len(saved),
                "measured": measured_tokens(findings, saved),
                "clips": {"layer_clip": layers, "token_clip": tokens},
            }

            def write() -> str:
                """What the trainer knows is read from the disk, too: it looks for the last checkpoint."""
                more = {**searched, **self.context()}
                return write_bundle(self._folder, event, micro_batches, saved, findings.figures, more)

            return self._disk.run(write)
        return None


def worth_keeping(event: Mapping[str, Any], figures: AllFigures, threshold: float) -> list[MicroBatchName]:
    """The micro-batches worth keeping: those with culprits, then those over their threshold, or else the largest."""
    with_culprits = [(culprit["rank"], culprit["micro_batch"]) for culprit in event["culprits"]]
    largest = sorted((name for name in figures if figures[name].norm), key=lambda n: -figures[n].token_equivalent)
    return list(dict.fromkeys([*with_culprits, *suspects(figures, threshold)])) or largest[:1]


def measured_tokens(findings: Findings, among: Mapping[MicroBatchName, Any]) -> list[dict[str, Any]]:
    """The largest tokens that the search measured alone: their norms, as a culprit's are, divided by their weights."""
    found: list[dict[str, Any]] = [
        {
            **place_of(token[0], findings.row(token), token[2]),
            "grad_norm": alone.grad_norm,
            "layer_norms": findings.layer_norms(token),
        }
        for token, alone in findings.measured.items()
        if token[0] in among
    ]
    found.sort(key=lambda token: largest_first(token["grad_norm"]))
    return found[: limits.MEASURED_TOKENS]


def _saved(micro_batch: MicroBatch, rows_of: Callable[[Mapping[str, Any]], list[Row]]) -> SavedMicroBatch:
    """The micro-batch as a bundle has it: nothing is cut in a replay."""
    tokens = {name: values for name, values in micro_batch.tokens.items() if name != "cut"}
    return SavedMicroBatch(rows_of(micro_batch.inputs), tokens, micro_batch.rng_state)


def write_converted_bundle(
    directory: Path,
    event: Mapping[str, Any],
    micro_batches: Mapping[MicroBatchName, MicroBatch],
    rows_of: Callable[[Mapping[str, Any]], list[Row]],
    context: Mapping[str, Any],
) -> str:
    """Writes `<directory>/replay/<stem>`, whole or not at all. No collective call.

    Where there are more micro-batches than a bundle may have, it gets those with the largest suspicion for their
    weights, which is an estimate of their norms over their thresholds; `left_out` counts the others. Micro-batches
    without a token that can move are not among them: their gradients are zero.

    Args:
        micro_batches (Mapping): Their tokens have `suspicion`.

    Returns:
        str: The bundle's folder, relative to the evidence.

    Raises:
        NotReplayableError: No token has a gradient, it would be over a limit, or a replay could not compute it.
        OSError: It cannot be written.
    """
    folder = directory / limits.FOLDER
    moving = {name: _saved(each, rows_of) for name, each in micro_batches.items() if bool(movable(each.tokens).any())}
    if not moving:
        raise NotReplayableError("it has no token with a gradient")
    if (full := _no_room(folder)) is not None:
        raise NotReplayableError(full)
    kept = _largest(moving)
    unsearched = {"layers": [], "left_out": len(moving) - len(kept), "measured": []}
    return write_bundle(folder, event, micro_batches, kept, {}, {**unsearched, **context})


def _largest(micro_batches: Mapping[MicroBatchName, SavedMicroBatch]) -> dict[MicroBatchName, SavedMicroBatch]:
    """As many as a bundle may have, in their order."""
    ranked = sorted(micro_batches, key=lambda name: -_estimate(micro_batches[name].tokens))
    kept: set[MicroBatchName] = set()
    size = 0
    for name in ranked[: limits.CONVERTED_MICRO_BATCHES]:
        size += sum(tensor.nbytes for tensor in layout.to_tensors(micro_batches[name]).values())
        if kept and size > limits.BUNDLE_BYTES:
            break
        kept.add(name)
    return {name: saved for name, saved in micro_batches.items() if name in kept}


def _estimate(tokens: Mapping[str, Tensor]) -> float:
    """An estimate of ‖g‖/sqrt(Σ w²) in units of the model's own; infinite where a token is not finite."""
    suspicion = torch.where(movable(tokens), tokens["suspicion"].double(), 0.0)
    found = math.sqrt(float(suspicion.square().sum())) / math.sqrt(float(square_weights(tokens)[1]))
    return found if math.isfinite(found) else math.inf


def write_bundle(
    folder: Path,
    event: Mapping[str, Any],
    micro_batches: Mapping[MicroBatchName, MicroBatch],
    saved: Mapping[MicroBatchName, SavedMicroBatch],
    figures: AllFigures,
    more: Mapping[str, Any],
) -> str:
    """Writes a bundle, whole or not at all.

    Args:
        folder (Path): That of all bundles.
        saved (Mapping): Those of the micro-batches that it gets.
        figures (Mapping): Of those that were measured.
        more (Mapping): What the manifest says besides: what the trainer knows, `layers`, `left_out` and `measured`; of
            a searched spike also `clips`, what LayerClip and TokenClip knew of their bounds.

    Returns:
        str: The bundle's folder, relative to the evidence.

    Raises:
        NotReplayableError: It would be over a limit, or a replay could not compute it.
        OSError: It cannot be written.
    """
    files = _files(event, micro_batches, saved, figures, more)
    folder.mkdir(parents=True, exist_ok=True)
    name = _free_name(folder, event)
    unfinished = folder / f".{os.getpid()}.{name}"
    try:
        unfinished.mkdir()
        for file, data in files.items():
            (unfinished / file).write_bytes(data)
        unfinished.rename(folder / name)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return f"{limits.FOLDER}/{name}"


def _no_room(folder: Path, most: int | None = None) -> str | None:
    """Why a folder takes no more bundles, of which it has at most `most`; None if it does."""
    kept, used = len([*folder.glob(f"[!.]*/{limits.MANIFEST}")]), bytes_of_bundles(folder)
    if (most is None or kept < most) and used < limits.TOTAL_BYTES:
        return None
    of_most = "" if most is None else f" of {most} (spike_replay)"
    return f"{folder} has {kept}{of_most}, {used:,} of {limits.TOTAL_BYTES:,} bytes; move some away"


def _files(
    event: Mapping[str, Any],
    micro_batches: Mapping[MicroBatchName, MicroBatch],
    saved: Mapping[MicroBatchName, SavedMicroBatch],
    figures: AllFigures,
    more: Mapping[str, Any],
) -> dict[str, bytes]:
    """The files of a bundle by name."""
    rows = max((len(each.rows) for each in saved.values()), default=0)
    layers = more["layers"]
    if len(layers) > limits.LAYERS or rows > limits.ROWS:
        raise NotReplayableError(
            f"it has {len(layers):,} layers and up to {rows:,} rows in a micro-batch, and "
            f"{limits.LAYERS:,} and {limits.ROWS:,} are the limits"
        )
    tensors = {layout.tensor_file(*name): layout.to_tensors(each) for name, each in saved.items()}
    size = sum(tensor.nbytes for of_file in tensors.values() for tensor in of_file.values())
    if size > limits.BUNDLE_BYTES:
        raise NotReplayableError(f"it would take {size:,} bytes, and {limits.BUNDLE_BYTES:,} are the limit")
    from safetensors.torch import save

    files = {file: save(of_file) for file, of_file in tensors.items()}
    versions = {"gradloc": __version__, "torch": torch.__version__, "python": platform.python_version()}
    manifest = {
        "format": limits.FORMAT,
        "kind": limits.KIND,
        "time": event["time"],
        "event": event,
        "micro_batches": [
            {
                "rank": name[0],
                "micro_batch": name[1],
                "rows": micro_batches[name].rows,
                "norm": figures[name].norm if name in figures else None,
                "layer_norms": figures[name].layer_norms if name in figures else {},
                "threshold": event["threshold"] * math.sqrt(float(square_weights(each.tokens)[1])),
                "file": (file := layout.tensor_file(*name)),
                "bytes": len(files[file]),
                "sha256": hashlib.sha256(files[file]).hexdigest(),
            }
            for name, each in saved.items()
        ],
        **more,
        "versions": {**versions, **more.get("versions", {})},
    }
    text = json.dumps(jsonable(manifest), allow_nan=False).encode()
    if len(text) > limits.MANIFEST_BYTES:
        raise NotReplayableError(f"its manifest would take {len(text):,} bytes")
    digest = hashlib.sha256(text).hexdigest()
    return {**files, limits.MANIFEST: text, limits.CHECKSUM: f"{digest}  {limits.MANIFEST}\n".encode()}


def bytes_of_bundles(directory: Path) -> int:
    """The bytes of all bundles, those that a killed run left unfinished included.

    Others may write into the same folder: what they rename or remove in the meantime is left out.
    """
    size = 0
    for bundle in list(directory.glob("*")):
        with suppress(FileNotFoundError, NotADirectoryError):
            size += sum(path.stat().st_size for path in bundle.iterdir())
    return size


def _free_name(directory: Path, event: Mapping[str, Any]) -> str:
    """A folder's name that is not taken, as it is where a resumed run comes to a step again."""
    step = "unknown" if event["global_step"] is None else event["global_step"]
    stem = f"step{step}-epoch{event['epoch']}-mini_batch{event['mini_batch']}"
    taken = {path.name for path in directory.iterdir()}
    stems = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(name for name in stems if name not in taken)
