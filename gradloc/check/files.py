# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which identities hold in the steps that files have."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from ..convert.records import RecordError, bounded_memory
from ..convert.steps import Step, steps_of
from ..convert.told import Told
from ..facts import NAMES
from ..judge import Run
from ..tools.opening import BundleError
from ..tools.reading import Evidence
from .most_off import most_off

# What was checked, what is known of it, and the rows in which the first broken identity is most off.
Checked = tuple[str, Evidence, list[dict[str, Any]]]


def check_files(paths: Sequence[str], first_step: bool = False) -> Checked:
    """Checks the steps of files, see `steps_of`. An identity that is broken in a step stays so.

    Args:
        first_step (bool): Whether no optimizer step was taken before the first of them. That is also known where
            reference and policy are the same there, bit for bit, and not in the second one.

    Raises:
        OSError: A file cannot be read, or has nothing to check; the message is a sentence.
    """
    try:
        with bounded_memory():
            return _checked(steps_of(paths), first_step)
    except (RecordError, BundleError) as error:
        raise OSError(str(error)) from error


def _checked(steps: Iterator[Step], first_step: bool) -> Checked:
    summed = ((number, step, step.facts()) for number, step in steps)
    begun = [*islice(summed, 2)]
    if not begun:
        raise RecordError("There is no record.")
    is_alone = len(begun) == 1
    sums = [dict(zip(NAMES, facts, strict=True)) for _, _, facts in begun]
    is_first = first_step or [each["reference tokens"] > 0 == each["reference size"] for each in sums] == [True, False]
    run, evidence, lengths = Run(has_moved=not is_first), Evidence(""), []
    off: dict[str, tuple[Told, Any]] = {}
    for number, step, facts in chain(begun, summed):
        named = None if is_alone else number
        run.start_update(named)
        run.take_in(facts)
        run.take_in_rows(step.rows)
        run.add_step(1.0)  # at a rate that is not known
        answer: Any = step.explained(run.answer(at_once=is_alone))
        for name, was in evidence.identities.items():
            if was["state"] == "broken" != answer["identities"][name]["state"]:
                answer["identities"][name] = {**was, "missing": "holds again"}
        # The first step in which it is broken shows it: in a later one, it may hold again.
        off = {each.get("identity"): (step, each) for each in answer["warnings"]} | off
        said = [*evidence.warnings.get(number, ()), *answer["warnings"]]  # steps may have one number, or none
        evidence.add_answer({**answer, "warnings": said}, named)
        lengths.append(len(step.tokens))
    rows = (most_off(*off[name], is_first and is_alone) for name in evidence.identities if name in off)
    where = f"{len(lengths):,} steps" if len(lengths) > 1 else "one step" if number is None else f"step {number}"
    return f"{sum(lengths):,} responses of {where}", evidence, next(rows, [])
