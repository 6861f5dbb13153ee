# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An event or a clip line in one sentence."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..guarded import guarded
from ..lines import Clipped, Culprit, Event
from ..sources import LAYER_FRACTION, layer_shares, shares_of_sum
from .rules import OTHER, RATIOS, RULES, SOURCES
from .shares import all_of, carrying_layers, counted, percent

# By TokenClip's action, what happened to the signals that were cut.
DONE = {"drop": "dropped", "smooth": "reduced"}

# If one of them holds for any culprit, something is broken, and the other culprits may be consequences.
_BUGS = [rule.name for rule in RULES if rule.is_bug and rule.name not in RATIOS]

# A gradient that comes from no token, as that of an auxiliary loss, is mentioned from this part of the norm on. Without
# one it is exactly 0.
MENTIONED = 0.1
# A layer is named if so much more of the squared norm is in it than ordinarily.
_LAYER_GAIN = 0.25

_SMALL_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def lowered(sentence: str) -> str:
    """A sentence to come after a colon: with a small letter, unless its first word is an abbreviation."""
    return sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() or sentence[1:2] == " " else sentence


def describe(event: Event) -> str:
    """An event in one sentence, from its other fields alone.

    Texts and rewards of its tokens are used if they are there. If it fails, the summary that the event has: wording
    must not cost the event.
    """
    with guarded("the summary of an event could not be made"):
        if drill := event.get("drill"):
            found = "was found" if drill["found"] else "was not found"
            return f"A drill: the planted token {found}, {_count(drill['passes'], 'extra pass', 'extra passes')}."
        parts = [_culprits(event) if event["culprits"] else _without_culprits(event)]
        if boundary := turn_boundary(event["culprits"]):
            parts.append(f"the mismatch begins {boundary}")
        parts += filter(None, (auxiliary_in_words(event), _broken_parameters(event) or _layer(event)))
        sentence = "; ".join(parts) + "."
        return sentence[0].upper() + sentence[1:]
    return event.get("summary", "")


def clips_in_words(found: Clipped) -> str:
    """What TokenClip found, and the largest of it."""
    over, cut = sum(found["over"].values()), sum(found["cut"].values())
    start = f"TokenClip found {_count(over, 'backward signal', 'backward signals')} over "
    start += f"{found['factor']:g} times the usual largest one"
    if found["action"] == "log":
        start += f", and left {'them as they are' if over > 1 else 'it as it is'} (action log)"
    elif cut:
        which = f"{cut} of them" if cut < over else "all of them" if over > 1 else "it"
        start += f", and {DONE[found['action']]} {which}"
    if found["refused"]:
        start += f"; at {', '.join(found['refused'])} there were more than max_share, so that none was cut there"
    if not found["tokens"]:
        return f"{start}."
    token = found["tokens"][0]
    text = f" {token['token']!r}" if token.get("token") is not None else ""
    place = "in the prompt" if token["position"] < 0 else f"position {token['position']}"
    where = f"{token['multiple']:.3g} times the usual at {token['boundary']}"
    return f"{start}; the largest: token{text} of rank {token['rank']}, row {token['row']}, {place}, {where}."


def _culprits(event: Event) -> str:
    """What most of the culprits are, and whose; where some are bugs, what these are."""
    culprits = event["culprits"]
    # A spike without a cause has no broken culprit.
    judged = event.get("verdict")
    left_out = _BUGS if judged is not None and judged["cause"] is None else ()
    known = [each.get("sources") or [each["source"]] for each in culprits]
    names = [next((name for name in of if name not in left_out), OTHER.name) for of in known]
    counts = Counter(names)
    source = next((bug for bug in _BUGS if bug in counts), counts.most_common(1)[0][0])
    count = counts[source]
    found = [culprit for culprit, name in zip(culprits, names, strict=True) if name == source]
    rule = SOURCES[source]
    if len(culprits) == 1:
        start = f"the culprit{_token(found)} is {rule.one}"
    else:
        what = f"is {rule.one}" if count == 1 else f"are {rule.several}"
        start = f"{counted(count, len(culprits))} {what}{_token(found)}"
    sentence = f"{start}, {_responses(found)}"
    if event["diagnosis"] == "diffuse":
        return (
            f"{_everywhere(event)}{spread_in_words(event)}; of the tokens that are over the threshold alone, {sentence}"
        )
    if event["diagnosis"] == "incomplete":
        return f"{sentence}, and the search ended before it could explain the spike"
    return f"{_everywhere(event)}{sentence}"


