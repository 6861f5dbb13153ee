# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes records for `gradloc convert` from what slime's --save-debug-train-data writes, in both of its forms.

python examples/slime_records.py train_data/31.pt 31.jsonl

Such a file is pickled. It is read with `weights_only=True`, which takes tensors and plain values and runs no code.
Values of other types, such as numpy's numbers, are left out. The earlier form has a file for each rank: give those of
all data-parallel ranks, and none of other tensor or pipeline ranks. docs/reference/other-trainers.md cites slime's
files and says which options fit the loss.
"""

import argparse
import json
import shlex
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradloc.convert.records import (
    RECORDS,
    TOKENS,
    TOKENS_IN_A_ROW,
    RecordError,
    bounded_memory,
    check_file,
)
from gradloc.tools.files import write_output

FORMAT = 2
# By the field of a plain record, that of a sample.
VALUES = {
    "response_mask": "loss_masks",
    "advantages": "advantages",
    "old_log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
}
LENGTH = "response_lengths"
READ = (LENGTH, "tokens", *VALUES.values(), "rollout_mask_sums")


class LeftOut:
    """What stands for a value that is neither a tensor nor a plain value."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def main(files: list[Path], records: Path, step: int = 0, per_token_loss: bool = False) -> None:
    """Writes a record for each sample of an optimizer step, then says how to convert them.

    Raises:
        RecordError: A file is not train data of slime, or has no such step.
        OSError: A file cannot be read or written.
    """
    lines: list[str] = []
    rollouts: set[int | None] = set()
    weighted, tokens = True, 0
    with bounded_memory():
        for path in files:
            check_file(path)
            data, types = loaded(path)
            try:
                for record in samples_of(path, data, step, per_token_loss):
                    weighted &= "weights" in record
                    tokens += len(record["input_ids"])
                    if len(lines) == RECORDS or tokens > TOKENS:
                        raise RecordError(f"{path} has one too many: {RECORDS:,} records, {TOKENS:,} tokens at most.")
                    lines.append(json.dumps(record) + "\n")
                rollout = data.get("rollout_id")
                rollouts.add(rollout if type(rollout) is int and rollout >= 0 else None)
                layouts = data["dp_shards"] if "dp_shards" in data else [data["rollout_data"]]
                steps = max((len(counts_of(layout)) for layout in layouts), default=0)
                left_out = names_of_what_was_left_out(data) if types else []
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
                if isinstance(error, RecordError):
                    raise
                raise RecordError(f"{path} is not train data of slime that fits together: {error!r:.200}.") from error
            if steps > 1:
                print(f"{path.name}: step {step} of {steps}, with the log-probs before the first.", file=sys.stderr)
            if types:
                of = f" of {', '.join(left_out)}" if left_out else ""
                print(f"{path.name}: what has the types {types} was left out{of}.", file=sys.stderr)
    if not lines:
        raise RecordError(f"{', '.join(map(str, files))}: there is no sample.")
    write_output(records, "".join(lines))
    command = f"gradloc convert {shlex.quote(str(records))} --out spike"
    if len(rollouts) == 1 and (rollout := rollouts.pop()) is not None:
        command += f" --step {rollout}"
    if not weighted:  # then `convert` computes the weights
        command += f" --loss-agg-mode {'token-mean' if per_token_loss else 'seq-mean-token-mean'}"
    print(f"{len(lines):,} records. Next: {command}")


