# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON Schemas of lines: an event or a clip line of spikes.jsonl, a step of steps.jsonl, a spike of critic.jsonl,
or a note.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

from ..judge.rules import SOURCES

# The version of all lines.
SCHEMA = 4

# JSON has no NaN and no infinities, so they are strings.
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
NUMBER_OR_NULL = {"anyOf": [*NUMBER["anyOf"], {"type": "null"}]}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
INDEX = {"type": "integer", "minimum": 0}
INTEGER_OR_NULL = {"type": ["integer", "null"]}
TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}
_YES_OR_NO = {"type": "boolean"}
_YES_NO_OR_NULL = {"type": ["boolean", "null"]}


def object_with(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """The schema of an object with these fields."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list of these items."""
    return {"type": "array", "items": items}


def fields(names: str, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields of one schema, by their names."""
    return dict.fromkeys(names.split(), schema)


def _by_name(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _line(title: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """The schema of a line of a file."""
    start = {"schema": {"const": SCHEMA}, "time": TEXT, "global_step": INTEGER_OR_NULL}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": title, **object_with({**start, **required}, **optional)}


_SOURCE = {"enum": list(SOURCES)}
_NUMBERS = list_of(NUMBER)
_NUMBERS_BY_LAYER = _by_name(NUMBER)

_UNIT = object_with(
    {
        **fields("rank micro_batch rows tokens broken_tokens", INDEX),
        **fields("norm threshold token_equivalent", NUMBER),
        "layer_norms": _NUMBERS_BY_LAYER,
        "rest": _or_null(object_with({"tokens": INDEX, "norm": NUMBER, "threshold": NUMBER})),
    }
)

_DIFFUSE = object_with(
    {
        "rank": INTEGER_OR_NULL,
        "micro_batch": INDEX,
        "rows": list_of(INDEX),
        "tokens": INDEX,
        "norm": NUMBER,
        "threshold": NUMBER,
        "largest_tokens": list_of(
            object_with({"row": INDEX, "position": INDEX, "grad_norm": NUMBER, "share": NUMBER_OR_NULL})
        ),
    }
)

# What is known of a token without a gradient.
_TOKEN_FIELDS = {
    **fields("rank micro_batch row position", INDEX),
    "token_id": {"type": "integer"},
    **fields("weight coefficient suspicion log_prob", NUMBER),
    **fields("advantage kl_coefficient old_log_prob ratio ref_log_prob entropy rollout_log_prob", NUMBER_OR_NULL),
    **fields("rollout_ratio sequence_ratio misaligned_share", NUMBER_OR_NULL),
    "after_eos": _YES_NO_OR_NULL,
    "source": _SOURCE,
    "sources": list_of(_SOURCE),
    "response_suspicion": _or_null(_NUMBERS),
    "response_kl": _or_null(object_with(fields("k1 k2 k3", _NUMBERS))),
}
# Older events lack these.
_TURNS = {
    **fields("turn mismatch_start mismatch_turn shift response_length", INTEGER_OR_NULL),
    "misplaced": _YES_NO_OR_NULL,
    "entropy_coefficient": NUMBER_OR_NULL,
}
# The trainer adds these: to any token, and to those that a search has named or suspects.
_SHORT_TEXTS = {**fields("token context data_source uid", TEXT_OR_NULL), "reward": NUMBER_OR_NULL}
_TEXTS = {
    **_SHORT_TEXTS,
    "prompt": TEXT_OR_NULL,
    "response": TEXT_OR_NULL,
    "response_tokens": _or_null(list_of(TEXT)),
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
    **_TURNS,
    **_TEXTS,
)

# A token of a recorded spike: a culprit without what only a search measures.
_SUSPECTED = object_with({**_TOKEN_FIELDS, **_TURNS}, **_TEXTS)

# The fields of a culprit, and of a suspected token, that the actor writes. None of them has a text of a sample.
CULPRIT_FIELDS: tuple[str, ...] = (*_CULPRIT["required"], *_TURNS)

# A spike that was planted beside training to test the detection.
_DRILL = object_with(
    {"planted": _or_null(object_with(fields("rank row position", INDEX))), "found": _YES_OR_NO, "passes": INDEX}
)

# What is left of a gradient with all coefficients zero.
_WITHOUT_TOKENS = object_with(
    {"rank": INTEGER_OR_NULL, "micro_batch": INDEX, "norm": NUMBER, "share": NUMBER, "layer_norms": _NUMBERS_BY_LAYER}
)

# The cause in one line: a rule's name, that of a warning, "misfire" or "auxiliary"; newer releases may know more.
_VERDICT = object_with(
    {"cause": TEXT_OR_NULL, **fields("culprits ordinary", NUMBER_OR_NULL), "sentence": TEXT, "check": TEXT}
)

EVENT = _line(
    "A gradient spike and the tokens behind it",
    {
        **fields("epoch mini_batch micro_batches passes budget", INDEX),
        "trigger": object_with({"kind": {"enum": ["unit", "global"]}, "norm": NUMBER, "threshold": NUMBER}),
        **fields("threshold loss_scale", _POSITIVE),
        **fields("global_norm global_threshold", NUMBER),
        "ordinary_layer_norms": _or_null(_NUMBERS_BY_LAYER),
        "diagnosis": {"enum": ["tokens", "diffuse", "nonfinite", "overflow", "incomplete", "unsearched", "under"]},
        "until": {"enum": ["explained", "exhaustive"]},
        "explained": _YES_NO_OR_NULL,
        "more_tokens": {"type": ["integer", "null"], "minimum": 0},
        "units": list_of(_UNIT),
        "culprits": list_of(_CULPRIT),
        "diffuse": list_of(_DIFFUSE),
        "open_segments": list_of(
            object_with({"rank": INTEGER_OR_NULL, "micro_batch": INDEX, "tokens": INDEX, "threshold": NUMBER})
        ),
        "action": {"enum": ["log", "skip", "drop", "stop"]},
        **fields("applied complete", _YES_OR_NO),
        "layer_clip": _or_null(_by_name(object_with({"norm": NUMBER, "bound": NUMBER_OR_NULL, "factor": NUMBER}))),
        "summary": TEXT,
        **fields("median_advantage median_weight", NUMBER_OR_NULL),
        "seconds": {"type": "number"},
        # "recorded": nothing was searched; "replayed": a recorded spike, searched later.
        "search": {"enum": ["local", "reduced", "recorded", "replayed"]},
        "world_size": {"type": "integer", "minimum": 1},
        "error": TEXT_OR_NULL,
    },
    # Older events lack these.
    gradloc_version=TEXT,
    drill=_or_null(_DRILL),
    fault=TEXT_OR_NULL,
    replay=TEXT_OR_NULL,
    without_tokens=_or_null(_WITHOUT_TOKENS),
    broken_parameters=_or_null(object_with({"count": INDEX, "of": INDEX, "names": list_of(TEXT)})),
    verdict=_or_null(_VERDICT),
    steps_since_resume={"type": ["integer", "null"], "minimum": 1},
    budget_seconds=NUMBER_OR_NULL,
    out_of_time=_YES_OR_NO,
    suspected=list_of(_SUSPECTED),
    # Of an event that a search of the bundle has appended: `writer.line_digest` of the line in whose place it is read.
    replaces=TEXT,
    suspected_ranks=list_of(INDEX),
)

NOTE = _line(
    "What was left out of the file at this place",
    {
        "note": {"enum": ["text_limit", "rate_limit", "size_limit", "unwritable"]},
        "count": {"type": "integer", "minimum": 1},
        "message": TEXT,
    },
)

_CLIPPED_TOKEN = object_with(
    {
        **fields("rank micro_batch row", INDEX),
        "position": {"type": "integer"},  # negative in the prompt
        "boundary": TEXT,
        "multiple": NUMBER,
        "cut": _YES_OR_NO,
        "token_id": INTEGER_OR_NULL,
        **fields("weight advantage log_prob old_log_prob rollout_log_prob", NUMBER_OR_NULL),
    },
    **_SHORT_TEXTS,
)
# As CULPRIT_FIELDS, of a token in a clip line.
CLIPPED_TOKEN_FIELDS: tuple[str, ...] = tuple(_CLIPPED_TOKEN["required"])

CLIP = _line(
    "The tokens whose backward signals were over TokenClip's bounds",
    {
        **fields("epoch mini_batch", INDEX),
        "token_clip": object_with(
            {
                "action": {"enum": ["log", "drop", "smooth"]},
                "factor": _POSITIVE,
                **fields("over cut", _by_name(INDEX)),
                "refused": list_of(TEXT),
                "largest": _NUMBERS_BY_LAYER,
                "usual": _by_name(NUMBER_OR_NULL),
                "tokens": list_of(_CLIPPED_TOKEN),
            }
        ),
        "summary": TEXT,
    },
)

_CRITIC_MICRO_BATCH = object_with(
    {
        **fields("rank micro_batch rows tokens", INDEX),
        **fields("norm threshold token_equivalent", NUMBER),
        "error": NUMBER_OR_NULL,
        "layer_norms": _NUMBERS_BY_LAYER,
    }
)

_CRITIC_VALUE = object_with(
    {
        **fields("rank micro_batch row position", INDEX),
        **fields("value old_value return error weight", NUMBER),
    },
    **_SHORT_TEXTS,
)

CRITIC = _line(
    "A spike of the critic's gradient: a line of critic.jsonl",
    {
        "gradloc_version": TEXT,
        **fields("epoch mini_batch world_size", INDEX),
        "threshold": _POSITIVE,
        **fields("token_norm global_norm", NUMBER),
        **fields("ordinary_token_norm error ordinary_error", NUMBER_OR_NULL),
        "layer_norms": _NUMBERS_BY_LAYER,
        "ordinary_layer_norms": _or_null(_NUMBERS_BY_LAYER),
        "micro_batches": list_of(_CRITIC_MICRO_BATCH),
        "values": list_of(_CRITIC_VALUE),
        "cause": {"enum": ["errors", "network", None]},
        "summary": TEXT,
    },
)

STEP = _line(
    "The figures of one step: a line of steps.jsonl",
    fields(
        "threshold token_norm_max spike_margin ratio_max rollout_ratio_max unlikely_share triggered", NUMBER_OR_NULL
    ),
    # Older lines lack these: what is wrong with the run without any spike.
    warnings=list_of(object_with(fields("name sentence check", TEXT), share=NUMBER_OR_NULL)),
    misplaced_share=NUMBER_OR_NULL,
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