def _token(culprits: Sequence[Culprit]) -> str:
    """The token that most of the culprits are, if its text is known."""
    texts = Counter(culprit.get("token") for culprit in culprits)
    text, count = texts.most_common(1)[0]
    if text is None or (len(culprits) > 1 and count <= len(culprits) / 2):
        return ""
    if len(culprits) == 1:
        return f" {text!r}"
    which = all_of(count).split()[0] if count == len(culprits) else count
    return f" ({which} of them {text!r})"


def turn_boundary(culprits: Sequence[Mapping[str, Any]]) -> str | None:
    """With which token the mismatch to the rollout begins in most of the culprits' responses; None if with no turn."""
    responses = {
        (culprit["rank"], culprit["row"]): turn for culprit in culprits if (turn := culprit.get("mismatch_turn"))
    }
    if not responses:
        return None
    turn, count = Counter(responses.values()).most_common(1)[0]
    share = "" if count == len(responses) else f" in {counted(count, len(responses), 'responses')}"
    return f"with the first token after turn {turn - 1}{share}"


def _responses(culprits: Sequence[Culprit]) -> str:
    """Where culprits are: in how many responses, and the signs of their advantages."""
    responses = {(culprit["rank"], culprit["row"]): culprit for culprit in culprits}
    one = len(responses) == 1
    where = f"in {_number(len(responses))} {'response' if one else 'responses'}"
    advantages = [culprit["advantage"] for culprit in responses.values()]
    known = [advantage for advantage in advantages if advantage and math.isfinite(advantage)]
    if len(known) < len(advantages):
        return where
    positive = sum(advantage > 0 for advantage in known)
    if 0 < positive < len(known):
        negative = len(known) - positive
        return f"{where}, {_number(positive)} with a positive and {_number(negative)} with a negative advantage"
    sign = "positive" if positive else "negative"
    reward = next(iter(responses.values())).get("reward") if one else None
    figure = "" if reward is None else f" (reward {reward:g})"
    return f"{where} with {f'a {sign} advantage' if one else f'{sign} advantages'}{figure}"


def _without_culprits(event: Event) -> str:
    if event["diagnosis"] == "unsearched":
        return _unsearched(event)
    if event["diagnosis"] == "under":
        return "converted and searched: no micro-batch is over its threshold"
    if event["diagnosis"] == "overflow":
        return "the scaled fp16 gradients overflowed, while log-probs and advantages are finite"
    if event["diagnosis"] == "nonfinite":
        return "no single token is the cause: NaN or Inf is in the log-probs or gradients of all of them"
    if event["diagnosis"] == "diffuse":
        return _everywhere(event) + spread_in_words(event)
    why = f" ({event['error']})" if event["error"] else " (out of time)" if event.get("out_of_time") else ""
    return (
        f"{_everywhere(event)}the search ended after {_count(event['passes'], 'pass', 'passes')} without a result{why}"
    )


def _unsearched(event: Event) -> str:
    """What is known of the likeliest token, without a claim that it is the cause."""
    if not event.get("suspected"):
        return "converted, not searched"
    token = event["suspected"][0]
    text = "" if token.get("token") is None else f" {token['token']!r}"
    place = f"position {token['position']} of row {token['row']} of rank {token['rank']}"
    probability = math.exp(min(token["log_prob"], 0.0))
    whose = f" on {ranks}" if (ranks := ranks_looked_at(event)) else ""
    return (
        f"converted, not searched; the most suspicious token{text}{whose} has p = {probability:.2g} and is at {place}"
    )


