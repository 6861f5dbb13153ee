# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the verdicts of events say: each in brief, and all of a run in one sentence."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# At most so many different causes are told apart.
_CAUSES = 64

# Verdicts that name a place or a value: what is said of several with others.
_OF_SEVERAL = {
    "": "No known cause yet",
    "auxiliary": "Most of the gradient comes from no token's log-prob",
    "misfire": "The culprits are in responses with one reward or data source",
}


def count_causes(verdicts: Iterable[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """The causes, the most frequent first, each with what is wrong and the number of events.

    Args:
        verdicts (Iterable[Mapping]): The verdicts of events, which may be of a newer release; None where an event of an
            older one has none.

    Returns:
        list[dict]: `cause`, None for no known one; `claim`, what is true of all its events; `events`.
    """
    claims: dict[str | None, list[str]] = {}
    for verdict in verdicts:
        if verdict is not None:
            claims.setdefault(verdict["cause"], []).append(claim(verdict))
    most_frequent = sorted(claims.items(), key=lambda entry: -len(entry[1]))[:_CAUSES]
    return [
        {
            "cause": cause,
            "claim": said[0] if len(set(said)) == 1 else _OF_SEVERAL.get(cause or "", said[0]),
            "events": len(said),
        }
        for cause, said in most_frequent
    ]


def brief(verdict: Mapping[str, Any]) -> str:
    """What is wrong and the shares, without what to do."""
    # Up to a colon that is not in brackets.
    said = re.match(r"(?:\([^()]*\)|[^(:]|\(|:(?! ))*", verdict["sentence"])
    assert said is not None  # it matches the empty string
    return said.group().removesuffix(".")


def claim(verdict: Mapping[str, Any]) -> str:
    """What is wrong, without the shares."""
    return re.sub(r" \([^()]*\)$", "", brief(verdict))


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


def lowered(sentence: str) -> str:
    """A sentence to come after a colon: with a small letter, unless its first word is an abbreviation."""
    return sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() or sentence[1:2] == " " else sentence
