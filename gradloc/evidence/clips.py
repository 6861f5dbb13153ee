# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What TokenClip found in a mini-batch, as a line of spikes.jsonl."""

from collections.abc import Mapping
from typing import Any

from ..guarded import guarded
from .writer import SCHEMA, now

# By action, what happened to the signals that were cut.
DONE = {"drop": "dropped", "smooth": "reduced"}


def clip_line(where: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the form `CLIP` in gradloc_tools/schema.py, of what `TokenClip.end_mini_batch` returned."""
    line = {"schema": SCHEMA, "time": now(), **where, "token_clip": dict(found)}
    return {**line, "summary": summary(line)}


def summary(line: Mapping[str, Any]) -> str:
    """A clip line in one sentence; empty if it cannot be told."""
    with guarded("what TokenClip found is written without its summary"):
        return describe(line)
    return ""


def describe(line: Mapping[str, Any]) -> str:
    """A clip line in one sentence, from its other fields alone."""
    found = line["token_clip"]
    over, cut = sum(found["over"].values()), sum(found["cut"].values())
    signals = f"{over} backward signal{'' if over == 1 else 's'}"
    start = f"TokenClip found {signals} over {found['factor']:g} times the usual largest one"
    if found["action"] == "log":
        start += ", and left them as they are (action log)" if over > 1 else ", and left it as it is (action log)"
    elif cut == over:
        start += f", and {DONE[found['action']]} {'all of them' if over > 1 else 'it'}"
    elif cut:
        start += f", and {DONE[found['action']]} {cut} of them"
    if found["refused"]:
        start += f"; at {', '.join(found['refused'])} there were more than max_share, so that none was cut there"
    if not found["tokens"]:
        return f"{start}."
    token = found["tokens"][0]
    text = f" {token['token']!r}" if token.get("token") is not None else ""
    place = "in the prompt" if token["position"] < 0 else f"position {token['position']}"
    where = f"{token['multiple']:.3g} times the usual at {token['boundary']}"
    return f"{start}; the largest: token{text} of rank {token['rank']}, row {token['row']}, {place}, {where}."
