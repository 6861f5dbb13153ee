# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what slime's --save-debug-train-data writes, in both of its forms. docs/other-trainers.md cites them.

Such a file is pickled. It is read with `weights_only=True`, which takes tensors and plain values and runs no code.
Values of other types, such as numpy's numbers, become `_LeftOut`.
"""

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .plain_files import check_file
from .records import TOKENS_IN_A_ROW, RecordError

_FORMAT = 2
# By the field of a plain record, that of a sample.
_VALUES = {
    "response_mask": "loss_masks",
    "advantages": "advantages",
    "old_log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
}
_PLURAL = "response_lengths"
_READ = (_PLURAL, "tokens", *_VALUES.values(), "rollout_ids", "sample_index", "rollout_mask_sums")


class _LeftOut:
    """What stands for a value that is neither a tensor nor a plain value."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


@dataclass
class TrainData:
    """The samples of one optimizer step.

    Args:
        rollout_id (int, optional): The rollout.
        steps (int): How many optimizer steps the rollout has.
        ranks (int): How many data-parallel ranks the file names.
        samples (list): The fields of a plain record for each sample, after its place.
        notes (list[str]): What is not known.
    """

    rollout_id: int | None
    steps: int = 1
    ranks: int = 1
    samples: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_slime(path: Path, step: int = 0, own_weights: bool = True) -> TrainData:
    """Reads a file.

    Args:
        path (Path): The file.
        step (int): The optimizer step of the rollout, from 0.
        own_weights (bool): Whether each token's weight is that of slime's loss without --calculate-per-token-loss, as
            far as the file has what it takes.

    Raises:
        RecordError: It is not such a file, or has no such step.
        OSError: It cannot be read.
    """
    check_file(path)
    data, types = _loaded(path)
    try:
        if isinstance(data, Mapping) and data.get("format_version") == _FORMAT:
            found = _of_samples(path, data, step, own_weights)
        elif isinstance(data, Mapping) and isinstance(data.get("rollout_data"), Mapping):
            found = _of_rank(path, data, step, own_weights)
        else:
            raise RecordError(f"{path} is not train data of slime: it has neither format 2 nor 'rollout_data'.")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} is not train data of slime that fits together: {error!r:.200}.") from error
    rollout_id = data.get("rollout_id")
    found.rollout_id = rollout_id if type(rollout_id) is int and rollout_id >= 0 else None
    if types:
        parts = [data, data.get("rollout_data"), *data.get("samples", ())]
        names = {str(key) for part in parts if isinstance(part, Mapping) for key in part if _left_out(part[key])}
        of = f" of {', '.join(sorted(names))}" if names else ""
        found.notes.append(f"{path.name}: what has the types {types} was left out{of}.")
    return found


