# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads verl's batches: a DataProto, or a dict or TensorDict of its columns, pickled or saved by torch.

Nothing of a file runs: every class and function that it names is replaced by `_Kept`, which keeps what it is given.
"""

import io
import pickle
import signal
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.update_evidence import REWARDS
from .records import TOKENS, RecordError, check_file
from .told import COLUMNS, Told, told

# A small file may keep a dict busy for hours.
SECONDS = 120
_READ = {"input_ids", "attention_mask", "uid", *REWARDS, *COLUMNS.values()}
SAFELY = (
    "no code of a file is run; where you trust it, write its columns: batch = DataProto.load_from_disk(path); "
    'columns = {**batch.batch.clone(), "uid": [*batch.non_tensor_batch["uid"]]}; torch.save(columns, "batch.pt")'
)


class _Kept:
    """An object of a file: what it was made of, and its state."""

    parts: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *parts: Any, **_: Any) -> "_Kept":
        made = super().__new__(cls)
        made.parts = parts
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # in Python, so that it can be interrupted
    def find_class(self, module: str, name: str) -> Any:
        return _Kept


def read_batch(path: Path) -> tuple[int | None, Told]:
    """The step of a file's batch, if it is known, and its responses.

    Raises:
        RecordError: It is no batch, needs code to be read, or has columns that do not fit together.
        OSError: It cannot be read.
    """
    check_file(path)
    problem = f"{path} has no batch of verl's: {{}}."
    try:
        with path.open("rb") as file, _time_limit(path):
            is_zip = file.read(2) == b"PK"
            file.seek(0)
            found, meta = _columns(_loaded(file) if is_zip else _Unpickler(file).load())
            columns = {name: _column(found[name]) for name in _READ & found.keys()}
    except (OSError, MemoryError, RecordError):
        raise
    except Exception as error:  # a damaged file may raise any
        raise RecordError(f"{path} is not read ({type(error).__name__}): {SAFELY}") from error
    if "rollout_data" in found or "format_version" in found:
        raise RecordError(problem.format("if it is slime's, examples/slime_records.py makes records of it"))
    if "response_mask" not in columns:
        raise RecordError(problem.format("it has no response_mask"))
    step = meta.get("global_steps", found.get("global_steps"))
    try:
        return step if type(step) is int else None, told(columns)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise RecordError(f"{path} has columns that do not fit together: {error!r:.200}") from error


@contextmanager
def _time_limit(path: Path) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise RecordError(f"{path} takes over {SECONDS} seconds to read.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _loaded(file: Any) -> Any:
    with zipfile.ZipFile(file) as parts:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in parts.infolist()):
            raise ValueError("it is compressed, and files that torch.save writes are not")
    file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    with torch.serialization.safe_globals([(_Kept, name) for name in names]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _columns(value: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The columns of what a file has, and a DataProto's `meta_info`."""
    if isinstance(value, Mapping):
        return value, {}
    if isinstance(value.state, tuple):  # a DataProto
        batch, others, meta = value.state
        of_batch, _ = _columns(_loaded(io.BytesIO(batch)))
        return {**of_batch, **others}, meta
    if isinstance(value.parts[0], Mapping):  # a TensorDict whose tensors are parts of one
        leaves, storage = value.parts[0]["leaves"], value.parts[1]
        return _jagged({name: _leaf(storage, *leaf) for name, leaf in leaves.items()}), {}
    return next(part["_tensordict"] for part in (*value.parts, value.state) if isinstance(part, Mapping)), {}


def _leaf(storage: Tensor, dtype: str, shape: Any, start: int, stop: int, pad: int) -> Tensor:
    found = storage[start:stop].view(getattr(torch, dtype.removeprefix("torch.")))
    return found[: torch.Size(shape).numel()].view(shape)


def _jagged(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Nested tensors put together from their values and offsets."""
    found = {name: leaf for name, leaf in leaves.items() if not name.startswith("<NJT")}
    for name in leaves:
        if name.startswith("<NJT_OFFSETS>"):
            of = name.removeprefix("<NJT_OFFSETS>")
            found[of] = torch.nested.nested_tensor_from_jagged(leaves[f"<NJT_VALUES>{of}"], leaves[name])
    return found


def _column(value: Any) -> Any:
    """A column: a tensor, or a list with a text or a number for each row."""
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.jagged) or value.numel() > 4 * TOKENS or value.is_complex():
            raise ValueError(f"a column has over {4 * TOKENS:,} values, or is no dense tensor")
        return value
    if isinstance(value, _Kept):  # numpy's array of objects, or a stack of a TensorDict's values
        of = value.state
        value = of[4] if isinstance(of, tuple) else [_value(each.state) for each in of["tensordicts"]]
    if not (isinstance(value, list) and all(isinstance(each, (str, int)) for each in value)):
        raise TypeError("a column has more than texts and whole numbers")
    return [str(each)[:200] for each in value]


def _value(state: Mapping[str, Any]) -> Any:
    return state["non_tensordict" if "non_tensordict" in state else "_non_tensordict"]["data"]
