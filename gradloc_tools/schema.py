# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what may come from a stranger: ordinary files up to a size, JSON within limits of its size in memory and of its
depth, and values that conform to JSON Schemas.

The schemas are those of lines: an event or a clip line of spikes.jsonl, a step of steps.jsonl, a spike of critic.jsonl,
or a note. What each field means is in docs/reference/evidence.md and docs/reference/clips.md.
"""

import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradloc.evidence.writer import DEPTH, SCHEMA
from gradloc.judge.rules import SOURCES

Form = dict[str, Any]

# JSON has no NaN and no infinities, so they are strings.
NUMBER: Form = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
NUMBER_OR_NULL: Form = {"anyOf": [*NUMBER["anyOf"], {"type": "null"}]}
_POSITIVE: Form = {"type": "number", "exclusiveMinimum": 0}
INDEX: Form = {"type": "integer", "minimum": 0}
_COUNT: Form = {"type": "integer", "minimum": 1}
INTEGER_OR_NULL: Form = {"type": ["integer", "null"]}
TEXT: Form = {"type": "string"}
TEXT_OR_NULL: Form = {"type": ["string", "null"]}
YES_OR_NO: Form = {"type": "boolean"}
_YES_NO_OR_NULL: Form = {"type": ["boolean", "null"]}


def fields(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The form of each field; a key may name several fields of one form."""
    return {name: form for names, form in forms.items() for name in names.split()}


