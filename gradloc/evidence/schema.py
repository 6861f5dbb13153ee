# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON Schemas of lines: an event of spikes.jsonl, a step of steps.jsonl, or a note about what was left out."""

import math
import sys
from collections.abc import Iterable
from typing import Any

from .sources import SOURCES

SCHEMA = 3

# JSON has no NaN and no infinities, so they are strings.
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_NUMBER_OR_NULL = {"anyOf": [*_NUMBER["anyOf"], {"type": "null"}]}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_INDEX = {"type": "integer", "minimum": 0}
_INTEGER_OR_NULL = {"type": ["integer", "null"]}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_SOURCE = {"enum": list(SOURCES)}
_NUMBERS = {"type": "array", "items": _NUMBER}
_NUMBERS_BY_LAYER = {"type": "object", "additionalProperties": _NUMBER}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _without_need(form: dict[str, Any], *optional: str, **changed: Any) -> dict[str, Any]:
    """An object's schema with some fields made optional, and some given another schema."""
    required = [name for name in form["required"] if name not in optional]
    return {**form, "properties": {**form["properties"], **changed}, "required": required}


_REST = _object({"tokens": _INDEX, "norm": _NUMBER, "threshold": _NUMBER})

_UNIT = _object(
    {
        "rank": _INDEX,
        "micro_batch": _INDEX,
        "rows": _INDEX,
        "tokens": _INDEX,
        "broken_tokens": _INDEX,
        "norm": _NUMBER,
        "threshold": _NUMBER,
        "token_equivalent": _NUMBER,
        "layer_norms": _NUMBERS_BY_LAYER,
        "rest": {"anyOf": [_REST, {"type": "null"}]},
    }
)

_LARGEST_TOKEN = _object({"row": _INDEX, "position": _INDEX, "grad_norm": _NUMBER, "share": _NUMBER_OR_NULL})

_DIFFUSE = _object(
    {
        "rank": _INTEGER_OR_NULL,
        "micro_batch": _INDEX,
        "rows": _list(_INDEX),
        "tokens": _INDEX,
        "norm": _NUMBER,
        "threshold": _NUMBER,
        "largest_tokens": _list(_LARGEST_TOKEN),
    }
)

_CULPRIT = _object(
    {
        "rank": _INDEX,
        "micro_batch": _INDEX,
        "row": _INDEX,
        "position": _INDEX,
        "token_id": {"type": "integer"},
        "grad_norm": _NUMBER,
        "threshold": _POSITIVE,
        "weight": _NUMBER,
        "coefficient": _NUMBER,
        "suspicion": _NUMBER,
        "share": _NUMBER_OR_NULL,
        "advantage": _NUMBER_OR_NULL,
        "kl_coefficient": _NUMBER_OR_NULL,
        "behind_end": {"type": ["boolean", "null"]},
        "log_prob": _NUMBER,
        "old_log_prob": _NUMBER_OR_NULL,
        "ratio": _NUMBER_OR_NULL,
        "ref_log_prob": _NUMBER_OR_NULL,
        "entropy": _NUMBER_OR_NULL,
        "rollout_log_prob": _NUMBER_OR_NULL,
        "rollout_ratio": _NUMBER_OR_NULL,
        "sequence_ratio": _NUMBER_OR_NULL,
        "misaligned_share": _NUMBER_OR_NULL,
        "layer_norms": _NUMBERS_BY_LAYER,
        "source": _SOURCE,
        "sources": _list(_SOURCE),
        "response_suspicion": {"anyOf": [_NUMBERS, {"type": "null"}]},
        "response_kl": {"anyOf": [_object({"k1": _NUMBERS, "k2": _NUMBERS, "k3": _NUMBERS}), {"type": "null"}]},
    },
    # The trainer adds these.
    token=_TEXT_OR_NULL,
    context=_TEXT_OR_NULL,
    prompt=_TEXT_OR_NULL,
    response=_TEXT_OR_NULL,
    response_tokens={"anyOf": [{"type": "array", "items": _TEXT}, {"type": "null"}]},
    response_tokens_start=_INDEX,
    ground_truth={},
    reward=_NUMBER_OR_NULL,
    data_source=_TEXT_OR_NULL,
    uid=_TEXT_OR_NULL,
)

# A spike that was planted beside training to test the detection.
_DRILL = _object(
    {
        "planted": {"anyOf": [_object({"rank": _INDEX, "row": _INDEX, "position": _INDEX}), {"type": "null"}]},
        "found": {"type": "boolean"},
        "passes": _INDEX,
    }
)

