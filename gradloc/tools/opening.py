# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Opens a bundle, which may be damaged, or come from a stranger. It needs safetensors."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundles import layout, limits
from ..bundles.layout import TOKENS, Row, SavedMicroBatch
from ..judge import judged
from ..lines import Event
from ..measure.micro_batch import MicroBatchName
from ..token_clip.token_clip import ACTIONS
from .schema import (
    EVENT,
    INDEX,
    TEXT,
    TEXT_OR_NULL,
    Form,
    NotPlainFileError,
    by_name,
    conforms,
    fields,
    list_of,
    object_with,
    or_null,
    parse,
    read_plain_file,
    with_numbers,
)
from .spike import ranks_looked_at

_FINITE: Form = {"type": "number", "minimum": 0, "maximum": sys.float_info.max}
_FINITE_OR_NULL = or_null(_FINITE)
_NORM = {"anyOf": [_FINITE, {"enum": ["NaN", "Infinity"]}]}
_NORM_OR_NULL = or_null(_NORM)

# The range of a gradient scaler's factor: with others, no fp16 gradient is left.
_LOSS_SCALES = (2.0**-32, 2.0**64)

# Values of tokens that are not float32.
_TOKEN_DTYPES = {"token_id": torch.int64, "broken": torch.bool}
_NEEDED_TOKENS = {"token_id", "response_mask", "log_prob", "weight", "coefficient", "entropy_coefficient"}

_PLACE = {"rank micro_batch": INDEX, "layer_norms": by_name(_NORM)}
_MICRO_BATCH = {**_PLACE, "bytes": INDEX, "file sha256": TEXT, "rows": list_of(INDEX), "norm": _NORM_OR_NULL}
_LAYER_CLIP = object_with({"norm": _NORM, "bound": _FINITE_OR_NULL, "factor": _FINITE})
_TOKEN_CLIP = object_with(
    {"action": {"enum": [*ACTIONS]}, "factor": _FINITE, "usual": by_name(_FINITE_OR_NULL), "limit": INDEX}
)
# The form of each field of a manifest.
_FORM = fields(
    {
        "event": EVENT,
        "layers": list_of(TEXT),
        "micro_batches": list_of(object_with({**_MICRO_BATCH, "threshold": _NORM})),
        "left_out": INDEX,
        "measured": list_of(object_with({**_PLACE, "row position": INDEX, "grad_norm": _NORM})),
        "model versions actor": {"type": "object"},
        "checkpoint": TEXT_OR_NULL,
        "dtype": TEXT,
        "grad_clip": _NORM_OR_NULL,
        # LayerClip's factors for the step, applied or not, and TokenClip's bounds.
        "clips": object_with({"layer_clip": or_null(by_name(_LAYER_CLIP)), "token_clip": or_null(_TOKEN_CLIP)}),
    }
)


class BundleError(ValueError):
    """A bundle cannot be used; the message says why in one sentence."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle."""

    path: Path  # its folder, without links
    manifest: dict[str, Any]  # what `BundleWriter` wrote, checked
    micro_batches: dict[MicroBatchName, SavedMicroBatch]  # in the manifest's order

    @cached_property
    def event(self) -> dict[str, Any]:
        """Its spike's, judged: a bundle is kept before that."""
        event = self.manifest["event"]
        return event if "summary" in event else judged(with_numbers(event, Event))

    @property
    def is_converted(self) -> bool:
        """Whether it is of another trainer's records, and nothing was measured."""
        return bool(self.event["search"] == "converted")

    @property
    def missing(self) -> list[str]:
        """The parts of the spike that the bundle lacks, in sentences."""
        found, count = [], self.manifest["left_out"]
        had = "were over their threshold" if self.manifest["layers"] else "had tokens with a gradient"
        if count > 0:
            found.append(f"{count} more micro-batches {had}; the bundle does not have them.")
        if ranks := ranks_looked_at(self.event):
            found.append(f"Its records are those of {ranks}.")
        return found

    @property
    def first(self) -> MicroBatchName:
        """The micro-batch that most of a replay is about: the first one."""
        return next(iter(self.micro_batches))

    @cached_property
    def rows(self) -> dict[MicroBatchName, list[int]]:
        """The rows of each micro-batch in its rank's mini-batch."""
        return {(entry["rank"], entry["micro_batch"]): entry["rows"] for entry in self.manifest["micro_batches"]}

    @cached_property
    def row_indices(self) -> dict[MicroBatchName, dict[int, int]]:
        """The index of each of these rows in its micro-batch."""
        return {name: {row: index for index, row in enumerate(rows)} for name, rows in self.rows.items()}


