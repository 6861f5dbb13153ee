# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The rows in which an identity is most off, as the judge says of each alone."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..convert.told import Told
from ..judge import of_one_step

# At most so many rows are looked at, or groups of rows; so many rows are shown, or of a group, and tokens of each.
_LOOKED_AT, _SHOWN, _OF_GROUP, _TOKENS = 512, 3, 16, 6
# Identities that compare rows with each other, by what; and columns of log-probs that others compare.
_GROUPED = {"responses": "response", "groups": "prompt", "advantages": "reward"}
_COMPARED = {"old_log_probs": "old_log_prob", "rollout_log_probs": "rollout_log_prob", "reference": "ref_log_prob"}
_OF_ROW = ("prompt", "response", "uid", "reward", "advantage", "length")
_SIDE_BY_SIDE = ("token_id", "response_mask", "log_prob", *_COMPARED.values(), "advantage")


def most_off(step: Told, warning: Mapping[str, Any], is_first: bool = False) -> list[dict[str, Any]]:
    """What is known of up to three rows and of some of their tokens, or of a group of rows where these are compared."""
    identity = warning["identity"]

    def times(of: Sequence[int]) -> float:
        rows = [step.rows[i] for i in of] if step.rows else []
        state: Any = of_one_step(step.facts(of), rows, is_first)["identities"].get(identity, {})
        return state.get("times") or 0.0

    if identity not in _GROUPED:
        rows = [i for i, tokens in enumerate(step.tokens) if tokens["log_prob"].numel()][:_LOOKED_AT]
        off = sorted(rows, key=lambda i: times([i]), reverse=True)[:_SHOWN]
        return [_told_of(step, i) | {"tokens": _tokens(identity, step.tokens[i])} for i in off if times([i])]
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(step.rows):
        groups[row.prompt if warning["name"] == "groups_of_one" else row.uid].append(i)
    # If none alone shows a fault, the first one is an example.
    worst = max([*groups.values()][:_LOOKED_AT], key=times, default=[])
    in_order = sorted((_told_of(step, i) for i in worst), key=lambda row: row[_GROUPED[identity]] or 0)
    return in_order[:_OF_GROUP]


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