EVENT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A gradient spike and the tokens behind it",
    **_object(
        {
            "schema": {"const": SCHEMA},
            "time": {"type": "string"},
            "global_step": _INTEGER_OR_NULL,
            "epoch": _INDEX,
            "mini_batch": _INDEX,
            "trigger": _object({"kind": {"enum": ["unit", "global"]}, "norm": _NUMBER, "threshold": _NUMBER}),
            "threshold": _POSITIVE,
            "global_norm": _NUMBER,
            "global_threshold": _NUMBER,
            "ordinary_layer_norms": {"anyOf": [_NUMBERS_BY_LAYER, {"type": "null"}]},
            "diagnosis": {"enum": ["tokens", "diffuse", "nonfinite", "overflow", "incomplete"]},
            "until": {"enum": ["explained", "exhaustive"]},
            "explained": {"type": ["boolean", "null"]},
            "more_tokens": {"type": ["integer", "null"], "minimum": 0},
            "micro_batches": _INDEX,
            "units": _list(_UNIT),
            "culprits": _list(_CULPRIT),
            "diffuse": _list(_DIFFUSE),
            "passes": _INDEX,
            "budget": _INDEX,
            "complete": {"type": "boolean"},
            "open_segments": _list(
                _object({"rank": _INTEGER_OR_NULL, "micro_batch": _INDEX, "tokens": _INDEX, "threshold": _NUMBER})
            ),
            "action": {"enum": ["log", "skip", "drop", "stop"]},
            "applied": {"type": "boolean"},
            "layer_clip": {
                "anyOf": [
                    {
                        "type": "object",
                        "additionalProperties": _object({"norm": _NUMBER, "bound": _NUMBER_OR_NULL, "factor": _NUMBER}),
                    },
                    {"type": "null"},
                ]
            },
            "summary": _TEXT,
            "median_advantage": _NUMBER_OR_NULL,
            "median_weight": _NUMBER_OR_NULL,
            "seconds": {"type": "number"},
            "search": {"enum": ["local", "reduced"]},
            "world_size": {"type": "integer", "minimum": 1},
            "loss_scale": _POSITIVE,
            "error": _TEXT_OR_NULL,
        },
        # Older events lack these.
        gradloc_version=_TEXT,
        drill={"anyOf": [_DRILL, {"type": "null"}]},
        fault=_TEXT_OR_NULL,
    ),
}

# Files of older versions are still read. Version 2 has one source for each culprit and no summary.
EVENT_2 = _without_need(
    EVENT,
    "summary",
    "median_advantage",
    "median_weight",
    "micro_batches",
    schema={"const": 2},
    culprits=_list(_without_need(_CULPRIT, "sources", "kl_coefficient", "behind_end")),
)

# Version 1 has no field for whether the culprits explain the spike.
EVENT_1 = _without_need(
    EVENT_2,
    "until",
    "explained",
    "more_tokens",
    schema={"const": 1},
    units=_list(_without_need(_UNIT, "rest")),
    diffuse=_list(_without_need(_DIFFUSE, largest_tokens=_list(_without_need(_LARGEST_TOKEN, "share")))),
)

NOTE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "What was left out of the file at this place",
    **_object(
        {
            "schema": {"enum": [1, 2, SCHEMA]},
            "time": {"type": "string"},
            "global_step": _INTEGER_OR_NULL,
            "note": {"enum": ["text_limit", "rate_limit", "size_limit"]},
            "count": {"type": "integer", "minimum": 1},
            "message": {"type": "string"},
        }
    ),
}

STEP = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "The figures of one step: a line of steps.jsonl",
    **_object(
        {
            "schema": {"const": SCHEMA},
            "time": {"type": "string"},
            "global_step": _INTEGER_OR_NULL,
            "threshold": _NUMBER_OR_NULL,
            "token_norm_max": _NUMBER_OR_NULL,
            "spike_margin": _NUMBER_OR_NULL,
            "ratio_max": _NUMBER_OR_NULL,
            "ratio_p999": _NUMBER_OR_NULL,
            "rollout_ratio_max": _NUMBER_OR_NULL,
            "unlikely_share": _NUMBER_OR_NULL,
            "triggered": _NUMBER_OR_NULL,
        }
    ),
}

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
    if type(value) is float and (schema is _NUMBER or schema is _NUMBER_OR_NULL):
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
        return value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", -math.inf)
    return True


def _all_plain(values: Iterable[Any], schema: dict[str, Any]) -> bool:
    """Whether all values are floats, or all are strings, and the schema checks nothing else."""
    plain = float if schema is _NUMBER else str if schema is _TEXT else None
    return plain is not None and set(map(type, values)) <= {plain}
