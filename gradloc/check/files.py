# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which identities hold in the steps that files have: records, verl's batches, prime-rl's exports, a bundle."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from ..bundles.limits import MANIFEST
from ..convert.batches import read_batch
from ..convert.records import Record, RecordError, bounded_memory, json_lines, read_record, read_records
from ..convert.told import Told, told, told_by_records
from ..facts import NAMES
from ..judge import Run, of_one_step
from ..judge.run import RESUME_STEPS
from ..lines import Answer
from ..tools.opening import BundleError, open_bundle
from .most_off import most_off

_BATCHES = (".pt", ".pth", ".pkl", ".pickle")
_KNOWN = (".jsonl", ".parquet", *_BATCHES)
# By our names, those of prime-rl's exports.
_PRIME_RL = {
    "response_ids": "token_ids",
    "response_mask": "loss_mask",
    "advantages": "advantages",
    "log_probs": "trainer_logprobs",
    "rollout_log_probs": "inference_logprobs",
}
_UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
# By identity, its state, its warning if it is broken, and the step of these.
_Found = dict[str, tuple[Any, Any, Told]]
# What was checked, states by identity, warnings, and the rows in which the first broken identity is most off.
Checked = tuple[str, dict[str, Any], list[Any], list[dict[str, Any]]]


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
            if len(paths) == 1 and (Path(paths[0]) / MANIFEST).exists():
                return _of_bundle(paths[0])
            return _of_steps(_steps([each for path in paths for each in _listed(Path(path))]), first_step)
    except (RecordError, BundleError) as error:
        raise OSError(str(error)) from error


def _of_steps(steps: Iterable[tuple[int | None, Told]], first_step: bool) -> Checked:
    summed = ((number, step, step.facts()) for number, step in steps)
    begun = [*islice(summed, 2)]
    if not begun:
        raise RecordError("There is no record.")
    run, found, count, responses = Run(), _Found(), 0, 0
    is_first = first_step or [_has_same_reference(facts) for _, _, facts in begun] == [True, False]
    if not is_first:
        run.load_state_dict(None)
        for _ in range(RESUME_STEPS):  # what is said of a resume is not said of files
            run.start_update(None)
    for number, step, facts in chain(begun, summed):
        run.start_update(number)
        run.take_in(facts)
        run.take_in_rows(step.rows)
        run.add_step(float(is_first))
        count += 1
        responses += len(step.tokens)
        answer = run.answer() if len(begun) > 1 else of_one_step(facts, step.rows, is_first)
        _add(found, step.explained(answer), step, number)
    where = f"{count:,} steps" if count > 1 else "one step" if number is None else f"step {number}"
    return _checked(found, f"{responses:,} responses of {where}", is_first and count == 1)


def _has_same_reference(facts: Sequence[float]) -> bool:
    """Whether its log-probs are the policy's, bit for bit."""
    sums = dict(zip(NAMES, facts, strict=True))
    return sums["reference tokens"] > 0 and sums["reference size"] == 0


def _checked(found: _Found, where: str, is_first: bool = False) -> Checked:
    broken = [(step, warning) for _, warning, step in found.values() if warning is not None]
    rows = most_off(*broken[0], is_first) if broken else []
    return where, {name: state for name, (state, _, _) in found.items()}, [warning for _, warning in broken], rows


def _add(found: _Found, answer: Answer, step: Told, number: int | None) -> None:
    warnings = {each["identity"]: each for each in answer["warnings"]}
    for name, state in answer["identities"].items():
        was, warning, of = found.get(name, (state, None, step))
        if name in warnings or was["state"] != "broken":
            found[name] = state, warnings.get(name), step
        elif was["missing"] is None:
            again = "holds again later" if number is None else f"holds again in step {number}"
            found[name] = {**was, "missing": again}, warning, of


def _of_bundle(path: str) -> Checked:
    """What its tokens say at once, then what training, or a conversion, said of the update."""
    bundle = open_bundle(path)
    event, rows, places = bundle.event, [], []
    for (rank, index), saved in bundle.micro_batches.items():
        for i, row in enumerate(bundle.rows[rank, index]):
            rows.append({name: values[i : i + 1] for name, values in saved.tokens.items()})
            places.append(f"rank {rank}, row {row}")
    step = Told(places, rows, (), {}, event["epoch"], event["epoch"] == event["mini_batch"] == 0)
    answers: list[Any] = [event] if event.get("identities") else []
    if not (answers and bundle.is_converted):  # whose tokens have what records lacked
        answers.append(step.answer())
    found = _Found()
    for answer in answers:
        warnings = {each.get("identity", each["name"]): each for each in answer["warnings"]}
        for name, state in answer["identities"].items():
            if name not in found or state["state"] == "broken":
                found[name] = state, warnings.get(name), step
    return _checked(found, f"{len(rows):,} responses in the bundle of step {event['global_step']}")


def _listed(path: Path) -> list[Path]:
    """The files of a path: itself, or those in a folder; the folder of one step of prime-rl's is one."""
    if not path.is_dir() or _is_export(path):
        return [path]
    known = [each for each in sorted(path.iterdir()) if each.suffix.lower() in _KNOWN or _is_export(each)]
    if not known:
        raise RecordError(f"{path} has no evidence, no bundle, and no file with records or a batch.")
    return known


def _is_export(path: Path) -> bool:
    return path.is_dir() and any(path.glob("rank_*.jsonl"))


def _number(path: Path) -> int | None:
    """The step in a name, as in step12-rank0.jsonl or 12.pt."""
    found = re.search(r"step[_-]?(\d{1,12})", path.name) or re.fullmatch(r"(\d{1,12})", path.stem)
    return None if found is None else int(found[1])


def _in_order(step: tuple[int | None, Any]) -> tuple[bool, int]:
    return step[0] is None, step[0] or 0


def _steps(paths: Sequence[Path]) -> Iterator[tuple[int | None, Told]]:
    """The steps in order. Records of one step may be in several files; a batch is a step."""
    numbered = sorted(((_number(path), path) for path in paths), key=_in_order)
    for number, group in groupby(numbered, key=lambda pair: pair[0]):
        found, others = [], []
        for _, path in group:
            if path.suffix.lower() not in _BATCHES:
                others.append(path)
                continue
            columns, step = read_batch(path)
            with _fitting(path):
                found.append((number if step is None else step, told(columns)))
        records: defaultdict[int | None, list[Record]] = defaultdict(list)
        for record in _records(others):
            records[number if record.step is None else record.step].append(record)
        yield from sorted([*found, *((step, told_by_records(of)) for step, of in records.items())], key=_in_order)


def _records(paths: Sequence[Path]) -> Iterator[Record]:
    """The records of files; of a step of prime-rl's token exports, the responses that have tokens of the loss."""
    exports = [export for path in paths if path.is_dir() for export in sorted(path.glob("rank_*.jsonl"))]
    for place, one in chain.from_iterable(map(json_lines, exports)):
        with _fitting(place):
            start = next((i for i, trained in enumerate(one["loss_mask"]) if trained), None)
            fields = {name: one[of][start:] for name, of in _PRIME_RL.items()}
            fields |= {"prompt_ids": one["token_ids"][:start], "rank": one["rank"], "step": one.get("step")}
        if start is not None:
            yield read_record(fields, place, for_check=True)
    if plain := [path for path in paths if not path.is_dir()]:
        yield from read_records(plain, for_check=True)


@contextmanager
def _fitting(place: object) -> Iterator[None]:
    try:
        yield
    except _UNFIT as error:
        raise RecordError(f"{place} has columns that do not fit together: {error!r:.200}") from error