def open_bundle(path: str | Path) -> Bundle:
    """Reads a bundle and checks all of it: sizes, checksums, the manifest's form, and each tensor's shape and dtype.

    Only files of the folder itself are read, whatever names the manifest has; links are refused.

    Raises:
        BundleError: It is not a bundle of this version, or it is damaged.
        OSError: It cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"There is no such folder: {folder}")
    if not (folder / limits.MANIFEST).exists():
        raise BundleError(f"{folder} is not a replay bundle: it has no {limits.MANIFEST}.")
    manifest = _manifest(folder)
    files = manifest["micro_batches"]
    if sum(entry["bytes"] for entry in files) > limits.BUNDLE_BYTES * 2:
        raise BundleError(
            f"The bundle's manifest names more than {limits.BUNDLE_BYTES * 2:,} bytes, which is too much."
        )
    found = {(entry["rank"], entry["micro_batch"]): _micro_batch(folder, entry) for entry in files}
    bundle = Bundle(folder.resolve(), manifest, found)
    check_places(bundle)
    return bundle


def _manifest(folder: Path) -> dict[str, Any]:
    text = _read(folder / limits.MANIFEST, limits.MANIFEST_BYTES)
    digest = _read(folder / limits.CHECKSUM, 1024).split()
    if digest[:1] != [hashlib.sha256(text).hexdigest().encode()]:
        raise BundleError(f"{limits.MANIFEST} does not match its checksum: it was changed or cut off.")
    try:
        manifest = parse(text)
    except ValueError as error:
        raise BundleError(f"{limits.MANIFEST} cannot be parsed: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != limits.KIND:
        raise BundleError(f"{limits.MANIFEST} is not a replay bundle's.")
    # A bundle of an earlier version, or of a converted spike, has nothing of them.
    manifest.setdefault("clips", {"layer_clip": None, "token_clip": None})
    if manifest.get("format") != limits.FORMAT:
        raise BundleError(
            f"The bundle has format {manifest.get('format')!r}, and this version of GradLoc reads {limits.FORMAT}."
        )
    for problem in _problems(manifest):
        raise BundleError(f"{limits.MANIFEST} is damaged: {problem}.")
    return manifest


def _problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The faults in the form of a manifest; later ones may follow from the first."""
    for name, form in _FORM.items():
        if name not in manifest or not conforms(manifest[name], form):
            yield f"its field {name!r} is missing or malformed"
    event, layers, files, measured = (manifest[name] for name in ("event", "layers", "micro_batches", "measured"))
    if not _LOSS_SCALES[0] <= event["loss_scale"] <= _LOSS_SCALES[1]:
        yield f"its loss_scale is {event['loss_scale']:g}, which no gradient scaler has"
    converted = event["search"] == "converted"
    for what, listed, most in (
        ("layers", layers, limits.LAYERS),
        ("micro-batches", files, limits.CONVERTED_MICRO_BATCHES if converted else limits.MICRO_BATCHES),
        ("measured tokens", measured, limits.MEASURED_TOKENS),
        ("rows in a micro-batch", max((entry["rows"] for entry in files), key=len, default=()), limits.ROWS),
    ):
        if len(listed) > most:
            yield f"it has {len(listed):,} {what}, and {most:,} are the limit"
    known = set(layers)
    if converted:
        norms = [layers, measured, *(event[name] for name in ("units", "culprits", "diffuse"))]
        if any(norms) or any(entry["norm"] is not None or entry["layer_norms"] for entry in files):
            yield "it has norms, although nothing was searched"
        if event["diagnosis"] != "unsearched":
            yield "it has a diagnosis, although nothing was searched"
    elif not layers or len(known) != len(layers):
        yield "its layers are not a list of names"
    elif not all(known.issuperset(entry["layer_norms"]) for entry in [*files, *measured]):
        yield "the layers of its norms are not those of the model"
    if not files:
        yield "it has no micro-batch"
    for entry in files:
        if entry["file"] != layout.tensor_file(entry["rank"], entry["micro_batch"]):
            yield f"{entry['file']!r} is not the name of the file of its micro-batch"
    if len({entry["file"] for entry in files}) != len(files):
        yield "it names a micro-batch twice"


