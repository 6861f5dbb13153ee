# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Opens the parts of a recorded spike: ranks that do not communicate write a bundle each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bundles import limits
from ..tools.figures import ranges
from ..tools.opening import Bundle, BundleError, open_bundle
from ..tools.reading import same_number

# The name of a part: that of the spike, a number if a resumed run came to the step again, and the rank.
_PART = re.compile(r"(?P<spike>.+?)(?P<again>-\d{1,9})?-rank(?P<rank>\d{1,9})")
_WHERE = ("global_step", "epoch", "mini_batch")
# How many parts are opened: a folder may have any number.
_MOST = 4096


@dataclass(frozen=True)
class Parts:
    """The bundles of one spike."""

    bundle: Bundle  # all of them as one, at the place of the one that was given
    names: list[str]  # those of their folders, that of the given one first
    notes: list[str]  # what is missing


def open_parts(path: str | Path) -> Parts:
    """Opens a bundle and, if its spike was recorded, the other parts of the spike in the same folder.

    Raises:
        BundleError: The given bundle cannot be used. Other parts that cannot be used are noted.
        OSError: The given bundle cannot be read.
    """
    bundle = open_bundle(path)
    parts = [bundle]
    notes: list[str] = []
    if is_recorded(bundle):
        others, notes = _others(bundle)
        parts += others
        ranks = {rank for part in parts for rank, _ in part.micro_batches}
        if missing := sorted(set(range(min(bundle.event["world_size"], _MOST))) - ranks):
            notes.append(
                f"Of {bundle.event['world_size']} ranks, the bundles of rank{'s' * (len(missing) > 1)} "
                f"{ranges(missing)} are not here, and their tokens are not searched."
            )
    joined = _joined(parts)
    notes += left_out_notes(joined)
    return Parts(joined, [part.path.name for part in parts], notes)


def left_out_notes(bundle: Bundle) -> list[str]:
    """How many micro-batches a bundle lacks; empty if none."""
    count = bundle.manifest["left_out"]
    had = "were over their threshold" if bundle.manifest["layers"] else "had tokens with a gradient"
    return [f"{count} more micro-batches {had}; the bundle does not have them."] if count > 0 else []


def is_recorded(bundle: Bundle) -> bool:
    """Whether its spike was recorded in training, and not searched."""
    return bool(bundle.event["search"] == "recorded")


def _same_spike(event: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two ranks wrote these events of one spike: its norm and threshold are the same on all."""
    figures = ("global_norm", "threshold")
    return all(event[key] == other[key] for key in (*_WHERE, "world_size")) and all(
        same_number(event[key], other[key]) for key in figures
    )


def _others(bundle: Bundle) -> tuple[list[Bundle], list[str]]:
    """The other parts of a bundle's spike, and why some cannot be used."""
    folder = bundle.path
    match = _PART.fullmatch(folder.name)
    if match is None:
        return [], []
    found: list[Bundle] = []
    notes = []
    known, size = set(bundle.micro_batches), _size(bundle)
    for name, again in _names_of_parts(folder, match)[:_MOST]:
        # Ranks number repeats alone, so a part may have another number. Most of those are of another run: no note.
        surely = again == match["again"]
        try:
            other = open_bundle(folder.parent / name)
        except (BundleError, OSError) as error:
            if surely:
                notes.append(f"The part {name} cannot be used: {error}")
            continue
        same = is_recorded(other) and _same_spike(other.event, bundle.event)
        if not (same and known.isdisjoint(other.micro_batches)):
            if surely:
                notes.append(f"The part {name} is of another spike.")
            continue
        if (size := size + _size(other)) > limits.TOTAL_BYTES:
            notes.append(f"The parts from {name} on are left out: they have over {limits.TOTAL_BYTES:,} bytes.")
            break
        found.append(other)
        known |= set(other.micro_batches)
    return found, notes


def _size(bundle: Bundle) -> int:
    return sum(entry["bytes"] for entry in bundle.manifest["micro_batches"])


def _names_of_parts(folder: Path, of: re.Match[str]) -> list[tuple[str, str | None]]:
    """The folders beside a part that may be of its spike, and their numbers; those with the same number first."""
    matches = [_PART.fullmatch(path.name) for path in folder.parent.iterdir() if path.name != folder.name]
    found = [(match[0], match["again"]) for match in matches if match is not None and match["spike"] == of["spike"]]
    return sorted(found, key=lambda each: (each[1] != of["again"], each[0]))


def _joined(parts: list[Bundle]) -> Bundle:
    """Several bundles as one; with one, itself."""
    first = parts[0]
    if len(parts) == 1:
        return first
    manifest = {
        **first.manifest,
        "micro_batches": [entry for part in parts for entry in part.manifest["micro_batches"]],
        "left_out": sum(part.manifest["left_out"] for part in parts),
        "event": {**first.event, "micro_batches": sum(part.event["micro_batches"] for part in parts)},
    }
    tensors = {name: saved for part in parts for name, saved in part.micro_batches.items()}
    return replace(first, manifest=manifest, micro_batches=tensors)
