# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which identities hold in the steps that files have: records, verl's batches, prime-rl's exports, a bundle."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..bundles.limits import MANIFEST
from ..convert.batches import read_batch
from ..convert.records import Record, RecordError, bounded_memory, read_records
from ..convert.told import Told, told_by_bundle, told_by_records
from ..facts import NAMES
from ..judge import Run
from ..judge.run import RESUME_STEPS
from ..tools.opening import BundleError, open_bundle
from ..tools.reading import Evidence
from .most_off import most_off

_BATCHES = (".pt", ".pth", ".pkl", ".pickle")
_KNOWN = (".jsonl", ".parquet", *_BATCHES)
# The files of a step of prime-rl's token exports.
_EXPORT = "rank_*.jsonl"
# What was checked, what is known of it, and the rows in which the first broken identity is most off.
Checked = tuple[str, Evidence, list[dict[str, Any]]]
# The responses of a step, after its number, if that is known.
Step = tuple[int | None, Told]


def check_files(paths: Sequence[str], first_step: bool = False) -> Checked:
    """Checks files. An identity that is broken in a step stays so.

    Args:
        first_step (bool): Whether no optimizer step was taken before the first of them. That is also known where
            reference and policy are the same there, bit for bit, and not in the second one.

    Raises:
        OSError: A file cannot be read, or has nothing to check; the message is a sentence.
    """
    try:
        with bounded_memory():
            return _checked(_steps([each for path in paths for each in _listed(Path(path))]), first_step)
    except (RecordError, BundleError) as error:
        raise OSError(str(error)) from error


def _checked(steps: Iterator[Step], first_step: bool) -> Checked:
    summed = ((number, step, step.facts()) for number, step in steps)
    begun = [*islice(summed, 2)]
    if not begun:
        raise RecordError("There is no record.")
    is_alone = len(begun) == 1
    sums = [dict(zip(NAMES, facts, strict=True)) for _, _, facts in begun]
    is_same = [each["reference tokens"] > 0 and each["reference size"] == 0 for each in sums]
    is_first = first_step or is_same == [True, False]
    run, evidence, lengths = Run(), Evidence(""), []
    off: dict[str, tuple[Told, Any]] = {}
    if not is_first:
        run.load_state_dict(None)
        for _ in range(RESUME_STEPS):  # what is said of a resume is not said of files
            run.start_update(None)
    for number, step, facts in chain(begun, summed):
        run.start_update(None if is_alone else number)
        run.take_in(facts)
        run.take_in_rows(step.rows)
        run.add_step(float(is_first))
        answer: Any = step.explained(run.answer(at_once=is_alone))
        for name, was in evidence.identities.items():
            if was["state"] == "broken" != answer["identities"][name]["state"]:
                answer["identities"][name] = {**was, "missing": "holds again"}
        # The first step in which it is broken shows it: in a later one, it may hold again.
        off = {each.get("identity"): (step, each) for each in answer["warnings"]} | off
        said = [*evidence.warnings.get(number, ()), *answer["warnings"]]  # steps may have one number, or none
        evidence.add_answer({**answer, "warnings": said}, None if is_alone else number)
        lengths.append(len(step.tokens))
    rows = (most_off(*off[name], is_first and is_alone) for name in evidence.identities if name in off)
    where = f"{len(lengths):,} steps" if len(lengths) > 1 else "one step" if number is None else f"step {number}"
    return f"{sum(lengths):,} responses of {where}", evidence, next(rows, [])


def _listed(path: Path) -> list[Path]:
    """The files of a path: itself, or those in a folder, and in its folders those of prime-rl's exports."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    known = [each for each in (*path.iterdir(), *path.glob(f"*/{_EXPORT}")) if each.suffix.lower() in _KNOWN]
    if not known:
        raise RecordError(f"{path} has no evidence, no bundle, and no file with records or a batch.")
    return sorted(known)


def _steps(paths: Sequence[Path]) -> Iterator[Step]:
    """The steps in order; those whose files have one number are in memory together.

    Records of one step may be in several files; a batch is a step.
    """
    numbered = sorted(((_number(path), path) for path in paths), key=_place)
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


def _number(path: Path) -> int | None:
    """The step in a name, as in step12-rank0.jsonl or 12.pt; of an export, in that of its folder."""
    path = path.parent if path.match(_EXPORT) else path
    found = re.search(r"step[_-]?(\d{1,12})", path.name) or re.fullmatch(r"(\d{1,12})", path.stem)
    return None if found is None else int(found[1])


def _place(numbered: tuple[int | None, Any]) -> float:
    """Among others in order: what has no number comes last."""
    return math.inf if numbered[0] is None else numbered[0]
