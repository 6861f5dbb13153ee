# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The files of a bundle from its micro-batches, and how they get to the disk. It needs safetensors."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from .. import limits
from ..evidence.writer import jsonable
from ..measure.micro_batch import MicroBatchName
from ..version import __version__
from . import layout, naming
from .layout import NotReplayableError, SavedMicroBatch


def bundle_files(
    event: Mapping[str, Any],
    micro_batches: Mapping[MicroBatchName, SavedMicroBatch],
    entries: Mapping[MicroBatchName, Mapping[str, Any]],
    findings: Mapping[str, Any],
    context: Mapping[str, Any],
) -> dict[str, bytes]:
    """The files of a bundle by name.

    Args:
        entries (Mapping[MicroBatchName, Mapping]): What the manifest says of each beside its name and its file: `rows`,
            `norm`, `layer_norms` and `threshold`.
        findings (Mapping): `layers`, `left_out` and `measured`; of a searched spike also `clips`, what LayerClip
            and TokenClip knew of their bounds: see `clip_bounds`.

    Raises:
        NotReplayableError: It would be over a limit, or a replay could not compute it.
    """
    rows = max((len(saved.rows) for saved in micro_batches.values()), default=0)
    layers = findings["layers"]
    if len(layers) > limits.LAYERS or rows > limits.ROWS:
        raise NotReplayableError(
            f"it has {len(layers):,} layers and up to {rows:,} rows in a micro-batch, and "
            f"{limits.LAYERS:,} and {limits.ROWS:,} are the limits"
        )
    tensors = {layout.tensor_file(*name): layout.to_tensors(saved) for name, saved in micro_batches.items()}
    size = sum(tensor.nbytes for of_file in tensors.values() for tensor in of_file.values())
    if size > limits.BUNDLE_BYTES:
        raise NotReplayableError(f"it would take {size:,} bytes, and {limits.BUNDLE_BYTES:,} are the limit")
    from safetensors.torch import save

    files = {file: save(of_file) for file, of_file in tensors.items()}
    versions = {"gradloc": __version__, "torch": torch.__version__, "python": platform.python_version()}
    manifest = {
        "format": naming.FORMAT,
        "kind": naming.KIND,
        "time": event["time"],
        "event": event,
        "micro_batches": [
            {
                "rank": name[0],
                "micro_batch": name[1],
                **entries[name],
                "file": (file := layout.tensor_file(*name)),
                "bytes": len(files[file]),
                "sha256": hashlib.sha256(files[file]).hexdigest(),
            }
            for name in micro_batches
        ],
        **findings,
        **context,
        "versions": {**versions, **context.get("versions", {})},
    }
    text = json.dumps(jsonable(manifest), allow_nan=False, indent=1).encode()
    if len(text) > limits.MANIFEST_BYTES:
        raise NotReplayableError(f"its manifest would take {len(text):,} bytes")
    digest = hashlib.sha256(text).hexdigest()
    return {**files, naming.MANIFEST: text, naming.CHECKSUM: f"{digest}  {naming.MANIFEST}\n".encode()}


def write_bundle_files(directory: Path, files: Mapping[str, bytes], event: Mapping[str, Any], suffix: str = "") -> str:
    """Writes a bundle with these files, whole or not at all.

    Returns:
        str: Its folder, relative to the evidence.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = _free_name(directory, event, suffix)
    unfinished = directory / f".{name}.{os.getpid()}"
    try:
        unfinished.mkdir()
        for file, data in files.items():
            (unfinished / file).write_bytes(data)
        unfinished.rename(directory / name)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return f"{naming.FOLDER}/{name}"


def bundles_in(directory: Path) -> list[Path]:
    """The bundles in a folder; none if it does not exist."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if (path / naming.MANIFEST).is_file() and path.name[0] != "."]


def bytes_of_bundles(directory: Path, suffix: str = "") -> int:
    """The bytes of all bundles in a folder, those that a killed run left unfinished included.

    With a suffix, those alone whose names end with it, or did so before they were finished.

    Other ranks may write into the same folder: what they rename or remove in the meantime is left out.
    """
    if not directory.is_dir():
        return 0
    size = 0
    for bundle in list(directory.iterdir()):
        # An unfinished one has the id of its process at the end: see `write_bundle_files`.
        if not (bundle.name.rpartition(".")[0] if bundle.name[0] == "." else bundle.name).endswith(suffix):
            continue
        try:
            for path in list(bundle.iterdir()):
                size += path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            continue
    return size


def _free_name(directory: Path, event: Mapping[str, Any], suffix: str) -> str:
    """A folder's name that is not taken, as it is where a resumed run comes to a step again."""
    step = "unknown" if event["global_step"] is None else event["global_step"]
    stem = f"step{step}-epoch{event['epoch']}-mini_batch{event['mini_batch']}"
    taken = {path.name for path in directory.iterdir()}
    stems = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(name for each in stems if (name := each + suffix) not in taken)
