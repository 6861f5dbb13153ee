# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which identities hold in the steps that files have: records, verl's batches, prime-rl's exports, a bundle."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from ..bundles.limits import MANIFEST
from ..convert.batches import read_batch
from ..convert.records import Record, RecordError, bounded_memory, json_lines, parquet_rows, read_record
from ..convert.told import Told, told, told_by_records
from ..facts import NAMES
from ..judge import Run
from ..judge.run import RESUME_STEPS
from ..tools.opening import BundleError, open_bundle
from ..tools.reading import Evidence
from .most_off import most_off

_BATCHES = (".pt", ".pth", ".pkl", ".pickle")
_KNOWN = (".jsonl", ".parquet", *_BATCHES)
# The files of a step of prime-rl's token exports, and by our names their fields.
_EXPORT = "rank_*.jsonl"
_PRIME_RL = {
    "response_ids": "token_ids",
    "response_mask": "loss_mask",
    "advantages": "advantages",
    "log_probs": "trainer_logprobs",
    "rollout_log_probs": "inference_logprobs",
}
# What was checked, what is known of it, and the rows in which the first broken identity is most off.
Checked = tuple[str, Evidence, list[dict[str, Any]]]


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


def _checked(steps: Iterable[tuple[int | None, Told]], first_step: bool) -> Checked:
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
            if was["state"] == "broken" and answer["identities"][name]["state"] != "broken":
                when = "later" if number is None else f"in step {number}"
                answer["identities"][name] = {**was, "missing": was["missing"] or f"holds again {when}"}
        # The first step in which it is broken shows it: in a later one, it may hold again.
        off = {each.get("identity"): (step, each) for each in answer["warnings"]} | off
        said = [*evidence.warnings.get(number, ()), *answer["warnings"]]  # steps may have one number, or none
        evidence.add_answer({**answer, "warnings": said}, None if is_alone else number)
        lengths.append(len(step.tokens))
    rows = (most_off(*off[name], is_first and is_alone) for name in evidence.identities if name in off)
    where = f"{len(lengths):,} steps" if len(lengths) > 1 else "one step" if number is None else f"step {number}"
    return f"{sum(lengths):,} responses of {where}", evidence, next(rows, [])


@dataclass(frozen=True)
class _Bundled(Told):
    """The responses of a bundle; its `event` may have what training, or a conversion, has said of the update."""

    event: Any = None

    def explained(self, answer: Any) -> Any:
        """What was said of the update, and what is broken by its tokens alone."""
        said = self.event if self.event.get("identities") else answer
        own = {each["identity"]: each for each in answer["warnings"]}
        if self.event["search"] == "converted":  # its tokens have what records lacked
            own = {}
        states = {
            name: state if name in own else said["identities"].get(name, state)
            for name, state in answer["identities"].items()
        }
        return {"identities": states, "warnings": [*said["warnings"], *own.values()]}


def _bundled(path: Path) -> tuple[int | None, Told]:
    """The step of a bundle."""
    bundle = open_bundle(path)
    event, tokens, places = bundle.event, [], []
    for (rank, index), saved in bundle.micro_batches.items():
        for i, row in enumerate(bundle.rows[rank, index]):
            tokens.append({name: values[i : i + 1] for name, values in saved.tokens.items()})
            places.append(f"rank {rank}, row {row}")
    is_first = event["epoch"] == event["mini_batch"] == 0
    return event["global_step"], _Bundled(places, tokens, (), {}, event["epoch"], is_first, event)


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


def _in_order(number: int | None) -> tuple[bool, int]:
    return number is None, number or 0


def _steps(paths: Sequence[Path]) -> Iterator[tuple[int | None, Told]]:
    """The steps in order. Records of one step may be in several files; a batch is a step."""
    for number, group in groupby(sorted(paths, key=lambda path: _in_order(_number(path))), key=_number):
        found: list[tuple[int | None, Told]] = []
        records: defaultdict[int | None, list[Record]] = defaultdict(list)
        for path in group:
            try:
                if path.is_dir():
                    found.append(_bundled(path))
                elif path.suffix.lower() in _BATCHES:
                    columns, step = read_batch(path)
                    found.append((number if step is None else step, told(columns)))
                else:
                    for record in _records(path):
                        records[number if record.step is None else record.step].append(record)
            except (RecordError, BundleError):
                raise
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
                raise RecordError(f"{path} has columns that do not fit together: {error!r:.200}") from error
        found += [(step, told_by_records(of)) for step, of in records.items()]
        yield from sorted(found, key=lambda step: _in_order(step[0]))


def _records(path: Path) -> Iterator[Record]:
    """The records of a file; of one of prime-rl's exports, the responses that have tokens of the loss."""
    for place, fields in (parquet_rows if path.suffix.lower() == ".parquet" else json_lines)(path):
        if path.match(_EXPORT) and isinstance(fields, dict) and {"token_ids", "loss_mask"} <= fields.keys():
            start = next((i for i, trained in enumerate(fields["loss_mask"]) if trained), None)
            if start is None:
                continue
            known = {"prompt_ids": fields["token_ids"][:start], "rank": fields["rank"], "step": fields.get("step")}
            fields = known | {name: fields[of][start:] for name, of in _PRIME_RL.items()}
        yield read_record(fields, place, for_check=True)
