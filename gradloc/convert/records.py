# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads files of plain records, JSON Lines or Parquet, and checks the records."""

import contextlib
import importlib
import math
import resource
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundles.layout import Row
from ..config import is_finite_number
from ..evidence.writer import LINE_BYTES
from ..tools.schema import parse

# By field, the name that a bundle has for these values, one for each token of the response.
VALUES: Mapping[str, str] = {
    name: name.removesuffix("s")
    for name in (
        *("response_mask", "advantages", "log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs"),
        *("coefficients", "weights", "rollout_is_weights"),
    )
}
FIELDS = (
    *("prompt_ids", "response_ids", "input_ids", "response_length"),
    *VALUES,
    *("temperature", "rank", "micro_batch", "uid", "reward", "step"),
)

_NO_IDS = "texts only, no token ids;"
# By their fields, what other trainers write that is no record, and what to do instead.
_OTHERS: Mapping[tuple[str, str], str] = {
    ("prompt", "completion"): f"{_NO_IDS} in TRL, train with RecordingTrainer of examples/trl_records.py",
    ("input", "output"): f"{_NO_IDS} in verl, set actor_rollout_ref.actor.spike_detection=True, which keeps bundles",
    ("token_ids", "loss_mask"): "an export of prime-rl's; examples/prime_rl_records.py makes records of it",
}
# By our names, the fields of prime-rl's token exports.
_OF_EXPORT: Mapping[str, str] = {
    "response_ids": "token_ids",
    "response_mask": "loss_mask",
    "advantages": "advantages",
    "log_probs": "trainer_logprobs",
    "rollout_log_probs": "inference_logprobs",
}
TOKENS_IN_A_ROW = 2**22
_TOKEN_IDS = 2**31
# A log-prob is not positive but for rounding.
_ROUNDING = 1e-2


class RecordError(ValueError):
    """What is wrong with a file, in one sentence that names the file, the record and the field."""


@dataclass(frozen=True)
class Record:
    """A response."""

    place: str  # the file and the record, for messages
    row: Row
    # By the names of `VALUES`, those that the record has, float64 of shape (response length,); 0 where `response_mask`,
    # which is always there, is 0.
    tokens: dict[str, Tensor]
    rank: int  # its data-parallel rank
    micro_batch: int | None  # that on its rank
    uid: str | None  # of its prompt
    reward: float | None
    step: int | None
    # `rollout_log_probs` as they are given, also where `response_mask` is 0: the rollout may have sampled these tokens.
    sampled: Tensor | None
    unknown: tuple[str, ...]  # fields that were not read


def _whole(most: int) -> tuple[str, Callable[[Any], bool]]:
    return f"a whole number from 0 to {most:,}", lambda value: type(value) is int and 0 <= value <= most


# By field with a single value, what it must be, and whether a value is that.
_SINGLE: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a positive number", lambda value: is_finite_number(value) and value > 0),
    "uid": ("a text or a whole number", lambda value: isinstance(value, (str, int))),
    "reward": ("a number", lambda value: isinstance(value, float) or is_finite_number(value)),
    "response_length": _whole(TOKENS_IN_A_ROW),
    **dict.fromkeys(("rank", "micro_batch"), _whole(2**16)),
    "step": _whole(2**40),
}


def read_record(
    fields: Any, place: str, temperature: float = 1.0, keep_nonfinite: bool = False, for_check: bool = False
) -> Record:
    """Checks the fields of a record.

    Args:
        fields (Any): What a file has for it: an object with `FIELDS`; nulls count as missing.
        place (str): The file and the record, for messages.
        temperature (float): That of records that name none.
        keep_nonfinite (bool): Whether NaN and infinities are taken instead of refused; weights are always finite.
        for_check (bool): Whether what is wrong is to be found: all numbers are taken, and advantages may be missing.

    Raises:
        RecordError: A field is missing or malformed.
    """
    if not isinstance(fields, Mapping):
        raise RecordError(f"{place} is not an object with fields.")
    known = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    _check_ids({name for name, value in fields.items() if value is not None}, place)
    if "response_ids" in known:
        known.pop("response_length", None)  # which it has
    for name, (what, holds) in _SINGLE.items():
        if name in known and not holds(known[name]):
            given = repr(known[name])
            given = given if len(given) <= 40 else f"{given[:40]}…"
            raise RecordError(f"{place}, field {name!r}: it must be {what}, and is {given}.")
    input_ids, length = _ids(known, place)
    mask = torch.ones(length, dtype=torch.float64)
    if "response_mask" in known:
        mask = _numbers(known["response_mask"], "response_mask", length, place)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise RecordError(f"{place}, field 'response_mask': it must be of zeros and ones.")
    tokens = {"response_mask": mask}
    for name, own_name in VALUES.items():
        if name != "response_mask" and name in known:
            tokens[own_name] = _values(known[name], name, mask, place, keep_nonfinite or for_check, for_check)
    if not (for_check or "advantage" in tokens or "coefficient" in tokens):
        raise RecordError(f"{place}, field 'advantages': it is missing, and so is 'coefficients'.")
    uid, reward, sampled = (known.get(name) for name in ("uid", "reward", "rollout_log_probs"))
    return Record(
        place,
        Row(input_ids, torch.arange(len(input_ids)), length, float(known.get("temperature", temperature))),
        tokens,
        known.get("rank", 0),
        known.get("micro_batch"),
        None if uid is None else str(uid)[:200],
        None if reward is None else float(reward),
        known.get("step"),
        None if sampled is None else _numbers(sampled, "rollout_log_probs", length, place),
        tuple(sorted(str(name)[:40] for name in fields if name not in FIELDS)),
    )