def loaded(path: Path) -> tuple[Any, str]:
    """What a file has, and the names of the types that were left out of it."""
    try:
        with zipfile.ZipFile(path) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                raise RecordError(f"{path} is compressed, and files that torch.save writes are not.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sentence of ours says what is wrong
            types = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            with torch.serialization.safe_globals([(LeftOut, name) for name in types]):
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


def is_left_out(value: Any) -> bool:
    """Whether a value was left out, or one of a list or mapping."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return any(isinstance(each, LeftOut) for each in parts)


def names_of_what_was_left_out(data: Mapping[str, Any]) -> list[str]:
    """The fields of a file, of its ranks and of its samples that have values which were left out."""
    parts = [data, data.get("rollout_data"), *data.get("samples", ())]
    return sorted({str(key) for part in parts if isinstance(part, Mapping) for key in part if is_left_out(part[key])})


def samples_of(path: Path, data: Any, step: int, per_token_loss: bool) -> Iterator[dict[str, Any]]:
    """The records of an optimizer step."""
    if isinstance(data, Mapping) and data.get("format_version") == FORMAT:
        yield from of_samples(path, data, step, per_token_loss)
    elif isinstance(data, Mapping) and isinstance(data.get("rollout_data"), Mapping):
        yield from of_rank(path, data, step, per_token_loss)
    else:
        raise RecordError(f"{path} is not train data of slime: it has neither format 2 nor 'rollout_data'.")


def of_samples(path: Path, data: Mapping[str, Any], step: int, per_token_loss: bool) -> Iterator[dict[str, Any]]:
    """The form since August 2026: one file with a list of samples, and each rank's micro-batches beside it."""
    samples, places = data["samples"], {}
    for number, sample in enumerate(samples):
        name = sample.get("rollout_position", sample.get("sample_index"))
        places[int(sample["data_parallel_rank"]), None if name is None else int(name)] = number
    for shard in data["dp_shards"]:
        rank = int(shard["data_parallel_rank"])
        names = shard.get("partition") or shard.get("sample_indices")
        for micro_batch, indices in enumerate(micro_batches_of(path, shard, step)):
            for index in indices:
                number = places[rank, int(names[index])]
                place = f"{path}, sample {number}"
                rollouts = None if per_token_loss else rollouts_of(shard, step)
                yield record_of(place, samples[number], rank, micro_batch, rollouts)


def of_rank(path: Path, data: Mapping[str, Any], step: int, per_token_loss: bool) -> Iterator[dict[str, Any]]:
    """The form before: a file for each rank, with a list for each field."""
    columns, rank = data["rollout_data"], int(data.get("rank", 0))
    count = len(columns[LENGTH])
    known = "micro_batch_indices" in columns
    read = {key: columns[key] for key in READ if columns.get(key) is not None}
    for key, column in read.items():
        if len(column) != count:
            raise RecordError(f"{path}, field {key!r}: it has {len(column):,} samples, and {LENGTH!r} has {count:,}.")
    micro_batches = micro_batches_of(path, columns, step)
    for micro_batch, indices in enumerate(micro_batches if known else [range(count)]):
        for index in indices:
            sample = {key: column[index] for key, column in read.items()}
            rollouts = None if per_token_loss else rollouts_of(columns, step)
            yield record_of(f"{path}, sample {index}", sample, rank, micro_batch if known else None, rollouts)


def counts_of(layout: Mapping[str, Any]) -> list[int]:
    """How many micro-batches each step has."""
    return [int(count) for count in layout.get("num_microbatches") or [len(layout.get("micro_batch_indices") or [])]]


def micro_batches_of(path: Path, layout: Mapping[str, Any], step: int) -> list[list[int]]:
    """The samples of each micro-batch of a step, by their indices among the rank's."""
    micro_batches, counts = layout.get("micro_batch_indices") or [], counts_of(layout)
    if not 0 <= step < len(counts):
        raise RecordError(f"{path} has {len(counts):,} optimizer steps, and none with the number {step}.")
    start = sum(counts[:step])
    return [[int(index) for index in indices] for indices in micro_batches[start : start + counts[step]]]


def rollouts_of(layout: Mapping[str, Any], step: int) -> int | None:
    """How many rollouts a step has on all ranks."""
    sizes = layout.get("global_batch_sizes")
    return None if sizes is None else int(sizes[step])


def record_of(
    place: str, sample: Mapping[str, Any], rank: int, micro_batch: int | None, rollouts: int | None
) -> dict[str, Any]:
    """A record; it has weights where the number of rollouts is given, and known of the sample."""
    for key in READ:
        if is_left_out(sample.get(key)):
            raise RecordError(f"{place}, field {key!r}: save it as a tensor or as plain numbers (`.tolist()`).")
    fields = {"input_ids": "tokens", **VALUES}
    record: dict[str, Any] = {
        name: listed(sample[key], place, key) for name, key in fields.items() if sample.get(key) is not None
    }
    record |= {"response_length": int(sample[LENGTH]), "rank": rank}
    if micro_batch is not None:
        record["micro_batch"] = micro_batch
    mask, sums = record.get("response_mask"), sample.get("rollout_mask_sums")
    if mask is not None and sums is not None and rollouts:
        # Each rollout counts once, however many samples it has: cp_utils.get_sum_of_sample_mean, loss.loss_function.
        total = max(float(sums), 1.0) * rollouts
        record["weights"] = [float(each) / total for each in mask]
    return record


def listed(value: Any, place: str, key: str) -> Any:
    """A tensor's numbers; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    # One number may be repeated without memory.
    if value.layout != torch.strided or value.dim() > 1 or value.numel() > TOKENS_IN_A_ROW:
        raise RecordError(f"{place}, field {key!r}: it must be a list of at most {TOKENS_IN_A_ROW:,} numbers.")
    return value.tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of one rollout")
    parser.add_argument("records", type=Path, help="the file to write")
    parser.add_argument("--step", type=int, default=0, metavar="N", help="optimizer step of the rollout (0)")
    parser.add_argument("--per-token-loss", action="store_true", help="slime had --calculate-per-token-loss")
    options = parser.parse_args()
    try:
        main(options.files, options.records, options.step, options.per_token_loss)
    except (RecordError, OSError) as problem:
        sys.exit(str(problem))
