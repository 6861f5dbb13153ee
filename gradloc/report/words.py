# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Events in words: what a diagnosis and an action mean, whether culprits explain their spike, the verdicts of a run
and its drills.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..judge.said import lowered
from ..sources import UNLIKELY
from ..tools.figures import clipped, count, excess, percent, short, short_factor, threshold_factor
from ..tools.spike import MiniBatch, mini_batch_of

Event = Mapping[str, Any]
Unit = Mapping[str, Any]

# By an event's `diagnosis`: what to look at; empty where the verdict or the culprits say it. What it means is in the
# event's summary.
DIAGNOSES = {
    "tokens": "",
    "diffuse": "Look at the responses in the parts listed, at their advantages and at repeated text.",
    "nonfinite": "Look at the weights after the previous step, then at rewards and advantages.",
    "overflow": "The gradient scaler handles it; look at the loss scale if it happens repeatedly.",
    "incomplete": "Look at the search's error if there is one, or raise bisect_budget_steps (or _seconds).",
    "under": "",
    "unsearched": "",
}

# By `spike_action`: what was done, and what was done instead where that was not possible.
APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The optimizer step was skipped.",
    "drop": "The gradient of the culprits found was removed from the step.",
    "stop": "The optimizer step was taken as usual; after repeated spikes, the trainer ends the run.",
}
NOT_APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The step was left to the gradient scaler, which skips it after an overflow.",
    "drop": "No culprit's gradient could be removed from the step: the step's gradient was left unchanged.",
    "stop": "Training went on as usual.",
}

# By the figure in steps.jsonl: its name on the page, and what it is; in the order in which they are shown.
FIGURES = {
    "spike_margin": ("token norm over threshold", "The largest token-equivalent norm/τ: 1 is the threshold."),
    "ratio_max": ("largest ratio", "The largest importance ratio to the old policy."),
    "rollout_ratio_max": (
        "largest ratio to the rollout",
        "The largest ratio between a token's probabilities in training and in the rollout, either way round.",
    ),
    "unlikely_share": ("unlikely tokens", f"The share of tokens with a probability under {UNLIKELY:g}."),
}
# In the warm-up of an automatic threshold, τ may be a number that no norm reaches.
_UNREACHABLE = 1e29
# At most so many different causes are told apart.
_CAUSES = 64


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
    facts = _diffuse(event) if event["diagnosis"] == "diffuse" else _settled(event)
    if (more := event["more_tokens"]) is not None:
        facts.append(f"about {count(more, 'more token')} may be over τ" if more else "no more seem to be over τ")
    if not facts:
        return None
    sentence = "; ".join(facts) + "."
    return sentence[0].upper() + sentence[1:]


def _settled(event: Event) -> list[str]:
    """A search for few tokens that explain the spike, or for every token over τ."""
    number, is_early, unit = len(event["culprits"]), ended_early(event), _worst_rest(event)
    these, them = ("this token", "it") if number == 1 else (f"these {number:,} tokens", "them")
    of_unit = f"without {these} {_unit_name(unit)}" if unit else ""
    if event["until"] == "exhaustive":
        end = "the search ended early" if is_early else "everything over its threshold was settled"
        over = f"{count(number, 'token') if number else 'no token'} over τ{' so far' * is_early}"
        found = f"Exhaustive: {end}, with {over}"
    elif is_early:
        found = "Not explained: the search ended early"
    elif not event["explained"]:
        found = "Whether the culprits explain it could not be measured"
    else:
        found = f"Explained: without {these} every micro-batch is under its threshold"
        of_unit = f"the highest, {_unit_name(unit)}," if unit else ""
    return [found, f"{of_unit} {_rest(unit, them)}"] if unit else [found]


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


def _of_one_unit(culprits: Sequence[Event], unit: Unit | None) -> list[Event]:
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


def _unit_name(unit: Unit) -> str:
    return f"micro-batch {unit['micro_batch']} of rank {unit['rank']}"


def _rest(unit: Unit, them: str) -> str:
    """How far a unit is over its threshold without its culprits, and with them."""
    if not (float(unit["rest"]["norm"]) or float(unit["rest"]["threshold"])):
        return f"has no token left that can move (it is at {short_factor(unit)} of its threshold with {them})"
    still = "" if threshold_factor(unit["rest"]) <= 1 else "still "
    return f"is {still}at {short_factor(unit['rest'])} of its threshold ({short_factor(unit)} with {them})"


