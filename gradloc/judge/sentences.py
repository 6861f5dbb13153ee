# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An event or a clip line in one sentence."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..guarded import guarded
from ..lines import Clipped, Culprit, Event
from ..sources import LAYER_FRACTION, OTHER, layer_shares, shares_of_sum
from .rules import FAULTS, SOURCES
from .said import all_of, counted, percent

# By TokenClip's action, what happened to the signals that were cut.
DONE = {"drop": "dropped", "smooth": "reduced"}

# A gradient that comes from no token, as that of an auxiliary loss, is mentioned from this part of the norm on. Without
# one it is exactly 0.
MENTIONED = 0.1
# So many layers are named at most, if they carry this part of the squared norm.
_LAYERS, _CARRIED = 3, 0.8
# A layer is named if so much more of the squared norm is in it than ordinarily.
_LAYER_GAIN = 0.25

# By the diagnosis of an event without culprits, what it means.
_WITHOUT_CULPRITS = {
    "under": "converted and searched: no micro-batch is over its threshold",
    "overflow": "the scaled fp16 gradients overflowed, while log-probs and advantages are finite",
    "nonfinite": "no single token is the cause: NaN or Inf is in the log-probs or gradients of all of them",
}


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
            return f"A drill: the planted token {found}, {_count(drill['passes'], 'extra pass')}."
        parts = [_what(event), turn_boundary(event["culprits"]), auxiliary_in_words(event)]
        sentence = "; ".join(filter(None, [*parts, _broken_parameters(event) or _layer(event)])) + "."
        return sentence[0].upper() + sentence[1:]
    return event.get("summary", "")


def clips_in_words(found: Clipped) -> str:
    """What TokenClip found, and the largest of it."""
    over, cut = sum(found["over"].values()), sum(found["cut"].values())
    start = f"TokenClip found {_count(over, 'backward signal')} over {found['factor']:g} times the usual largest one"
    if found["action"] == "log":
        start += ", and cut none (action log)"
    elif cut:
        start += f", and {DONE[found['action']]} {cut}"
    if found["refused"]:
        start += f"; at {', '.join(found['refused'])} there were more than max_share, so that none was cut there"
    if not found["tokens"]:
        return f"{start}."
    token = found["tokens"][0]
    text = f" {token['token']!r}" if token.get("token") is not None else ""
    place = "in the prompt" if token["position"] < 0 else f"position {token['position']}"
    where = f"{token['multiple']:.3g} times the usual at {token['boundary']}"
    return f"{start}; the largest: token{text} of rank {token['rank']}, row {token['row']}, {place}, {where}."


def _what(event: Event) -> str:
    """What most of the culprits are, or why there is none."""
    diagnosis, parts = event["diagnosis"], []
    # In every micro-batch of several: then the fault is not in single tokens.
    if (
        diagnosis in ("tokens", "diffuse", "incomplete")
        and 1 < len(event["units"]) + event.get("more_units", 0) == event["micro_batches"]
    ):
        parts.append("every micro-batch is over its threshold")
    if diagnosis == "diffuse":
        parts.append(_spread(event))
    if event["culprits"]:
        alone = "of the tokens that are over the threshold alone, " if diagnosis == "diffuse" else ""
        ended = ", and the search ended before it could explain the spike" if diagnosis == "incomplete" else ""
        parts.append(f"{alone}{_culprits(event)}{ended}")
    elif diagnosis == "unsearched":
        parts.append(_unsearched(event))
    elif diagnosis in _WITHOUT_CULPRITS:
        parts.append(_WITHOUT_CULPRITS[diagnosis])
    elif diagnosis != "diffuse":
        why = f" ({event['error']})" if event["error"] else " (out of time)" if event.get("out_of_time") else ""
        parts.append(f"the search ended after {_count(event['passes'], 'pass')} without a result{why}")
    return "; ".join(parts)


def _culprits(event: Event) -> str:
    """What most of the culprits are, and whose; where some are bugs, what these are."""
    culprits = event["culprits"]
    # A spike without a cause has no broken culprit.
    judged = event.get("verdict")
    left_out = FAULTS if judged is not None and judged["cause"] is None else ()
    names = [next((name for name in each["sources"] if name not in left_out), OTHER) for each in culprits]
    counts = Counter(names)
    # If a fault holds for any culprit, the others may be consequences.
    source = next((fault for fault in FAULTS if fault in counts), counts.most_common(1)[0][0])
    found = [culprit for culprit, name in zip(culprits, names, strict=True) if name == source]
    what = SOURCES[source].of(len(found))
    return f"{counted(len(found), len(culprits))} {what}{_token(found)}, {_responses(found)}"


def _token(culprits: Sequence[Culprit]) -> str:
    """The token that most of the culprits are, if its text is known."""
    text, count = Counter(culprit.get("token") for culprit in culprits).most_common(1)[0]
    if text is None or count <= len(culprits) / 2:
        return ""
    which = all_of(count).split()[0] if count == len(culprits) else count
    return f" ({text!r})" if len(culprits) == 1 else f" ({which} of them {text!r})"


