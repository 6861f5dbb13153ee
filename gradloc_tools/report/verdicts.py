# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the verdicts of events say: each in brief, and all of a run in one sentence."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# At most so many different causes are told apart.
_CAUSES = 64

# Verdicts that name a place or a value: what is said of several with others.
_OF_SEVERAL = {
    "": "No known cause yet",
    "auxiliary": "Most of the gradient comes from no token's log-prob",
    "misfire": "The culprits are in responses with one reward or data source",
}


@dataclass
class Verdicts:
    """Counts verdicts by their causes, which may be of a newer release than this one.

    Attributes:
        events (Counter): How many verdicts name a cause; None stands for no known cause.
        claims (dict): By cause, what its first verdict says is wrong, or what is true of several with different ones.
    """

    events: Counter[str | None] = field(default_factory=Counter)
    claims: dict[str | None, str] = field(default_factory=dict)

    def add(self, verdict: Mapping[str, Any] | None) -> None:
        """Adds the verdict of an event; None for one of an older release."""
        if verdict is not None and (verdict["cause"] in self.claims or len(self.claims) < _CAUSES):
            self.events[verdict["cause"]] += 1
            first = self.claims.setdefault(verdict["cause"], claim(verdict))
            if first != claim(verdict):
                self.claims[verdict["cause"]] = _OF_SEVERAL.get(verdict["cause"] or "", first)

    def counts(self) -> list[dict[str, Any]]:
        """The most frequent cause first: `cause`, its `claim`, and the number of `events`."""
        return [
            {"cause": cause, "claim": self.claims[cause], "events": events}
            for cause, events in self.events.most_common()
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
        counts (Sequence[Mapping]): What `Verdicts.counts` returned.
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