def count_causes(verdicts: Iterable[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """The causes, the most frequent first, each with what is known of it and the number of events.

    Args:
        verdicts (Iterable[Mapping]): `Spike.verdict` of each.

    Returns:
        list[dict]: `cause` (None for each claim without one); `claim`, what is true of all its events, or the cause if
            they have several claims; `events`.
    """
    claims: dict[tuple[str | None, str], list[str]] = {}
    for verdict in verdicts:
        if verdict is not None:
            cause, claim = verdict["cause"], verdict["claim"]
            claims.setdefault((cause, claim if cause is None else ""), []).append(claim)
    most_frequent = sorted(claims.items(), key=lambda entry: -len(entry[1]))[:_CAUSES]
    return [
        {"cause": cause, "claim": said[0] if cause is None or len(set(said)) == 1 else cause, "events": len(said)}
        for (cause, _), said in most_frequent
    ]


def brief(verdict: Mapping[str, Any]) -> str:
    """A verdict's claim and evidence, without the advice."""
    return f"{verdict['claim']} ({verdict['evidence']})" if verdict["evidence"] else str(verdict["claim"])


def in_words(counts: Sequence[Mapping[str, Any]], events: int) -> str | None:
    """The verdicts of a run in one sentence without a full stop; None if no event has one.

    Args:
        counts (Sequence[Mapping]): What `count_causes` returned.
        events (int): How many events there are, with those of older releases.
    """
    if not counts:
        return None
    if counts[0]["events"] == events:
        return counts[0]["claim"] + (f" (all {events})" if events > 1 else "")
    parts = [f"{entry['claim']} ({entry['events']})" for entry in counts]
    if rest := events - sum(entry["events"] for entry in counts):
        parts.append(f"no verdict ({rest})")
    return ", ".join([parts[0], *map(lowered, parts[1:])])


def drill_report(event: Mapping[str, Any], spikes: Collection[MiniBatch]) -> dict[str, Any]:
    """A drill in words.

    Args:
        event (Mapping): Its event.
        spikes (Collection): The mini-batches with a spike.

    Returns:
        dict: `global_step`, `found`, `passes`, `seconds`, `planted`, `level`; `text`, a sentence; `advice`, what to
            look at, empty for a drill that succeeded.
    """
    drill = event["drill"]
    planted = drill["planted"]
    where = "" if event["global_step"] is None else f" in step {event['global_step']}"
    cost = f"{count(drill['passes'], 'extra pass', 'extra passes')}, {short(round(event['seconds'], 2))} s"
    if drill["found"]:
        text = f"Drill{where}: the planted token was found, {cost}."
    else:
        text = f"Drill{where} FAILED: {_planted(planted)} was not found, {cost}."
    return {
        "global_step": event["global_step"],
        "found": drill["found"],
        "passes": drill["passes"],
        "seconds": event["seconds"],
        "planted": None if planted is None else {name: planted[name] for name in ("rank", "row", "position")},
        "level": float(event["threshold"]) * threshold_factor(event["trigger"]),
        "text": text,
        "advice": [] if drill["found"] else _advice(event, mini_batch_of(event) in spikes),
    }


def _planted(place: Mapping[str, Any] | None) -> str:
    if place is None:
        return "a planted token"
    return f"the planted token (rank {place['rank']}, row {place['row']}, position {place['position']})"


def _advice(event: Mapping[str, Any], spike_there: bool) -> list[str]:
    advice = ["Do not rely on spike_detection in this configuration before a drill succeeds."]
    threshold = float(event["threshold"])
    if not math.isfinite(threshold) or threshold >= _UNREACHABLE:
        advice.append(
            "The threshold was not finite, or that of the warm-up of grad_norm_threshold=auto: set a number, or make "
            "the drill after the warm-up."
        )
    if event["error"] is not None:
        advice.append(f"It failed with an error: {str(clipped(event['error'])).rstrip('.')}.")
    elif ended_early(event) and event["drill"]["passes"] >= event["budget"]:
        advice.append(f"Its budget of {count(event['budget'], 'pass', 'passes')} was spent: raise bisect_budget_steps.")
    if spike_there:
        advice.append("The same mini-batch has a spike of its own, which may hide the planted one: drill another step.")
    if len(advice) == 1:
        advice.append("The event names no reason: compare the gradient norms of its units with their thresholds.")
    return advice
