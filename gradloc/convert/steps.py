# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the steps that files have: records, verl's batches, prime-rl's exports, bundles."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..bundles.limits import MANIFEST
from ..tools.opening import open_bundle
from .batches import read_batch
from .records import Record, RecordError, read_records
from .told import Told, told_by_bundle, told_by_records

_BATCHES = (".pt", ".pth", ".pkl", ".pickle")
_KNOWN = (".jsonl", ".parquet", *_BATCHES)
# The files of a step of prime-rl's token exports.
_EXPORT = "rank_*.jsonl"
# The responses of a step, after its number, if that is known.
Step = tuple[int | None, Told]


def steps_of(paths: Iterable[str]) -> Iterator[Step]:
    """The steps in order, those without a number last; files whose names have one number are in memory together.

    Args:
        paths (Iterable[str]): Files, folders of such, and bundles. Records of one step may be in several files; a batch
            is a step, and so is a bundle. What a file says of its step comes before what its name says.

    Raises:
        RecordError: A folder has none of these, or a file is malformed.
        BundleError: A bundle cannot be used.
        OSError: A file cannot be read.
    """
    numbered = sorted(((_number(path), path) for given in paths for path in _listed(Path(given))), key=_place)
    for number, group in groupby(numbered, key=itemgetter(0)):
        steps: list[Step] = []
        files = []
        for _, path in group:
            if path.is_dir():
                bundle = open_bundle(path)
                steps.append((bundle.event["global_step"], told_by_bundle(bundle)))
            elif path.suffix.lower() in _BATCHES:
                step, batch = read_batch(path)
                steps.append((number if step is None else step, batch))
            else:
                files.append(path)
        records: defaultdict[int | None, list[Record]] = defaultdict(list)
        for record in read_records(files, for_check=True):
            records[number if record.step is None else record.step].append(record)
        steps += [(step, told_by_records(of)) for step, of in records.items()]
        yield from sorted(steps, key=_place)


def _listed(path: Path) -> list[Path]:
    """The files of a path: itself, or those in a folder, and in its folders those of prime-rl's exports."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    known = [each for each in (*path.iterdir(), *path.glob(f"*/{_EXPORT}")) if each.suffix.lower() in _KNOWN]
    if not known:
        raise RecordError(f"{path} has no evidence, no bundle, and no file with records or a batch.")
    return sorted(known)


def _number(path: Path) -> int | None:
    """The step in a name, as in step12-rank0.jsonl or 12.pt; of an export, in that of its folder."""
    path = path.parent if path.match(_EXPORT) else path
    found = re.search(r"step[_-]?(\d{1,12})", path.name) or re.fullmatch(r"(\d{1,12})", path.stem)
    return None if found is None else int(found[1])


def _place(numbered: tuple[int | None, Any]) -> float:
    """Among others in order: what has no number comes last."""
    return math.inf if numbered[0] is None else numbered[0]