def turn_boundary(culprits: Sequence[Culprit]) -> str | None:
    """With which token the mismatch to the rollout begins in most of the culprits' responses; None if with no turn."""
    turns = {(each["rank"], each["row"]): turn for each in culprits if (turn := each.get("mismatch_turn"))}
    if not turns:
        return None
    turn, count = Counter(turns.values()).most_common(1)[0]
    share = "" if count == len(turns) else f" in {counted(count, len(turns), 'responses')}"
    return f"the mismatch begins with the first token after turn {turn - 1}{share}"


def _responses(culprits: Sequence[Culprit]) -> str:
    """Where culprits are: in how many responses, and the signs of their advantages."""
    responses = {(culprit["rank"], culprit["row"]): culprit for culprit in culprits}
    where = f"in {_count(len(responses), 'response')}"
    known = [each["advantage"] or 0.0 for each in responses.values()]
    positive, negative = sum(0 < each < math.inf for each in known), sum(-math.inf < each < 0 for each in known)
    if positive + negative < len(known):
        return where
    if positive and negative:
        return f"{where}, {positive} with a positive and {negative} with a negative advantage"
    sign = "positive" if positive else "negative"
    if len(known) > 1:
        return f"{where} with {sign} advantages"
    reward = culprits[0].get("reward")
    return f"{where} with a {sign} advantage{'' if reward is None else f' (reward {reward:g})'}"


def _unsearched(event: Event) -> str:
    """What is known of the likeliest token, without a claim that it is the cause."""
    if not event.get("suspected"):
        return "converted, not searched"
    token = event["suspected"][0]
    text = "" if token.get("token") is None else f" {token['token']!r}"
    place = f"position {token['position']} of row {token['row']} of rank {token['rank']}"
    whose = f" on {ranks}" if (ranks := ranks_looked_at(event)) else ""
    probability = math.exp(min(token["log_prob"], 0.0))
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


def _spread(event: Event) -> str:
    """That no small set of tokens explains a spike, and of how many it is the sum."""
    found = "no small set of tokens explains the spike"
    if tokens := sum(part["tokens"] for part in event["diffuse"]):
        over = "over " if event.get("more_diffuse") else ""
        rows = _count(sum(len(part["rows"]) for part in event["diffuse"]), "response")
        found += f": it is the sum of {over}{tokens} tokens of {over}{rows}"
    return found


def _broken_parameters(event: Event) -> str | None:
    """Which parameters have no finite gradient: where the backward begins to break."""
    broken = event.get("broken_parameters")
    if not broken or not broken["names"]:
        return None
    where = f"{broken['count']} of {broken['of']} parameters"
    return f"NaN or infinite gradients in {where}, of which the backward reaches {broken['names'][0]} first"


def _layer(event: Event) -> str | None:
    """The layer that carries far more of the units' squared norm than it does ordinarily."""
    squares: defaultdict[str, float] = defaultdict(float)
    for unit in event["units"]:
        for layer, norm in unit["layer_norms"].items():
            squares[layer] += norm**2
    shares, usual = shares_of_sum(squares), layer_shares(event["ordinary_layer_norms"] or {})
    gains = {layer: share - usual.get(layer, 0.0) for layer, share in shares.items()}
    name = max(gains, key=gains.__getitem__, default="")
    if len(shares) < 2 or gains[name] <= (_LAYER_GAIN if usual else LAYER_FRACTION):
        return None
    ordinarily = f", ordinarily {usual.get(name, 0.0):.0%}" if usual else ""
    return f"{name} carries {shares[name]:.0%} of the squared norm{ordinarily}"


def auxiliary_in_words(event: Event, least: float = MENTIONED) -> str | None:
    """Says which part of a norm comes from no token, and in which layers it is; None if that is less than `least`."""
    found = event.get("without_tokens")
    if found is None or not least <= found["share"] < math.inf:
        return None
    rank = "" if found["rank"] is None else f"rank {found['rank']}, "
    where = f"{rank}micro-batch {found['micro_batch']}"
    layers = carrying_layers(found["layer_norms"])
    in_layers = f", in the layer{'s' * (len(layers) > 1)} {', '.join(layers)}" if layers else ""
    return f"{percent(found['share'])} of the norm of {where} comes from no token's log-prob{in_layers}"


def carrying_layers(layer_norms: Mapping[str, float]) -> list[str]:
    """The layers that carry most of the squared norm, largest first; none if the norm is spread over more."""
    shares = layer_shares(layer_norms)
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:_LAYERS]
    parts = [largest[: n + 1] for n in range(len(largest))]
    return next((part for part in parts if math.fsum(map(shares.__getitem__, part)) >= _CARRIED), [])


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
