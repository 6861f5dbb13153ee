# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reduces events and culprits to what the report shows, because the files may be far larger than the memory."""

import heapq
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from gradloc.evidence.in_words import ranks_looked_at
from gradloc.evidence.sources import SOURCES
from gradloc.evidence.token_texts import WINDOW

from .explanation import ended_early, explanation
from .figures import excess, number, ranges, rounded, severity, threshold_factor

# How many parts of a diffuse event are kept, and how many of its units: those farthest over their thresholds.
PARTS = UNITS = 20
# How many of the tokens measured in a part, and how many layers of a culprit or event.
_TOKENS, _LAYERS = 20, 1024
# Longer texts lose their middle.
TEXT_CHARACTERS = 4000
_SHORT_CHARACTERS = 200

_EVENT_FIELDS = (
    "global_step epoch mini_batch threshold global_norm global_threshold passes action applied diagnosis seconds "
    "world_size until explained more_tokens"
).split()
_TRIGGER_FIELDS = ("kind", "norm", "threshold")
_UNIT_FIELDS = ("rank", "micro_batch", "rows", "tokens", "norm", "threshold")
_PART_FIELDS = ("rank", "micro_batch", "tokens", "norm", "threshold")
_MEASURED_FIELDS = ("row", "position", "grad_norm", "share")
_ROW_FIELDS = (
    "rank micro_batch row position token_id grad_norm threshold weight coefficient suspicion share advantage log_prob "
    "old_log_prob ratio ref_log_prob entropy rollout_log_prob rollout_ratio sequence_ratio misaligned_share turn "
    "mismatch_turn source reward"
).split()
_SUSPECTED_FIELDS = ("rank micro_batch row position token_id suspicion advantage log_prob ratio source reward").split()
# How many suspected tokens are kept.
_SUSPECTED = 16
_SHORT_TEXTS = ("token", "data_source", "uid")
_LONG_TEXTS = ("prompt", "response", "ground_truth")
# Of the Python that reads the evidence, which need not have the verl that wrote it.
# What a row has for the report itself.
NOT_SHOWN = ("details", "prompt_hash")


def condensed_event(
    event: Mapping[str, Any], largest: Mapping[str, Any] | None, directory: str = ".", options: str = ""
) -> dict[str, Any]:
    """An event without its culprits and without the layers of its units.

    Args:
        event (Mapping): As the evidence has it.
        largest (Mapping, optional): Its largest culprit.
        directory (str): The directory that it is from.
        options (str): What every command on its bundle takes, as words of a shell.

    Returns:
        dict: The event with new fields: `level` (the token-equivalent norm that triggered it), `size` (the largest
            culprit's norm, or without a culprit the largest token-equivalent norm), `explanation`, `ended_early`,
            `open_tokens`, `culprits_in_all`, `diffuse_in_all`. Of its units, the largest that have the micro-batch of
            a culprit; `of_ranks` is on how many ranks that micro-batch was over its threshold. Of a recorded spike,
            `suspected` lists tokens, and `suspected_title` says whose. `next_command` replays its bundle, None where
            none was kept. `is_spike` is False where nothing was found to be over a threshold.
    """
    ordinary = event["ordinary_layer_norms"]
    # The units may not be known.
    factor = threshold_factor(event["trigger"])
    trigger = number(event["threshold"]) * factor
    norms = (
        [trigger, *(unit["token_equivalent"] for unit in event["units"])] if largest is None else [largest["grad_norm"]]
    )
    parts = heapq.nlargest(PARTS, event["diffuse"], key=excess)
    bundle = bundle_of(event, directory, options)
    return {
        **rounded({name: event[name] for name in _EVENT_FIELDS}),
        "error": clipped(event["error"]),
        "is_spike": factor > 1 or event["diagnosis"] not in ("unsearched", "under"),
        "verdict": _verdict(event, bundle),
        "next_command": _next_command(event, bundle),
        "summary": clipped(event["summary"]),
        "trigger": _fields(event["trigger"], _TRIGGER_FIELDS),
        "ordinary_layer_norms": None if ordinary is None else rounded(_by_layer(ordinary)),
        "units": _units(event),
        "open_tokens": sum(token_set["tokens"] for token_set in event["open_segments"]),
        "culprits_in_all": len(event["culprits"]),
        "ended_early": ended_early(event),
        "explanation": explanation(event),
        "level": trigger,
        "size": max(map(severity, norms)),
        "diffuse": [_part(part) for part in parts],
        "diffuse_in_all": len(event["diffuse"]),
        "suspected": [_suspected(token) for token in event.get("suspected", ())[:_SUSPECTED]],
        "suspected_title": suspected_title(event),
    }


