# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads files of plain records: JSON Lines and Parquet. Parquet needs pyarrow."""

import contextlib
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradloc.evidence.writer import LINE_BYTES

from ..command_line import need
from ..foreign import parse
from .records import FIELDS, TOKENS_IN_A_ROW, RecordError

# Of a file; of a Parquet file, also without its compression.
FILE_BYTES = 2 * 2**30
# Of all files together.
RECORDS, TOKENS = 2**20, 2**25
# What reading may take beside what the process has already.
MEMORY_BYTES = 8 * 2**30

_BATCH = 16


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Bounds the memory of what runs in it: lengths in a file's header may be wrong, and a few bytes stand for many.

    Raises:
        RecordError: It took more.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: there is no such limit
        pages = None
    if pages is not None and limits[0] == resource.RLIM_INFINITY:
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


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON Lines file, each after its place. Empty lines are left out.

    Raises:
        RecordError: A line is too long, or is not JSON.
        OSError: It cannot be read.
    """
    check_file(path)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
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


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a Parquet file, each after its place; fields that are not `FIELDS` are there without their values.

    Raises:
        RecordError: It is no Parquet file, or it is too large without its compression.
        OSError: It cannot be read.
    """
    check_file(path)
    need("Reading a Parquet file", "pyarrow.parquet")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            if size > FILE_BYTES:
                raise RecordError(f"{path} has {size:,} bytes without compression, and {FILE_BYTES:,} are the limit.")
            for index in range(file.metadata.num_columns):
                name = file.schema.column(index).path.split(".")[0]
                if name in FIELDS:
                    _check_count(path, name, sum(group.column(index).num_values for group in groups), TOKENS)
            names = file.schema_arrow.names
            known = [name for name in names if name in FIELDS]
            others = dict.fromkeys(name for name in names if name not in FIELDS)
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=known, use_threads=False):
                for index in range(len(batch)):
                    number += 1
                    place = f"{path}, row {number}"
                    for name, column in zip(batch.schema.names, batch.columns, strict=True):
                        cell = column[index]
                        length = len(cell.values) if isinstance(cell, pyarrow.ListScalar) and cell.is_valid else 0
                        _check_count(place, name, length, TOKENS_IN_A_ROW)
                    yield place, others | batch.slice(index, 1).to_pylist()[0]
    except MemoryError:
        raise
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise RecordError(f"{path} cannot be read as a Parquet file: {str(error).splitlines()[0][:200]}.") from error


def _check_count(place: str | Path, name: str, values: int, limit: int) -> None:
    if values > limit:
        raise RecordError(f"{place}, field {name!r}: it has {values:,} values, and {limit:,} are the limit.")
