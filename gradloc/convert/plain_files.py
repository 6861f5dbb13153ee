# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads files of plain records: JSON Lines and Parquet. Parquet needs pyarrow."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checks import need
from ..evidence.foreign_json import LINE_BYTES, parse
from .records import RecordError

# Of a file; of a Parquet file, also without its compression.
FILE_BYTES = 2 * 2**30
# Of all files together.
RECORDS, RESPONSE_TOKENS = 2**20, 2**24

_BATCH = 16


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
    """The rows of a Parquet file, each after its place.

    Raises:
        RecordError: It is no Parquet file, or it is too large without its compression.
        OSError: It cannot be read.
    """
    check_file(path)
    need("pyarrow.parquet", "Reading a Parquet file")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            groups = file.metadata.num_row_groups
            size = sum(file.metadata.row_group(group).total_byte_size for group in range(groups))
            if size > FILE_BYTES:
                raise RecordError(f"{path} has {size:,} bytes without compression, and {FILE_BYTES:,} are the limit.")
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read as a Parquet file: {str(error).splitlines()[0][:200]}.") from error
