# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What was found, and where, in one sentence: an event or a clip line. What it means is for the verdict."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..guarded import guarded
from ..levels import EXPLAINS
from ..lines import Clipped, Event
from ..sources import LAYER_FRACTION, layer_shares
from .said import percent

# A gradient that comes from no token, as that of an auxiliary loss, is mentioned from this part of the norm on. Without
# one it is exactly 0. From MOST on, that of the squared norm, it is the verdict that says so.
MENTIONED, MOST = 0.1, math.sqrt(EXPLAINS)
# A layer is named if so much more of the squared norm is in it than ordinarily.
_LAYER_GAIN = 0.25

# By the diagnosis, what the search has shown, where that is not that a few tokens explain the spike.
_SHOWN = {
    "diffuse": "no small set of tokens explains the spike",
    "incomplete": "the search ended before it could explain the spike",
    "nonfinite": "no single token is the cause",
    "overflow": "the scaled fp16 gradients overflowed, while log-probs and advantages are finite",
    "under": "searched in its bundle: no micro-batch is over its threshold",
    "unsearched": "converted, not searched",
}


def lowered(sentence: str) -> str:
    """A sentence to come after a colon: with a small letter, unless its first word has other capitals."""
    rest = sentence.partition(" ")[0][1:]
    return sentence[:1].lower() + sentence[1:] if rest == rest.lower() else sentence


def describe(event: Event) -> str:
    """An event in one sentence, from its other fields alone.

    Texts of its tokens are used if they are there. If it fails, the summary that the event has: wording must not cost
    the event.
    """
    with guarded("the summary of an event could not be made"):
        if drill := event.get("drill"):
            found = "was found" if drill["found"] else "was not found"
            return f"A drill: the planted token {found}, {_count(drill['passes'], 'extra pass')}."
        units = len(event["units"]) + event.get("more_units", 0)
        # In every one of several: then the fault is not in single tokens.
        is_everywhere = event["diagnosis"] != "under" and 1 < units == event["micro_batches"]
        parts = [
            "every micro-batch is over its threshold" if is_everywhere else "",
            _shown(event),
            _culprits(event),
            _turn_boundary(event),
            auxiliary_in_words(event, MENTIONED, MOST),
            _broken_parameters(event) or layer_in_words(event["units"], event["ordinary_layer_norms"]),
        ]
        sentence = "; ".join(filter(None, parts)) + "."
        return sentence[0].upper() + sentence[1:]
    return event.get("summary", "")


def clips_in_words(found: Clipped) -> str:
    """What TokenClip found, and the largest of it."""
    over, cut = sum(found["over"].values()), sum(found["cut"].values())
    signals = f"{_count(over, 'backward signal')} over {found['factor']:g} times the usual largest one"
    parts = [f"TokenClip found {signals}, and cut {cut} (action {found['action']})"]
    if found["refused"]:
        parts.append(f"at {', '.join(found['refused'])} there were more than max_share, so that none was cut there")
    for token in found["tokens"][:1]:
        where = f"{token['multiple']:.3g} times the usual at {token['boundary']}"
        parts.append(f"the largest: {token_in_words(token)}, {where}")
    return "; ".join(parts) + "."


def token_in_words(token: Mapping[str, Any]) -> str:
    """A token with its text, if that is known, and its place."""
    text = "" if token.get("token") is None else f" {token['token']!r}"
    place = "in the prompt" if token["position"] < 0 else f"position {token['position']}"
    return f"token{text} of rank {token['rank']}, row {token['row']}, {place}"


def _shown(event: Event) -> str:
    """What the search has shown, with the parts of a diffuse spike, an error, or the most suspicious token."""
    diagnosis = event["diagnosis"]
    found = "" if diagnosis == "nonfinite" and event["culprits"] else _SHOWN.get(diagnosis, "")
    if diagnosis == "diffuse" and (tokens := sum(part["tokens"] for part in event["diffuse"])):
        over = "over " if event.get("more_diffuse") else ""
        rows = _count(sum(len(part["rows"]) for part in event["diffuse"]), "response")
        found += f": it is the sum of {over}{tokens} tokens of {over}{rows}"
    elif diagnosis == "incomplete":
        after = "out of time" if event.get("out_of_time") else f"after {_count(event['passes'], 'pass')}"
        found += f" ({event['error'] or after})"
    elif diagnosis == "unsearched":
        for token in event.get("suspected", [])[:1]:
            whose = f" on {ranks}" if (ranks := ranks_looked_at(event)) else ""
            p = math.exp(token["log_prob"])
            found += f"; the most suspicious{whose}: {token_in_words(token)}, with p = {p:.2g}"
    return found


