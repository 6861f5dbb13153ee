# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What changed in a run, and at which step: dated facts, which need not be wrong."""

import statistics
from collections.abc import Mapping, Sequence

from ..levels import LASTS, LEVEL
from ..lines import Change
from .records import Record

# By reading, what it is.
_WATCHED: Mapping[str, str] = {
    "rate": "the learning rate of an update",
    "advantages.size": "the typical advantage",
    "rewarded": "the share of responses with a reward other than 0",
    "prompts": "distinct prompts per response",
    "length": "trained tokens per response",
}


def changes(records: Sequence[Record]) -> list[Change]:
    """What has changed in the last update: is `LEVEL` times what it was in the ones before, or so much less."""
    before = {each["what"] for each in _changed(records[:-1])}
    return [each for each in _changed(records) if each["what"] not in before]


def _changed(records: Sequence[Record]) -> list[Change]:
    found: list[Change] = []
    for name, what in _WATCHED.items():
        values = [(each.step, each.readings[name]) for each in records if name in each.readings]
        if len(values) <= LASTS or name not in records[-1].readings:
            continue
        step, now = values[-1]
        before = statistics.median(value for _, value in values[:-1])
        # Of a share, the odds are compared.
        odds = [each / max(1 - each, 1e-3) if name == "rewarded" else each for each in (now, before)]
        if before > 0 and not 1 / LEVEL < odds[0] / odds[1] < LEVEL:
            sentence = f"In step {step}, {what} is {now:.3g}, and was {before:.3g} before."
            found.append({"what": name, "now": now, "before": before, "sentence": sentence})
    return found