def _micro_batch(folder: Path, entry: Mapping[str, Any]) -> SavedMicroBatch:
    from safetensors import SafetensorError
    from safetensors.torch import load

    name = entry["file"]
    data = _read(folder / name, entry["bytes"])
    if len(data) != entry["bytes"]:
        raise BundleError(f"{name} is cut off: it has {len(data):,} of {entry['bytes']:,} bytes.")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise BundleError(f"{name} does not match its checksum: it was changed.")
    try:
        return _from_tensors(load(data), len(entry["rows"]))
    except (SafetensorError, ValueError, KeyError) as error:
        raise BundleError(f"{name} is damaged: {error}.") from error


def _from_tensors(tensors: Mapping[str, Tensor], rows: int) -> SavedMicroBatch:
    """The reverse of `to_tensors`, for tensors that may be wrong in any way.

    Raises:
        ValueError: Names, shapes, dtypes or values do not fit together; the message says which.
    """
    flat = _checked(tensors, "input_ids", torch.int64, None)
    length = len(flat)
    positions = _checked(tensors, "position_ids", torch.int64, (length,))
    row_lengths = _checked(tensors, "row_lengths", torch.int64, (rows,)).tolist()
    response_lengths = _checked(tensors, "response_lengths", torch.int64, (rows,)).tolist()
    temperature = _checked(tensors, "temperature", torch.float64, (rows,)).tolist()
    if length and (int(flat.min()) < 0 or int(positions.min()) < 0):
        raise ValueError("input_ids and position_ids must not be negative")
    if not all(0 < value < float("inf") for value in temperature):
        raise ValueError("temperature must be positive and finite")
    if any(n < 0 for n in row_lengths) or sum(row_lengths) != length:
        raise ValueError("row_lengths do not add up to the length of input_ids")
    names = {name.removeprefix(TOKENS) for name in tensors if name.startswith(TOKENS)}
    if missing := _NEEDED_TOKENS - names:
        raise ValueError(f"{TOKENS}{min(missing)} is missing")
    known = {"input_ids", "position_ids", "row_lengths", "response_lengths", "temperature", "rng.cpu", "rng.device"}
    if unknown := set(tensors) - known - {TOKENS + name for name in names}:
        raise ValueError(f"{min(unknown)!r} is not a tensor of a bundle")
    width = tensors[TOKENS + "weight"].shape[-1] if tensors[TOKENS + "weight"].dim() else 0
    if not all(0 <= n <= min(width, whole) for n, whole in zip(response_lengths, row_lengths, strict=True)):
        raise ValueError("response_lengths do not fit into the rows")
    tokens = {
        name: _checked(tensors, TOKENS + name, _TOKEN_DTYPES.get(name, torch.float32), (rows, width)) for name in names
    }
    of_cpu = _checked(tensors, "rng.cpu", torch.uint8, None)
    of_device = _checked(tensors, "rng.device", torch.uint8, None) if "rng.device" in tensors else None
    parts = zip(flat.split(row_lengths), positions.split(row_lengths), response_lengths, temperature, strict=True)
    return SavedMicroBatch([Row(*part) for part in parts], tokens, (of_cpu, of_device))


def _checked(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...] | None) -> Tensor:
    """A tensor of this dtype and shape; without a shape, of one dimension."""
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    tensor = tensors[name]
    fits = tensor.dim() == 1 if shape is None else tuple(tensor.shape) == shape
    if tensor.dtype != dtype or not fits:
        wanted = "one dimension" if shape is None else f"shape {shape}"
        raise ValueError(f"{name} must be {dtype} of {wanted}, and is {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor


def check_places(bundle: Bundle) -> None:
    """Refuses places of tokens that the micro-batches do not have.

    Raises:
        BundleError: The manifest, or its event, names such a place.
    """
    widths = {name: saved.tokens["weight"].shape[1] for name, saved in bundle.micro_batches.items()}
    for token in [*bundle.manifest["measured"], *bundle.event["culprits"], *bundle.event.get("suspected", [])]:
        name = token["rank"], token["micro_batch"]
        if name in widths:
            if token["row"] not in bundle.row_indices[name] or token["position"] >= widths[name]:
                raise BundleError(f"{limits.MANIFEST} is damaged: it names a token that its micro-batch does not have.")


def _read(path: Path, most: int) -> bytes:
    """A file of at most so many bytes; no link, and nothing but a file.

    Raises:
        BundleError: It is missing, larger, or something else.
    """
    try:
        return read_plain_file(path, most)
    except FileNotFoundError as error:
        raise BundleError(f"The bundle has no {path.name}.") from error
    except NotPlainFileError as error:
        raise BundleError(f"In the bundle, {error}") from error