def ranks_looked_at(event: Mapping[str, Any]) -> str | None:
    """Whose tokens a converted event's suspected ones were chosen from; None if they were every rank's."""
    ranks = event.get("suspected_ranks")
    if ranks is None or not (others := event["world_size"] - len(ranks)):
        return None
    unseen = "the other one was" if others == 1 else f"the {others} others were"
    return f"rank {', '.join(map(str, ranks))} ({unseen} not looked at)"


def spread_in_words(event: Event) -> str:
    """That no small set of tokens explains a spike, and of how many it is the sum."""
    tokens = sum(part["tokens"] for part in event["diffuse"])
    if not tokens:
        return "no small set of tokens explains the spike"
    rows = sum(len(part["rows"]) for part in event["diffuse"])
    over = "over " if event.get("more_diffuse") else ""
    return (
        f"no small set of tokens explains the spike: it is the sum of {over}{tokens} tokens "
        f"of {over}{_number(rows)} response{'' if rows == 1 else 's'}"
    )


def _everywhere(event: Event) -> str:
    return "every micro-batch is over its threshold; " if is_over_everywhere(event) else ""


def is_over_everywhere(event: Event) -> bool:
    """Whether every micro-batch of several is over its threshold: then the fault is not in single tokens."""
    return 1 < len(event["units"]) + event.get("more_units", 0) == event["micro_batches"]


def _broken_parameters(event: Event) -> str | None:
    """Which parameters have no finite gradient: where the backward begins to break."""
    broken = event.get("broken_parameters")
    if not broken or not broken["names"]:
        return None
    count, of, first = broken["count"], broken["of"], broken["names"][0]
    if count == of:
        return f"the gradients of {counted(count, of, 'parameters')} are NaN or infinite, from the loss on"
    if count == 1:
        return f"of {of} parameters, {first} alone has a NaN or infinite gradient"
    which = counted(count, of, "parameters")
    return f"{which} have NaN or infinite gradients, of which the backward reaches {first} first"


def _layer(event: Event) -> str | None:
    """The layer that carries far more of the units' squared norm than it does ordinarily."""
    squares: defaultdict[str, float] = defaultdict(float)
    for unit in event["units"]:
        for layer, norm in unit["layer_norms"].items():
            squares[layer] += norm**2
    shares = shares_of_sum(squares)
    if len(shares) < 2:
        return None
    usual = layer_shares(event["ordinary_layer_norms"] or {})
    if not usual:
        name = max(shares, key=shares.__getitem__)
        return f"{name} carries {shares[name]:.0%} of the squared norm" if shares[name] > LAYER_FRACTION else None
    gains = {layer: share - usual.get(layer, 0.0) for layer, share in shares.items()}
    name = max(gains, key=gains.__getitem__)
    if gains[name] <= _LAYER_GAIN:
        return None
    return f"{name} carries {shares[name]:.0%} of the squared norm, ordinarily {usual.get(name, 0.0):.0%}"


def auxiliary_in_words(event: Event, least: float = MENTIONED) -> str | None:
    """Says which part of a norm comes from no token, and in which layers it is; None if that is less than `least`."""
    found = event.get("without_tokens")
    if found is None or not least <= found["share"] < math.inf:
        return None
    rank = "" if found["rank"] is None else f"rank {found['rank']}, "
    text = f"{percent(found['share'])} of the norm of {rank}micro-batch {found['micro_batch']} "
    text += "comes from no token's log-prob"
    layers = carrying_layers(found["layer_norms"])
    if layers:
        listed = layers[0] if len(layers) == 1 else f"{', '.join(layers[:-1])} and {layers[-1]}"
        text += f", in the layer{'s' * (len(layers) > 1)} {listed}"
    return text


def _number(count: int) -> str:
    return _SMALL_NUMBERS[count] if count < len(_SMALL_NUMBERS) else str(count)


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