def object_with(required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """The form of an object with these `fields`."""
    return {
        "type": "object",
        "properties": fields({**required, **(optional or {})}),
        "required": [*fields(required)],
        "additionalProperties": False,
    }


def list_of(items: Form) -> Form:
    """The form of a list of these items."""
    return {"type": "array", "items": items}


def by_name(values: Form) -> Form:
    """The form of an object with values of one form by any names."""
    return {"type": "object", "additionalProperties": values}


def or_null(form: Form) -> Form:
    """The form of something or null."""
    return {"anyOf": [form, {"type": "null"}]}


def _line(title: str, required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """The schema of a line of a file."""
    start = {"schema": {"const": SCHEMA}, "time": TEXT, "global_step": INTEGER_OR_NULL}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": title, **object_with({**start, **required}, optional)}


_SOURCE: Form = {"enum": list(SOURCES)}
_NUMBERS = list_of(NUMBER)
_NUMBERS_BY_LAYER = by_name(NUMBER)
_MINI_BATCH = {"epoch mini_batch": INDEX}

_MICRO_BATCH = {
    "rank micro_batch rows tokens": INDEX,
    "norm threshold token_equivalent": NUMBER,
    "layer_norms": _NUMBERS_BY_LAYER,
}
_UNIT = object_with(
    {
        **_MICRO_BATCH,
        "broken_tokens": INDEX,
        "rest": or_null(object_with({"tokens": INDEX, "norm threshold": NUMBER})),
    }
)

_LARGEST = object_with({"row position": INDEX, "grad_norm": NUMBER, "share": NUMBER_OR_NULL})
_DIFFUSE = object_with(
    {
        "rank": INTEGER_OR_NULL,
        "micro_batch tokens": INDEX,
        "rows": list_of(INDEX),
        "norm threshold": NUMBER,
        "largest_tokens": list_of(_LARGEST),
    }
)
_OPEN = object_with({"rank": INTEGER_OR_NULL, "micro_batch tokens": INDEX, "threshold": NUMBER})

# What is known of a token without a gradient.
_TOKEN_FIELDS = {
    "rank micro_batch row position": INDEX,
    "token_id": {"type": "integer"},
    "weight coefficient suspicion log_prob": NUMBER,
    "advantage kl_coefficient old_log_prob ref_log_prob rollout_log_prob entropy": NUMBER_OR_NULL,
    "ratio rollout_ratio sequence_ratio misaligned_share": NUMBER_OR_NULL,
    "after_eos": _YES_NO_OR_NULL,
    "source": _SOURCE,
    "sources": list_of(_SOURCE),
    "response_suspicion": or_null(_NUMBERS),
    "response_kl": or_null(object_with({"k1 k2 k3": _NUMBERS})),
}
# Older events lack these.
_TURNS = {
    "turn mismatch_start mismatch_turn shift response_length": INTEGER_OR_NULL,
    "misplaced": _YES_NO_OR_NULL,
    "entropy_coefficient": NUMBER_OR_NULL,
}
# The trainer adds these: to any token, and to those that a search has named or suspects.
_SHORT_TEXTS = {"token context data_source uid": TEXT_OR_NULL, "reward": NUMBER_OR_NULL}
_TEXTS = {
    **_SHORT_TEXTS,
    "prompt response": TEXT_OR_NULL,
    "response_tokens": or_null(list_of(TEXT)),
    "response_tokens_start": INDEX,
    "ground_truth": {},
}

_CULPRIT = object_with(
    {
        **_TOKEN_FIELDS,
        "grad_norm": NUMBER,
        "threshold": _POSITIVE,
        "share": NUMBER_OR_NULL,
        "layer_norms": _NUMBERS_BY_LAYER,
    },
    {**_TURNS, **_TEXTS},
)

# A token of a recorded spike: a culprit without what only a search measures.
_SUSPECTED = object_with({**_TOKEN_FIELDS, **_TURNS}, _TEXTS)

# The fields of a culprit, and of a suspected token, that the actor writes. None of them has a text of a sample.
CULPRIT_FIELDS: tuple[str, ...] = (*_CULPRIT["required"], *fields(_TURNS))

# A spike that was planted beside training to test the detection.
_PLANTED = object_with({"rank row position": INDEX})
_DRILL = object_with({"planted": or_null(_PLANTED), "found": YES_OR_NO, "passes": INDEX})

# What is left of a gradient with all coefficients zero.
_WITHOUT_TOKENS = object_with(
    {"rank": INTEGER_OR_NULL, "micro_batch": INDEX, "norm share": NUMBER, "layer_norms": _NUMBERS_BY_LAYER}
)

# The cause in one line: a rule's name, that of a warning, "misfire" or "auxiliary"; newer releases may know more.
_VERDICT = object_with({"cause": TEXT_OR_NULL, "culprits ordinary": NUMBER_OR_NULL, "sentence check": TEXT})

EVENT = _line(
    "A gradient spike and the tokens behind it",
    {
        **_MINI_BATCH,
        "micro_batches passes budget": INDEX,
        "trigger": object_with({"kind": {"enum": ["unit", "global"]}, "norm threshold": NUMBER}),
        "threshold loss_scale": _POSITIVE,
        "global_norm global_threshold": NUMBER,
        "ordinary_layer_norms": or_null(_NUMBERS_BY_LAYER),
        "diagnosis": {"enum": ["tokens", "diffuse", "nonfinite", "overflow", "incomplete", "unsearched", "under"]},
        "until": {"enum": ["explained", "exhaustive"]},
        "explained": _YES_NO_OR_NULL,
        "more_tokens": {"type": ["integer", "null"], "minimum": 0},
        "units": list_of(_UNIT),
        "culprits": list_of(_CULPRIT),
        "diffuse": list_of(_DIFFUSE),
        "open_segments": list_of(_OPEN),
        "action": {"enum": ["log", "skip", "drop", "stop"]},
        "applied complete": YES_OR_NO,
        "layer_clip": or_null(by_name(object_with({"norm factor": NUMBER, "bound": NUMBER_OR_NULL}))),
        "summary": TEXT,
        "median_advantage median_weight": NUMBER_OR_NULL,
        "seconds": {"type": "number"},
        "search": {"enum": ["local", "reduced", "recorded", "replayed"]},
        "world_size": _COUNT,
        "error": TEXT_OR_NULL,
    },
    # Older events lack these.
    {
        "gradloc_version": TEXT,
        "drill": or_null(_DRILL),
        "fault replay": TEXT_OR_NULL,
        "without_tokens": or_null(_WITHOUT_TOKENS),
        "broken_parameters": or_null(object_with({"count of": INDEX, "names": list_of(TEXT)})),
        "verdict": or_null(_VERDICT),
        "steps_since_resume": {"type": ["integer", "null"], "minimum": 1},
        "budget_seconds": NUMBER_OR_NULL,
        "out_of_time": YES_OR_NO,
        "suspected": list_of(_SUSPECTED),
        "suspected_ranks": list_of(INDEX),
    },
)

NOTE = _line(
    "What was left out of the file at this place",
    {
        "note": {"enum": ["text_limit", "rate_limit", "size_limit", "unwritable"]},
        "count": _COUNT,
        "message": TEXT,
    },
)

_CLIPPED_TOKEN = object_with(
    {
        "rank micro_batch row": INDEX,
        "position": {"type": "integer"},
        "boundary": TEXT,
        "multiple": NUMBER,
        "cut": YES_OR_NO,
        "token_id": INTEGER_OR_NULL,
        "weight advantage log_prob old_log_prob rollout_log_prob": NUMBER_OR_NULL,
    },
    _SHORT_TEXTS,
)
# As CULPRIT_FIELDS, of a token in a clip line.
CLIPPED_TOKEN_FIELDS: tuple[str, ...] = tuple(_CLIPPED_TOKEN["required"])

_TOKEN_CLIP = object_with(
    {
        "action": {"enum": ["log", "drop", "smooth"]},
        "factor": _POSITIVE,
        "over cut": by_name(INDEX),
        "refused": list_of(TEXT),
        "largest": _NUMBERS_BY_LAYER,
        "usual": by_name(NUMBER_OR_NULL),
        "tokens": list_of(_CLIPPED_TOKEN),
    }
)

CLIP = _line(
    "The tokens whose backward signals were over TokenClip's bounds",
    {**_MINI_BATCH, "token_clip": _TOKEN_CLIP, "summary": TEXT},
)

_CRITIC_VALUE = object_with(
    {"rank micro_batch row position": INDEX, "value old_value return error weight": NUMBER}, _SHORT_TEXTS
)

CRITIC = _line(
    "A spike of the critic's gradient: a line of critic.jsonl",
    {
        **_MINI_BATCH,
        "gradloc_version summary": TEXT,
        "world_size": INDEX,
        "threshold": _POSITIVE,
        "token_norm global_norm": NUMBER,
        "ordinary_token_norm error ordinary_error": NUMBER_OR_NULL,
        "layer_norms": _NUMBERS_BY_LAYER,
        "ordinary_layer_norms": or_null(_NUMBERS_BY_LAYER),
        "micro_batches": list_of(object_with({**_MICRO_BATCH, "error": NUMBER_OR_NULL})),
        "values": list_of(_CRITIC_VALUE),
        "cause": {"enum": ["errors", "network", None]},
    },
)

STEP = _line(
    "The figures of one step: a line of steps.jsonl",
    {
        "threshold token_norm_max spike_margin ratio_max rollout_ratio_max unlikely_share": NUMBER_OR_NULL,
        "triggered": NUMBER_OR_NULL,
    },
    # Older lines lack these: what is wrong with the run without any spike.
    {
        "warnings": list_of(object_with({"name sentence check": TEXT}, {"share": NUMBER_OR_NULL})),
        "misplaced_share": NUMBER_OR_NULL,
    },
)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value conforms to one of this module's schemas; fields that the schema does not name are allowed.

    It supports only the keywords used in this module, so that reading evidence needs no JSON Schema package. An integer
    too large for a float does not conform: no value of an event is that large.
    """
    # Most values in a file are floats, for which the type is the only check, so testing it first makes reading fast.
    if type(value) is float and (schema is NUMBER or schema is NUMBER_OR_NULL):
        return True
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if isinstance(value, bool):
            return "boolean" in kinds
        if not any(isinstance(value, _TYPES[kind]) for kind in kinds):
            return False
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", False)
        if not all(name in value for name in schema.get("required", ())):
            return False
        if not known and _all_plain(value.values(), rest):
            return True
        return all(conforms(entry, known.get(name, rest or {})) for name, entry in value.items())
    if isinstance(value, list):
        items = schema.get("items", {})
        return _all_plain(value, items) or all(conforms(entry, items) for entry in value)
    if isinstance(value, (int, float)):
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return False
        if value > schema.get("maximum", math.inf):
            return False
        return value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", -math.inf)
    return True


def _all_plain(values: Iterable[Any], schema: dict[str, Any]) -> bool:
    """Whether all values are floats, or all are strings, and the schema checks nothing else."""
    plain = float if schema is NUMBER else str if schema is TEXT else None
    return plain is not None and set(map(type, values)) <= {plain}


# An empty list takes 3 bytes in a file and 64 in memory.
_CONTAINERS = 10**6


class NotPlainFileError(ValueError):
    """Why a file is not read; the message names the file."""


def read_plain_file(path: Path, most: int) -> bytes:
    """Reads an ordinary file of at most `most` bytes. A link is not followed, and a named pipe is not waited for.

    Raises:
        NotPlainFileError: It is something else, or larger.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise NotPlainFileError(f"{path.name} is not an ordinary file.")
    # It may have been replaced since.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainFileError(f"{path.name} is not an ordinary file.")
        data = file.read(most + 1) if found.st_size <= most else b""
    if found.st_size > most or len(data) > most:
        size = max(found.st_size, len(data))
        raise NotPlainFileError(f"{path.name} is larger than it may be: {size:,} bytes, and {most:,} are expected.")
    return data


def parse(data: bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: It is not JSON, nests too deep, or has too many lists and objects. The message says which.
    """
    containers = data.count(b"[") + data.count(b"{")
    if containers > _CONTAINERS:
        raise ValueError(f"it has over {_CONTAINERS:,} lists and objects")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if containers > DEPTH and _is_deep(value):
        raise ValueError("it nests too deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        inner = (part.values() if type(part) is dict else part for part in level if type(part) in (dict, list))
        level = [entry for entries in inner for entry in entries if type(entry) in (dict, list)]
    return bool(level)