def _check_ids(names: Collection[str], place: str) -> bool:
    """Whether there are token ids among fields of these names; refuses those of another trainer that are no record."""
    if "response_ids" in names or "input_ids" in names:
        return True
    for fields, instead in _OTHERS.items():
        if all(name in names for name in fields):
            raise RecordError(f"{place}: {instead}.")
    return False


def _ids(known: Mapping[str, Any], place: str) -> tuple[Tensor, int]:
    """The token ids of prompt and response, and the response's length."""
    if "response_ids" in known and "prompt_ids" in known:
        parts = [_token_ids(known[name], name, place) for name in ("prompt_ids", "response_ids")]
        found, length = torch.cat(parts), len(parts[1])
    elif "input_ids" in known and "response_length" in known:
        found = _token_ids(known["input_ids"], "input_ids", place)
        length = known["response_length"]
    else:
        raise RecordError(
            f"{place}, field 'response_ids': a record needs prompt_ids and response_ids, or input_ids and "
            "response_length."
        )
    if not 0 < length < len(found):
        raise RecordError(
            f"{place}, field 'response_length': the response must have at least one token, and the prompt as well; of "
            f"{len(found):,} tokens, {length:,} are the response."
        )
    if len(found) > TOKENS_IN_A_ROW:
        raise RecordError(f"{place}: it has {len(found):,} tokens, and {TOKENS_IN_A_ROW:,} are the limit.")
    return found, length


def _token_ids(value: Any, name: str, place: str) -> Tensor:
    if not (isinstance(value, Sequence) and all(type(each) is int and 0 <= each < _TOKEN_IDS for each in value)):
        raise RecordError(f"{place}, field {name!r}: it must be a list of token ids, whole numbers from 0 to 2^31 - 1.")
    return torch.tensor(value, dtype=torch.int64)


def _values(value: Any, name: str, mask: Tensor, place: str, keep_nonfinite: bool, keep_positive: bool) -> Tensor:
    """A value for each token of the response, 0 where the mask is 0."""
    if name == "advantages" and not isinstance(value, Sequence):
        value = [value] * len(mask)
    found = torch.where(mask == 1, _numbers(value, name, len(mask), place), 0.0)
    is_weight = name == "weights"  # the threshold is computed from all of them
    if (is_weight or not keep_nonfinite) and not bool(found.isfinite().all()):
        position = int((~found.isfinite()).nonzero()[0])
        what_to_do = "" if is_weight else "; if training had that, too, take --keep-nonfinite"
        raise RecordError(f"{place}, field {name!r}: it is {float(found[position])} at index {position}{what_to_do}.")
    if not keep_positive and name.endswith("log_probs") and bool((found > _ROUNDING).any()):
        position = int((found > _ROUNDING).nonzero()[0])
        raise RecordError(
            f"{place}, field {name!r}: a log-prob is not positive, and it is {float(found[position]):g} at index "
            f"{position}."
        )
    return found


def _numbers(value: Any, name: str, length: int, place: str) -> Tensor:
    """Numbers as float64 of shape (length,); null, which pandas writes for NaN, is NaN."""
    # A float may be NaN or infinite; an int may be larger than any float.
    if not isinstance(value, Sequence) or not all(
        each is None or isinstance(each, (bool, float)) or is_finite_number(each) for each in value
    ):
        raise RecordError(f"{place}, field {name!r}: it must be a list of numbers.")
    if len(value) != length:
        raise RecordError(f"{place}, field {name!r}: it has {len(value):,} values, and the response {length:,} tokens.")
    return torch.tensor([math.nan if each is None else float(each) for each in value], dtype=torch.float64)


