# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What was found, and where, in one sentence: an event or a clip line. What it means is for the verdict."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..guarded import guarded
from ..lines import Clipped, Event
from ..sources import LAYER_FRACTION, layer_shares
from .said import count, percent

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


def describe(event: Event) -> str:
    """An event in one sentence, from its other fields alone.

    Texts of its tokens are used if they are there. If it fails, the summary that the event has: wording must not cost
    the event.
    """
    with guarded("the summary of an event could not be made"):
        if drill := event.get("drill"):
            found = "was found" if drill["found"] else "was not found"
            return f"A drill: the planted token {found}, {count(drill['passes'], 'extra pass', 'extra passes')}."
        units = len(event["units"]) + event.get("more_units", 0)
        # In every one of several: then the fault is not in single tokens.
        is_everywhere = event["diagnosis"] != "under" and 1 < units == event["micro_batches"]
        everywhere = "every micro-batch is over its threshold" if is_everywhere else ""
        sentence = "; ".join(filter(None, [everywhere, _shown(event), _culprits(event), _where(event)])) + "."
        return sentence[0].upper() + sentence[1:]
    return event.get("summary", "")


def clips_in_words(found: Clipped) -> str:
    """What TokenClip found, and the largest of it."""
    over, cut = sum(found["over"].values()), sum(found["cut"].values())
    signals = f"{count(over, 'backward signal')} over {found['factor']:g} times the usual largest one"
    sentence = f"TokenClip found {signals}, and cut {cut} (action {found['action']})"
    if found["refused"]:
        sentence += f"; at {', '.join(found['refused'])} there were more than max_share, so that none was cut there"
    for token in found["tokens"][:1]:
        where = f"{token['multiple']:.3g} times the usual at {token['boundary']}"
        sentence += f"; the largest: {token_in_words(token)}, {where}"
    return f"{sentence}."


def token_in_words(token: Mapping[str, Any]) -> str:
    """A token with its text, if that is known, and its place."""
    text = "" if token.get("token") is None else f" {token['token']!r}"
    place = "in the prompt" if token["position"] < 0 else f"position {token['position']}"
    return f"token{text} of rank {token['rank']}, row {token['row']}, {place}"


def _shown(event: Event) -> str:
    """What the search has shown, with a diffuse spike's size, an error, or the most suspicious token."""
    diagnosis = event["diagnosis"]
    found = "" if diagnosis == "nonfinite" and event["culprits"] else _SHOWN.get(diagnosis, "")
    if diagnosis == "diffuse" and (tokens := sum(part["tokens"] for part in event["diffuse"])):
        found += f": it is the sum of {'over ' if event.get('more_diffuse') else ''}{tokens} tokens"
    elif diagnosis == "incomplete":
        after = "out of time" if event.get("out_of_time") else f"after {count(event['passes'], 'pass', 'passes')}"
        found += f" ({event['error'] or after})"
    elif diagnosis == "unsearched":
        for token in event.get("suspected", [])[:1]:
            found += f"; the most suspicious: {token_in_words(token)}, with p = {math.exp(token['log_prob']):.2g}"
    return found


def _culprits(event: Event) -> str:
    """How many culprits there are, which token most of them are, and in how many responses they are."""
    culprits = event["culprits"]
    if not culprits:
        return ""
    text, equal = Counter(each.get("token") for each in culprits).most_common(1)[0]
    mostly = "mostly " if equal < len(culprits) else ""
    token = "" if text is None or 2 * equal <= len(culprits) else f" ({mostly}{text!r})"
    responses = len({(each["rank"], each["row"]) for each in culprits})
    return f"{count(len(culprits), 'culprit')}{token} in {count(responses, 'response')}"


def _where(event: Event) -> str:
    """The parameter at which the backward begins to break, or the layer that carries more than ordinarily."""
    if (broken := event.get("broken_parameters")) and broken["names"]:
        where = f"{broken['count']} of {broken['of']} parameters"
        return f"NaN or infinite gradients in {where}, of which the backward reaches {broken['names'][0]} first"
    # The first unit is the largest one.
    shares = layer_shares(event["units"][0]["layer_norms"]) if event["units"] else {}
    usual = layer_shares(event["ordinary_layer_norms"] or {})
    gain, name = max(((share - usual.get(layer, 0.0), layer) for layer, share in shares.items()), default=(0.0, ""))
    if len(shares) < 2 or gain <= (_LAYER_GAIN if usual else LAYER_FRACTION):
        return ""
    ordinarily = f", ordinarily {percent(usual.get(name, 0.0))}" if usual else ""
    return f"{name} carries {percent(shares[name])} of the squared norm{ordinarily}"
