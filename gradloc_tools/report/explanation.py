# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a sentence that says whether the culprits of a spike explain it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import count, excess, percent, short_factor, threshold_factor

Event = Mapping[str, Any]
Unit = Mapping[str, Any]
Culprit = Mapping[str, Any]


def ended_early(event: Event) -> bool:
    """Whether the search ended before it was done. "No small set of tokens explains the spike" is a result."""
    if event["diagnosis"] in ("unsearched", "under"):
        return False
    done = event["until"] == "explained" and event["diagnosis"] in ("diffuse", "nonfinite", "overflow")
    return not event["complete"] and not done


def explanation(event: Event) -> str | None:
    """The sentence, which does not repeat the summary; None where there is nothing to add.

    Args:
        event (Mapping): An event as the evidence has it.
    """
    if event["diagnosis"] in ("nonfinite", "overflow", "unsearched", "under"):
        return None
    if event["diagnosis"] == "diffuse":
        facts = _diffuse(event)
    elif event["until"] == "exhaustive":
        facts = _exhaustive(event)
    else:
        facts = _explained(event)
    if (more := event["more_tokens"]) is not None:
        facts.append(f"about {count(more, 'more token')} may be over τ" if more else "no more seem to be over τ")
    if not facts:
        return None
    sentence = "; ".join(facts) + "."
    return sentence[0].upper() + sentence[1:]


def _explained(event: Event) -> list[str]:
    """A search for few tokens that explain the spike."""
    unit = _worst_rest(event)
    if ended_early(event):
        return ["Not explained: the search ended early", *_without_culprits(event, unit)]
    if not event["explained"]:
        return ["Whether the culprits explain it could not be measured", *_without_culprits(event, unit)]
    if unit and len(event["units"]) == 1:
        return [f"Explained: {_without_culprits(event, unit)[0]}"]
    these, them = _these_and_them(event)
    facts = [f"Explained: without {these} every micro-batch is under its threshold"]
    return facts + ([f"the highest, {_unit_name(unit)}, {_rest(unit, them)}"] if unit else [])


def _exhaustive(event: Event) -> list[str]:
    """A search for every token over τ."""
    number_found = len(event["culprits"])
    found = f"{count(number_found, 'token') if number_found else 'no token'} over τ"
    if ended_early(event):
        end = f"the search ended early, with {found} so far"
    else:
        end = f"everything over its threshold was settled, with {found}"
    return [f"Exhaustive: {end}", *_without_culprits(event, _worst_rest(event))]


def _diffuse(event: Event) -> list[str]:
    """A spike that no small set of tokens explains: how much of it the likeliest tokens carry."""
    facts = [] if event["until"] == "explained" else ["no single token is over τ"]
    unit = _worst_rest(event)
    culprits = _of_one_unit(event["culprits"], unit)
    tokens = culprits or _largest_measured(event)
    if not tokens:
        return facts
    many = len(tokens) > 1
    kind = "likeliest" if culprits else "largest measured"
    which, them = (f"the {len(tokens)} {kind}", "them") if many else (f"the {kind}", "it")
    shares = [token["share"] for token in tokens]
    known = [float(share) for share in shares if share is not None]
    # As in the thresholds, tokens count as independent.
    share = math.hypot(*known) if len(known) == len(shares) else math.nan
    if share_known := math.isfinite(share):
        facts.append(f"{which} {'carry' if many else 'carries'} {percent(share)} of the norm")
    if unit and culprits:
        facts.append(f"without {them if share_known else which} {_unit_name(unit)} {_rest(unit, them)}")
    return facts


def _of_one_unit(culprits: Sequence[Culprit], unit: Unit | None) -> list[Culprit]:
    """The culprits in the unit; if None, those in the unit of the largest culprit."""
    one = unit or next(iter(culprits), None)
    if one is None:
        return []
    return [culprit for culprit in culprits if all(culprit[key] == one[key] for key in ("rank", "micro_batch"))]


def _largest_measured(event: Event) -> list[Mapping[str, Any]]:
    """The largest tokens measured in the part that is farthest over its threshold."""
    part = max(event["diffuse"], key=excess, default=None)
    return part["largest_tokens"] if part else []


def _worst_rest(event: Event) -> Unit | None:
    """The unit that is farthest over its threshold without its culprits, of those measured without them."""
    measured = [unit for unit in event["units"] if unit["rest"] is not None] if event["culprits"] else []
    return max(measured, key=lambda unit: excess(unit["rest"]), default=None)


def _without_culprits(event: Event, unit: Unit | None) -> list[str]:
    """How far a unit is over its threshold without its culprits; an empty list if there is no such unit."""
    these, them = _these_and_them(event)
    return [f"without {these} {_unit_name(unit)} {_rest(unit, them)}"] if unit else []


def _these_and_them(event: Event) -> tuple[str, str]:
    culprits = len(event["culprits"])
    return ("this token", "it") if culprits == 1 else (f"these {culprits:,} tokens", "them")


def _unit_name(unit: Unit) -> str:
    return f"micro-batch {unit['micro_batch']} of rank {unit['rank']}"


def _rest(unit: Unit, them: str) -> str:
    """How far a unit is over its threshold without its culprits, and with them."""
    if not (float(unit["rest"]["norm"]) or float(unit["rest"]["threshold"])):
        return f"has no token left that can move (it is at {short_factor(unit)} of its threshold with {them})"
    still = "" if threshold_factor(unit["rest"]) <= 1 else "still "
    return f"is {still}at {short_factor(unit['rest'])} of its threshold ({short_factor(unit)} with {them})"