def _loaded(path: Path) -> tuple[Any, str]:
    """What a file has, and the names of the types that were left out of it."""
    try:
        with zipfile.ZipFile(path) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                raise RecordError(f"{path} is compressed, and files that torch.save writes are not.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sentence of ours says what is wrong
            types = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            with torch.serialization.safe_globals([(_LeftOut, name) for name in types]):
                return torch.load(path, map_location="cpu", weights_only=True), ", ".join(sorted(types)[:16])
    except zipfile.BadZipFile as error:
        raise RecordError(f"{path} is damaged, or older than torch 1.6: load it, and save it again.") from error
    except (OSError, MemoryError, RecordError):
        raise
    except Exception as error:  # a damaged file may raise any
        raise RecordError(
            f"{path} is not read: it has more than tensors and plain values, or is damaged "
            f"({type(error).__name__}), and code of a file is not run."
        ) from error


def _left_out(value: Any) -> bool:
    """Whether a value was left out, or one of a list or mapping."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return any(isinstance(each, _LeftOut) for each in parts)


def _of_samples(path: Path, data: Mapping[str, Any], step: int, own_weights: bool) -> TrainData:
    """The form since August 2026: one file with a list of samples, and each rank's micro-batches beside it."""
    shards, samples = data["dp_shards"], data["samples"]
    found = TrainData(None, ranks=max(len(shards), 1))
    places = {}
    for number, sample in enumerate(samples):
        name = sample.get("rollout_position", sample.get("sample_index"))
        places[int(sample["data_parallel_rank"]), None if name is None else int(name)] = number
    for shard in shards:
        rank = int(shard["data_parallel_rank"])
        names = shard.get("partition") or shard.get("sample_indices")
        layout = _Layout(shard)
        found.steps = layout.steps
        for micro_batch, indices in enumerate(layout.of_step(path, step)):
            for index in indices:
                number = places[rank, int(names[index])]
                place = f"{path}, sample {number}"
                found.samples.append(
                    (place, _record(place, samples[number], rank, micro_batch, layout.rollouts(step), own_weights))
                )
    return found


def _of_rank(path: Path, data: Mapping[str, Any], step: int, own_weights: bool) -> TrainData:
    """The form before: a file for each rank, with a list for each field."""
    columns, rank = data["rollout_data"], int(data.get("rank", 0))
    count = len(columns[_PLURAL])
    found = TrainData(None, ranks=rank + 1)
    found.notes.append(
        f"{path.name} has slime's earlier form: its rank is taken for the data-parallel rank, so give one file of each "
        "data-parallel rank, and none of other tensor or pipeline ranks."
    )
    layout = _Layout(columns)
    known = "micro_batch_indices" in columns
    found.steps = layout.steps
    read = {key: columns[key] for key in _READ if columns.get(key) is not None}
    for key, column in read.items():
        if len(column) != count:
            raise RecordError(f"{path}, field {key!r}: it has {len(column):,} samples, and {_PLURAL!r} has {count:,}.")
    for micro_batch, indices in enumerate(layout.of_step(path, step) if known else [range(count)]):
        for index in indices:
            sample = {key: column[index] for key, column in read.items()}
            place = f"{path}, sample {index}"
            of_step = layout.rollouts(step)
            fields = _record(place, sample, rank, micro_batch if known else None, of_step, own_weights)
            found.samples.append((place, fields))
    return found


@dataclass
class _Layout:
    """A rank's micro-batches: `micro_batch_indices`, and how many of them each step has."""

    of: Mapping[str, Any]

    @property
    def _counts(self) -> list[int]:
        micro_batches = self.of.get("micro_batch_indices") or []
        return [int(count) for count in self.of.get("num_microbatches") or [len(micro_batches)]]

    @property
    def steps(self) -> int:
        return len(self._counts)

    def of_step(self, path: Path, step: int) -> list[list[int]]:
        """The samples of each micro-batch of a step, by their indices among the rank's."""
        if not 0 <= step < self.steps:
            raise RecordError(f"{path} has {self.steps:,} optimizer steps, and none with the number {step}.")
        start = sum(self._counts[:step])
        chosen = self.of["micro_batch_indices"][start : start + self._counts[step]]
        return [[int(index) for index in indices] for indices in chosen]

    def rollouts(self, step: int) -> int | None:
        """How many rollouts the step has on all ranks."""
        sizes = self.of.get("global_batch_sizes")
        return None if sizes is None else int(sizes[step])


def _record(
    place: str, sample: Mapping[str, Any], rank: int, micro_batch: int | None, rollouts: int | None, own_weights: bool
) -> dict[str, Any]:
    """The fields of a plain record."""
    for key in _READ:
        if _left_out(sample.get(key)):
            raise RecordError(f"{place}, field {key!r}: save it as a tensor or as plain numbers (`.tolist()`).")
    length = int(sample[_PLURAL])
    record: dict[str, Any] = {name: sample[key] for name, key in _VALUES.items() if sample.get(key) is not None}
    record |= {"input_ids": sample["tokens"], "response_length": length, "rank": rank}
    if micro_batch is not None:
        record["micro_batch"] = micro_batch
    uid = sample.get("rollout_ids", sample.get("sample_index"))
    if isinstance(uid, (int, str)):
        record["uid"] = uid
    mask, sums = record.get("response_mask"), sample.get("rollout_mask_sums")
    # One of another length is refused with the record; a few bytes may stand for many values.
    fits = mask is not None and len(mask) == length <= TOKENS_IN_A_ROW
    if own_weights and fits and sums is not None and rollouts:
        # Each rollout counts once, however many samples it has: cp_utils.get_sum_of_sample_mean, loss.loss_function.
        record["weights"] = torch.as_tensor(mask).double() / (max(float(sums), 1.0) * rollouts)
    return record