def culprit_row(event: Mapping[str, Any], culprit: Mapping[str, Any]) -> dict[str, Any]:
    """A culprit as one row of a table."""
    where = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
    return {
        **where,
        **{name: culprit.get(name) for name in _ROW_FIELDS},
        **{name: clipped(culprit.get(name), _SHORT_CHARACTERS) for name in _SHORT_TEXTS},
        "context": clipped(culprit.get("context")),
        "sources": culprit["sources"][: len(SOURCES)],
        # Equal for equal prompts. It is of use in this process alone.
        "prompt_hash": None if culprit.get("prompt") is None else hash(culprit["prompt"]),
    }


def culprit_details(culprit: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are too long to keep for every culprit."""
    tokens, heat = culprit.get("response_tokens"), culprit["response_suspicion"]
    return {
        "response_tokens": None if tokens is None else [clipped(t, _SHORT_CHARACTERS) for t in tokens[:WINDOW]],
        "response_tokens_start": culprit.get("response_tokens_start"),
        "response_suspicion": None if heat is None else heat[:WINDOW],
        "layer_norms": _by_layer(culprit["layer_norms"]),
        **{name: clipped(culprit.get(name)) for name in _LONG_TEXTS},
    }


def clipped(text: Any, most: int = TEXT_CHARACTERS) -> str | None:
    """A text without its middle if it is longer than `most`; what is no text as JSON; None as it is."""
    if text is None:
        return None
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _verdict(event: Mapping[str, Any], bundle: str | None) -> dict[str, Any] | None:
    """The verdict's known fields, with the event's bundle, if any, in its check; None where there is none."""
    verdict = event.get("verdict")
    if verdict is None:
        return None
    check = as_a_command(verdict["check"], bundle, " No bundle was kept of this spike.")
    texts = {"cause": clipped(verdict["cause"], _SHORT_CHARACTERS), "sentence": clipped(verdict["sentence"])}
    return {**_fields(verdict, ("culprits", "ordinary")), **texts, "check": check}


def bundle_of(event: Mapping[str, Any], directory: str, options: str = "") -> str | None:
    """An event's bundle and the options, as words of a shell; None without one. For the arguments see above."""
    replay = event.get("replay")
    return shlex.quote(os.path.join(directory, replay)) + options if replay else None


def as_a_command(check: Any, bundle: str | None, without: str) -> str | None:
    """How to check a cause, with a command that works as it stands here.

    Args:
        check (Any): As the evidence has it.
        bundle (str, optional): The bundle that it is about, as words of a shell.
        without (str): What is added where it needs a bundle, and there is none.
    """
    text = str(clipped(check))
    if bundle is not None:
        text = text.replace("BUNDLE", bundle, 1)
    elif " BUNDLE" in text:
        text += without
    return clipped(text)


def _next_command(event: Mapping[str, Any], bundle: str | None) -> str | None:
    """The command that measures what each remedy leaves of a spike, or that searches a recorded one."""
    if bundle is None or event["diagnosis"] == "under":
        return None
    what = "--search" if event["diagnosis"] == "unsearched" else "--remedies"
    return clipped(f"gradloc replay {bundle} {what}")


def _fields(of: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return rounded({name: of.get(name) for name in names})


def _by_layer(norms: Mapping[str, Any]) -> dict[str, Any]:
    """The norms of at most `_LAYERS` layers; equal names of layers are kept once."""
    return {sys.intern(layer): norm for layer, norm in islice(norms.items(), _LAYERS)}


def _units(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    with_culprits = {culprit["micro_batch"] for culprit in event["culprits"]}
    units = [unit for unit in event["units"] if unit["micro_batch"] in with_culprits]
    ranks = Counter(unit["micro_batch"] for unit in units)
    largest = heapq.nlargest(UNITS, units, key=excess)
    return [_fields(unit, _UNIT_FIELDS) | {"of_ranks": ranks[unit["micro_batch"]]} for unit in largest]


def suspected_title(event: Mapping[str, Any]) -> str:
    """The heading of an event's suspected tokens, which says whose were not looked at."""
    ranks = ranks_looked_at(event)
    return f"Suspected tokens{f' of {ranks}' if ranks else ''}: recorded, not measured"


def _suspected(token: Mapping[str, Any]) -> dict[str, Any]:
    """A token of a recorded spike as one row of a table."""
    return {
        **_fields(token, _SUSPECTED_FIELDS),
        "token": clipped(token.get("token"), _SHORT_CHARACTERS),
        "context": clipped(token.get("context"), _SHORT_CHARACTERS),
    }


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a diffuse event, with its rows as text."""
    tokens = [_fields(token, _MEASURED_FIELDS) for token in part["largest_tokens"][:_TOKENS]]
    return {**_fields(part, _PART_FIELDS), "rows": ranges(part["rows"]), "largest_tokens": tokens}
