# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Opens a bundle, which may be damaged, or come from a stranger. It needs safetensors."""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from ..checks import is_finite_number
from ..evidence.schema import EVENT, conforms
from ..measure.passes import UnitName
from . import layout
from .layout import SavedMicroBatch

_HEX = set("0123456789abcdef")


class BundleError(ValueError):
    """What is wrong with a bundle, in one sentence."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Args:
        path (Path): Its folder.
        manifest (dict): What `Recorder` wrote, checked.
        micro_batches (dict[UnitName, SavedMicroBatch]): Its micro-batches, in the manifest's order.
    """

    path: Path
    manifest: dict[str, Any]
    micro_batches: dict[UnitName, SavedMicroBatch]

    @property
    def event(self) -> dict[str, Any]:
        return self.manifest["event"]

    @cached_property
    def rows(self) -> dict[UnitName, list[int]]:
        """The rows of each micro-batch in its rank's mini-batch."""
        return {(entry["rank"], entry["micro_batch"]): entry["rows"] for entry in self.manifest["micro_batches"]}


def open_bundle(path: str | Path) -> Bundle:
    """Reads a bundle and checks all of it: sizes, checksums, the manifest's form, and each tensor's shape and dtype.

    Only files of the folder itself are read, whatever names the manifest has; links are refused.

    Raises:
        BundleError: It is not a bundle of this version, or it is damaged.
        OSError: It cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir() or not (folder / layout.MANIFEST).exists():
        raise BundleError(f"{folder} is not a replay bundle: it has no {layout.MANIFEST}.")
    manifest = _manifest(folder)
    files = manifest["micro_batches"]
    if sum(entry["bytes"] for entry in files) > layout.BUNDLE_BYTES * 2:
        raise BundleError(
            f"The bundle's manifest names more than {layout.BUNDLE_BYTES * 2:,} bytes, which is too much."
        )
    found = {(entry["rank"], entry["micro_batch"]): _micro_batch(folder, entry) for entry in files}
    bundle = Bundle(folder, manifest, found)
    _check_places(bundle)
    return bundle


def _manifest(folder: Path) -> dict[str, Any]:
    text = _read(folder / layout.MANIFEST, layout.MANIFEST_BYTES)
    digest = _read(folder / layout.CHECKSUM, 1024).split()
    if digest[:1] != [hashlib.sha256(text).hexdigest().encode()]:
        raise BundleError(f"{layout.MANIFEST} does not match its checksum: it was changed or cut off.")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{layout.MANIFEST} is not JSON: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != layout.KIND:
        raise BundleError(f"{layout.MANIFEST} is not that of a replay bundle.")
    if manifest.get("format") != layout.FORMAT:
        raise BundleError(
            f"The bundle has format {manifest.get('format')!r}, and this version of GradLoc reads {layout.FORMAT}."
        )
    problem = _problem(manifest)
    if problem is not None:
        raise BundleError(f"{layout.MANIFEST} is damaged: {problem}.")
    return manifest


def _problem(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of a manifest; None if nothing is."""
    if not conforms(manifest.get("event"), EVENT):
        return "its event is not one of this version"
    layers = manifest.get("layers")
    if not _is_list_of(layers, str) or len(set(layers)) != len(layers) or not layers:
        return "its layers are not a list of names"
    files = manifest.get("micro_batches")
    if not _is_list_of(files, dict) or not files:
        return "it has no micro-batch"
    for entry in files:
        if not layout.is_tensor_file(entry.get("file")):
            return f"{entry.get('file')!r} is not the name of a file of a bundle"
        numbers = [entry.get(name) for name in ("rank", "micro_batch", "bytes")]
        if not all(_is_index(value) for value in numbers) or entry["file"] != layout.tensor_file(*numbers[:2]):
            return "a micro-batch has no place or size"
        if not (_is_list_of(entry.get("rows"), int) and all(_is_index(row) for row in entry["rows"])):
            return "the rows of a micro-batch are not numbers"
        if not (isinstance(entry.get("sha256"), str) and len(entry["sha256"]) == 64 and set(entry["sha256"]) <= _HEX):
            return "a micro-batch has no checksum"
        if not (_is_norm(entry.get("norm"), True) and _is_norm(entry.get("threshold"))):
            return "a micro-batch has no norm"
        if not _are_norms(entry.get("layer_norms"), layers):
            return "the layers of a micro-batch are not those of the model"
    if len({entry["file"] for entry in files}) != len(files):
        return "it names a micro-batch twice"
    tokens = manifest.get("measured")
    if not _is_list_of(tokens, dict):
        return "its tokens are not a list"
    for token in tokens:
        places = [token.get(name) for name in ("rank", "micro_batch", "row", "position")]
        if not (all(map(_is_index, places)) and _is_norm(token.get("grad_norm"))):
            return "a token has no place or norm"
        if not _are_norms(token.get("layer_norms"), layers):
            return "the layers of a token are not those of the model"
    if not all(isinstance(manifest.get(name), dict) for name in ("model", "versions", "actor")):
        return "it lacks the model, the versions or the actor's settings"
    if not (manifest.get("checkpoint") is None or isinstance(manifest["checkpoint"], str)):
        return "its checkpoint is not a path"
    if not isinstance(manifest.get("dtype"), str) or not _is_index(manifest.get("left_out")):
        return "it lacks the dtype"
    if not _is_norm(manifest.get("grad_clip"), True):
        return "its grad_clip is not a number"
    return None


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
        return layout.from_tensors(load(data), len(entry["rows"]))
    except (SafetensorError, ValueError, KeyError) as error:
        raise BundleError(f"{name} is damaged: {error}.") from error


def _check_places(bundle: Bundle) -> None:
    """Refuses places of tokens that the micro-batches do not have."""
    rows = bundle.rows
    for token in [*bundle.manifest["measured"], *bundle.event["culprits"]]:
        name = token["rank"], token["micro_batch"]
        if name in rows:
            row = rows[name].index(token["row"]) if token["row"] in rows[name] else None
            if row is None or token["position"] >= bundle.micro_batches[name].tokens["weight"].shape[1]:
                raise BundleError(f"{layout.MANIFEST} is damaged: it names a token that its micro-batch does not have.")


def _read(path: Path, most: int) -> bytes:
    """A file of at most so many bytes; no link, and nothing but a file.

    Raises:
        BundleError: It is missing, larger, or something else.
    """
    try:
        found = path.lstat()
    except FileNotFoundError as error:
        raise BundleError(f"The bundle has no {path.name}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise BundleError(f"{path.name} in the bundle is not an ordinary file.")
    if found.st_size > most:
        raise BundleError(f"{path.name} is larger than it may be: {found.st_size:,} bytes, and {most:,} are expected.")
    return path.read_bytes()


def _is_list_of(value: object, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_norm(value: object, or_null: bool = False) -> bool:
    """Whether it is a norm as JSON has it: a number from 0 on, or the word for NaN or infinity."""
    if value is None:
        return or_null
    if isinstance(value, str):
        return value in ("NaN", "Infinity")
    return is_finite_number(value) and value >= 0


def _are_norms(value: object, layers: list[str]) -> bool:
    """Whether it has a norm for each of these layers, or is empty."""
    return isinstance(value, dict) and set(value) <= set(layers) and all(map(_is_norm, value.values()))
