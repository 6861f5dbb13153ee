# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which identities hold in the steps that files have, and in which rows one is most off."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor

from ..convert.records import RecordError, bounded_memory
from ..convert.steps import Step, steps_of
from ..convert.told import Told
from ..facts import NAMES
from ..judge import Run, of_one_step
from ..tools.opening import BundleError
from ..tools.reading import Evidence

# At most so many rows are looked at, or groups of rows; so many rows are shown, or of a group, and tokens of each.
_LOOKED_AT, _SHOWN, _OF_GROUP, _TOKENS = 512, 3, 16, 6
# Identities that compare rows with each other, by what; and columns of log-probs that others compare.
_GROUPED = {"responses": "response", "groups": "prompt", "advantages": "reward"}
_COMPARED = {"old_log_probs": "old_log_prob", "rollout_log_probs": "rollout_log_prob", "reference": "ref_log_prob"}
_OF_ROW = ("prompt", "response", "uid", "reward", "advantage", "length")
_SIDE_BY_SIDE = ("token_id", "response_mask", "log_prob", *_COMPARED.values(), "advantage")
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
    is_same = [each["reference tokens"] > 0 and each["reference size"] == 0 for each in sums]
    is_first = first_step or is_same == [True, False]
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
            if was["state"] == "broken" and answer["identities"][name]["state"] != "broken":
                answer["identities"][name] = {**was, "missing": "holds again"}
        # The first step in which it is broken shows it: in a later one, it may hold again.
        off = {each.get("identity"): (step, each) for each in answer["warnings"]} | off
        said = [*evidence.warnings.get(number, ()), *answer["warnings"]]  # steps may have one number, or none
        evidence.add_answer({**answer, "warnings": said}, named)
        lengths.append(len(step.tokens))
    rows = (_most_off(*off[name], is_first and is_alone) for name in evidence.identities if name in off)
    where = f"{len(lengths):,} steps" if len(lengths) > 1 else "one step" if number is None else f"step {number}"
    return f"{sum(lengths):,} responses of {where}", evidence, next(rows, [])


def _most_off(step: Told, warning: Mapping[str, Any], is_first: bool) -> list[dict[str, Any]]:
    """What is known of up to three rows and of some of their tokens, or of a group of rows where these are compared."""
    identity = warning["identity"]

    def times(of: Sequence[int]) -> float:
        rows = [step.rows[i] for i in of] if step.rows else []
        state: Any = of_one_step(step.facts(of), rows, is_first)["identities"].get(identity, {})
        return state.get("times") or (math.inf if state.get("state") == "broken" else 0.0)

    if identity not in _GROUPED:
        rows = [i for i, tokens in enumerate(step.tokens) if tokens["log_prob"].numel()][:_LOOKED_AT]
        off = sorted(rows, key=lambda i: times([i]), reverse=True)[:_SHOWN]
        return [_told_of(step, i) | {"tokens": _tokens(identity, step.tokens[i])} for i in off if times([i])]
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(step.rows):
        groups[row.prompt if warning["name"] == "groups_of_one" else row.uid].append(i)
    # If none alone shows a fault, the first one is an example.
    worst = max([*groups.values()][:_LOOKED_AT], key=times, default=[])
    found, of = [_told_of(step, i) for i in worst], _GROUPED[identity]
    if of == "response":
        often = Counter(row[of] for row in found)
        return sorted(found, key=lambda row: (-often[row[of]], row[of] or 0))[:_OF_GROUP]
    found.sort(key=lambda row: row[of] or 0)
    # From both ends, if there are more.
    places = {round(i * (len(found) - 1) / (_OF_GROUP - 1)) for i in range(_OF_GROUP)} if found else ()
    return [found[i] for i in sorted(places)]


def _told_of(step: Told, i: int) -> dict[str, Any]:
    """A row; prompts and responses have the numbers of their first appearance."""
    found: dict[str, Any] = {"row": step.places[i]}
    for name in _OF_ROW if step.rows else ():
        found[name] = getattr(step.rows[i], name)
        if name in ("prompt", "response") and found[name] is not None:
            found[name] = 1 + [*dict.fromkeys(getattr(each, name) for each in step.rows)].index(found[name])
    return found


def _tokens(identity: str, tokens: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Some tokens of a row around the one that is most off, with what is compared."""
    of = {name: tokens[name][0] for name in _SIDE_BY_SIDE if name in tokens}
    mask, policy = of["response_mask"] != 0, of["log_prob"]
    if identity == "sampled" and "rollout_log_prob" in of:
        off = (mask == (of["rollout_log_prob"] == 0)) * (1 - policy)
    elif identity in _COMPARED:
        before = policy if identity == "old_log_probs" else of.get("old_log_prob", policy)
        off = (of[_COMPARED[identity]] - before).abs() * mask
    else:
        off = mask * sum(values.float().abs() for name, values in of.items() if name != "token_id")
    at = int(off.nan_to_num(math.inf).argmax())
    start = max(min(at - _TOKENS // 2, len(mask) - _TOKENS), 0)
    positions = range(len(mask))[start : start + _TOKENS]
    return [{"position": p, **{name: values[p].item() for name, values in of.items()}} for p in positions]