# The limit of a file.
FILE_BYTES = 2 * 2**30
# The limits of all files together.
RECORDS, TOKENS = 2**20, 2**25
# Memory that reading may take in addition.
MEMORY_BYTES = 8 * 2**30


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Bounds the memory of what runs in it: a few bytes of a file may stand for many in memory.

    Raises:
        RecordError: It took more.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):  # not Linux: there is no such limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        if limits[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, limits[1]))
    try:
        yield
    except MemoryError as error:
        raise RecordError(f"Reading the files takes over {MEMORY_BYTES:,} bytes of memory.") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check_file(path: Path) -> None:
    """Refuses what is no ordinary file, and files that are too large.

    Raises:
        RecordError: It is one of these.
        OSError: It cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise RecordError(f"{path} is not an ordinary file.")
    if found.st_size > FILE_BYTES:
        raise RecordError(f"{path} has {found.st_size:,} bytes, and {FILE_BYTES:,} are the limit.")


def read_records(
    paths: Iterable[Path], temperature: float = 1.0, keep_nonfinite: bool = False, for_check: bool = False
) -> Iterator[Record]:
    """The records of JSON Lines and Parquet files, `for_check` also those of prime-rl's exports; see `read_record`.

    Raises:
        RecordError: A file or a record is malformed, or there are too many.
        OSError: A file cannot be read.
    """
    count = tokens = 0
    for path in paths:
        lines = (parquet_rows if path.suffix.lower() == ".parquet" else json_lines)(path)
        for place, fields in filter(None, map(_of_export, lines)) if for_check else lines:
            record = read_record(fields, place, temperature, keep_nonfinite, for_check)
            count += 1
            tokens += len(record.row.input_ids)
            for what, number, most in (("records", count, RECORDS), ("tokens", tokens, TOKENS)):
                if number > most:
                    raise RecordError(f"{place} is one too many: {most:,} {what} are the limit.")
            yield record


def _of_export(line: tuple[str, Any]) -> tuple[str, Any] | None:
    """A line, after its place, with one of prime-rl's exports as a record; None if no token of that is in the loss."""
    place, fields = line
    if not isinstance(fields, Mapping) or "response_ids" in fields or not {"token_ids", "loss_mask"} <= fields.keys():
        return line
    if lacks := [name for name in _OF_EXPORT.values() if not isinstance(fields.get(name), list)]:
        raise RecordError(f"{place} is an export of prime-rl's, and has no list {lacks[0]!r}.")
    start = next((i for i, trained in enumerate(fields["loss_mask"]) if trained), None)
    lists = {name: fields[of][start:] for name, of in _OF_EXPORT.items()}
    whole = {"prompt_ids": fields["token_ids"][:start], "rank": fields.get("rank"), "step": fields.get("step")}
    return None if start is None else (place, whole | lists)


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a Parquet file, each after its place, with the columns that a record has. It needs pyarrow.

    Raises:
        RecordError: It is not Parquet, has no token ids, or pyarrow is missing.
        OSError: It cannot be read.
    """
    check_file(path)
    try:
        pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise RecordError(f"{path} is Parquet, which needs pyarrow: pip install pyarrow.") from None
    if int(pyarrow.__version__.split(".")[0]) < 15:  # before that, a file could name code to run
        raise RecordError(f"{path} is Parquet, and pyarrow {pyarrow.__version__} may run code of a file: update it.")
    try:
        file = parquet.ParquetFile(path)
        if not _check_ids(file.schema_arrow.names, str(path)):
            raise RecordError(f"{path} has no column 'response_ids' or 'input_ids', and records need token ids.")
        known = [name for name in file.schema_arrow.names if name in FIELDS]
        rows = (fields for batch in file.iter_batches(64, columns=known) for fields in batch.to_pylist())
        for number, fields in enumerate(rows, 1):
            yield f"{path}, row {number}", fields
    except (pyarrow.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # pyarrow raises some without, of a file's content
            raise
        raise RecordError(f"{path} is damaged, or no Parquet: {str(error).splitlines()[0]:.200}") from error


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON Lines file, each after its place. Empty lines are left out.

    Raises:
        RecordError: A line is too long, or is not JSON.
        OSError: It cannot be read.
    """
    check_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, LINE_BYTES + 1), b""), 1):
            place = f"{path}, line {number}"
            if len(line) > LINE_BYTES:
                raise RecordError(f"{place} has over {LINE_BYTES:,} bytes.")
            if not line.strip():
                continue
            try:
                value = parse(line)
            except ValueError as error:
                raise RecordError(f"{place} cannot be parsed: {error}.") from error
            yield place, value