def _culprits(event: Event) -> str:
    """How many culprits there are, which token most of them are, and in which responses they are."""
    culprits = event["culprits"]
    if not culprits:
        return ""
    text, count = Counter(each.get("token") for each in culprits).most_common(1)[0]
    which = f"{count} of them " if count < len(culprits) else {1: "", 2: "both "}.get(count, "all ")
    token = "" if text is None or 2 * count <= len(culprits) else f" ({which}{text!r})"
    alone = ", over the threshold alone," if event["diagnosis"] == "diffuse" else ""
    advantages = {(each["rank"], each["row"]): each["advantage"] or 0.0 for each in culprits}
    signs = Counter(map(_sign, advantages.values()))
    where = " and ".join(f"{_count(responses, 'response')}{sign}" for sign, responses in signs.items())
    return f"{_count(len(culprits), 'culprit')}{token}{alone} in {where}"


def _sign(advantage: float) -> str:
    is_known = 0 < abs(advantage) < math.inf
    return f" with a {'positive' if advantage > 0 else 'negative'} advantage" if is_known else ""


def _turn_boundary(event: Event) -> str:
    """With which token the mismatch to the rollout begins in most of the culprits' responses; empty if with no turn."""
    turns = {(each["rank"], each["row"]): turn for each in event["culprits"] if (turn := each.get("mismatch_turn"))}
    if not turns:
        return ""
    turn, count = Counter(turns.values()).most_common(1)[0]
    where = "" if count == len(turns) else f" in {count} of {len(turns)} responses"
    return f"the mismatch begins with the first token after turn {turn - 1}{where}"


def ranks_looked_at(event: Mapping[str, Any]) -> str | None:
    """Whose tokens a converted event's suspected ones were chosen from; None if they were every rank's."""
    ranks = event.get("suspected_ranks")
    if ranks is None or not (others := event["world_size"] - len(ranks)):
        return None
    return f"rank {', '.join(map(str, ranks))} ({_count(others, 'other rank')} not looked at)"


def auxiliary_in_words(event: Event, least: float, most: float = math.inf) -> str:
    """Says which part of a norm comes from no token, and where; empty unless it is from `least` to under `most`."""
    found = event.get("without_tokens")
    if found is None or not least <= found["share"] < most:
        return ""
    where = f"micro-batch {found['micro_batch']}" + ("" if found["rank"] is None else f" of rank {found['rank']}")
    shares = layer_shares(found["layer_norms"])
    layer = next((f", mostly in {layer}" for layer, share in shares.items() if share > LAYER_FRACTION), "")
    return f"{percent(found['share'])} of the norm of {where} comes from no token's log-prob{layer}"


def _broken_parameters(event: Event) -> str:
    """Which parameters have no finite gradient: where the backward begins to break."""
    broken = event.get("broken_parameters")
    if not broken or not broken["names"]:
        return ""
    where = f"{broken['count']} of {broken['of']} parameters"
    return f"NaN or infinite gradients in {where}, of which the backward reaches {broken['names'][0]} first"


def layer_in_words(units: Sequence[Mapping[str, Any]], ordinary: Mapping[str, float] | None) -> str:
    """The layer that carries far more of the units' squared norm than it does ordinarily; empty if none does."""
    layers = dict.fromkeys(layer for unit in units for layer in unit["layer_norms"])
    norms = {layer: math.hypot(*(unit["layer_norms"].get(layer, 0.0) for unit in units)) for layer in layers}
    shares, usual = layer_shares(norms), layer_shares(ordinary or {})
    gains = {layer: share - usual.get(layer, 0.0) for layer, share in shares.items()}
    name = max(gains, key=gains.__getitem__, default="")
    if len(shares) < 2 or gains[name] <= (_LAYER_GAIN if usual else LAYER_FRACTION):
        return ""
    ordinarily = f", ordinarily {usual.get(name, 0.0):.0%}" if usual else ""
    return f"{name} carries {shares[name]:.0%} of the squared norm{ordinarily}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
