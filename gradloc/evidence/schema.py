# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON Schemas of lines: an event or a clip line of spikes.jsonl, a step of steps.jsonl, a spike of critic.jsonl,
or a note.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

from .sources import SOURCES

# The version of all lines. Lines of version 3 are still read: see `current`.
SCHEMA = 4

# JSON has no NaN and no infinities, so they are strings.
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
NUMBER_OR_NULL = {"anyOf": [*NUMBER["anyOf"], {"type": "null"}]}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
INDEX = {"type": "integer", "minimum": 0}
INTEGER_OR_NULL = {"type": ["integer", "null"]}
TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}
_SOURCE = {"enum": list(SOURCES)}
_NUMBERS = {"type": "array", "items": NUMBER}
_NUMBERS_BY_LAYER = {"type": "object", "additionalProperties": NUMBER}


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


_REST = object_with({"tokens": INDEX, "norm": NUMBER, "threshold": NUMBER})

_UNIT = object_with(
    {
        "rank": INDEX,
        "micro_batch": INDEX,
        "rows": INDEX,
        "tokens": INDEX,
        "broken_tokens": INDEX,
        "norm": NUMBER,
        "threshold": NUMBER,
        "token_equivalent": NUMBER,
        "layer_norms": _NUMBERS_BY_LAYER,
        "rest": {"anyOf": [_REST, {"type": "null"}]},
    }
)

_LARGEST_TOKEN = object_with({"row": INDEX, "position": INDEX, "grad_norm": NUMBER, "share": NUMBER_OR_NULL})

_DIFFUSE = object_with(
    {
        "rank": INTEGER_OR_NULL,
        "micro_batch": INDEX,
        "rows": list_of(INDEX),
        "tokens": INDEX,
        "norm": NUMBER,
        "threshold": NUMBER,
        "largest_tokens": list_of(_LARGEST_TOKEN),
    }
)

# What is known of a token without a gradient.
_TOKEN_FIELDS = {
    "rank": INDEX,
    "micro_batch": INDEX,
    "row": INDEX,
    "position": INDEX,
    "token_id": {"type": "integer"},
    "weight": NUMBER,
    "coefficient": NUMBER,
    "suspicion": NUMBER,
    "advantage": NUMBER_OR_NULL,
    "kl_coefficient": NUMBER_OR_NULL,
    "after_eos": {"type": ["boolean", "null"]},
    "log_prob": NUMBER,
    "old_log_prob": NUMBER_OR_NULL,
    "ratio": NUMBER_OR_NULL,
    "ref_log_prob": NUMBER_OR_NULL,
    "entropy": NUMBER_OR_NULL,
    "rollout_log_prob": NUMBER_OR_NULL,
    "rollout_ratio": NUMBER_OR_NULL,
    "sequence_ratio": NUMBER_OR_NULL,
    "misaligned_share": NUMBER_OR_NULL,
    "source": _SOURCE,
    "sources": list_of(_SOURCE),
    "response_suspicion": {"anyOf": [_NUMBERS, {"type": "null"}]},
    "response_kl": {"anyOf": [object_with({"k1": _NUMBERS, "k2": _NUMBERS, "k3": _NUMBERS}), {"type": "null"}]},
}
# Older events lack these.
_TURNS = {"turn": INTEGER_OR_NULL, "mismatch_start": INTEGER_OR_NULL, "mismatch_turn": INTEGER_OR_NULL}
# The trainer adds these.
_TEXTS = {
    "token": TEXT_OR_NULL,
    "context": TEXT_OR_NULL,
    "prompt": TEXT_OR_NULL,
    "response": TEXT_OR_NULL,
    "response_tokens": {"anyOf": [{"type": "array", "items": TEXT}, {"type": "null"}]},
    "response_tokens_start": INDEX,
    "ground_truth": {},
    "reward": NUMBER_OR_NULL,
    "data_source": TEXT_OR_NULL,
    "uid": TEXT_OR_NULL,
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
    {
        "planted": {"anyOf": [object_with({"rank": INDEX, "row": INDEX, "position": INDEX}), {"type": "null"}]},
        "found": {"type": "boolean"},
        "passes": INDEX,
    }
)

# What is left of a gradient with all coefficients zero.
_WITHOUT_TOKENS = object_with(
    {"rank": INTEGER_OR_NULL, "micro_batch": INDEX, "norm": NUMBER, "share": NUMBER, "layer_norms": _NUMBERS_BY_LAYER}
)

# The cause in one line.
_VERDICT = object_with(
    {
        # A rule's name, that of a warning, "misfire" or "auxiliary"; newer releases may know more causes.
        "cause": TEXT_OR_NULL,
        "culprits": NUMBER_OR_NULL,
        "ordinary": NUMBER_OR_NULL,
        "sentence": TEXT,
        "check": TEXT,
    }
)

# What is wrong with the run without any spike.
_WARNING = object_with({"name": TEXT, "sentence": TEXT, "check": TEXT})

EVENT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A gradient spike and the tokens behind it",
    **object_with(
        {
            "schema": {"const": SCHEMA},
            "time": {"type": "string"},
            "global_step": INTEGER_OR_NULL,
            "epoch": INDEX,
            "mini_batch": INDEX,
            "trigger": object_with({"kind": {"enum": ["unit", "global"]}, "norm": NUMBER, "threshold": NUMBER}),
            "threshold": _POSITIVE,
            "global_norm": NUMBER,
            "global_threshold": NUMBER,
            "ordinary_layer_norms": {"anyOf": [_NUMBERS_BY_LAYER, {"type": "null"}]},
            "diagnosis": {"enum": ["tokens", "diffuse", "nonfinite", "overflow", "incomplete", "unsearched"]},
            "until": {"enum": ["explained", "exhaustive"]},
            "explained": {"type": ["boolean", "null"]},
            "more_tokens": {"type": ["integer", "null"], "minimum": 0},
            "micro_batches": INDEX,
            "units": list_of(_UNIT),
            "culprits": list_of(_CULPRIT),
            "diffuse": list_of(_DIFFUSE),
            "passes": INDEX,
            "budget": INDEX,
            "complete": {"type": "boolean"},
            "open_segments": list_of(
                object_with({"rank": INTEGER_OR_NULL, "micro_batch": INDEX, "tokens": INDEX, "threshold": NUMBER})
            ),
            "action": {"enum": ["log", "skip", "drop", "stop"]},
            "applied": {"type": "boolean"},
            "layer_clip": {
                "anyOf": [
                    {
                        "type": "object",
                        "additionalProperties": object_with(
                            {"norm": NUMBER, "bound": NUMBER_OR_NULL, "factor": NUMBER}
                        ),
                    },
                    {"type": "null"},
                ]
            },
            "summary": TEXT,
            "median_advantage": NUMBER_OR_NULL,
            "median_weight": NUMBER_OR_NULL,
            "seconds": {"type": "number"},
            # "recorded": nothing was searched; "replayed": a recorded spike, searched later.
            "search": {"enum": ["local", "reduced", "recorded", "replayed"]},
            "world_size": {"type": "integer", "minimum": 1},
            "loss_scale": _POSITIVE,
            "error": TEXT_OR_NULL,
        },
        # Older events lack these.
        gradloc_version=TEXT,
        drill={"anyOf": [_DRILL, {"type": "null"}]},
        fault=TEXT_OR_NULL,
        replay=TEXT_OR_NULL,
        without_tokens={"anyOf": [_WITHOUT_TOKENS, {"type": "null"}]},
        verdict={"anyOf": [_VERDICT, {"type": "null"}]},
        steps_since_resume={"type": ["integer", "null"], "minimum": 1},
        budget_seconds=NUMBER_OR_NULL,
        out_of_time={"type": "boolean"},
        suspected=list_of(_SUSPECTED),
    ),
}

NOTE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "What was left out of the file at this place",
    **object_with(
        {
            "schema": {"const": SCHEMA},
            "time": {"type": "string"},
            "global_step": INTEGER_OR_NULL,
            "note": {"enum": ["text_limit", "rate_limit", "size_limit", "unwritable"]},
            "count": {"type": "integer", "minimum": 1},
            "message": {"type": "string"},
        }
    ),
}

_CLIPPED_TOKEN = object_with(
    {
        "rank": INDEX,
        "micro_batch": INDEX,
        "row": INDEX,
        # Negative in the prompt.
        "position": {"type": "integer"},
        "boundary": TEXT,
        "multiple": NUMBER,
        "cut": {"type": "boolean"},
        "token_id": INTEGER_OR_NULL,
        "weight": NUMBER_OR_NULL,
        "advantage": NUMBER_OR_NULL,
        "log_prob": NUMBER_OR_NULL,
        "old_log_prob": NUMBER_OR_NULL,
        "rollout_log_prob": NUMBER_OR_NULL,
    },
    # The trainer adds these.
    token=TEXT_OR_NULL,
    context=TEXT_OR_NULL,
    reward=NUMBER_OR_NULL,
    data_source=TEXT_OR_NULL,
    uid=TEXT_OR_NULL,
)
# As CULPRIT_FIELDS, of a token in a clip line.
CLIPPED_TOKEN_FIELDS: tuple[str, ...] = tuple(_CLIPPED_TOKEN["required"])
_COUNTS_BY_BOUNDARY = {"type": "object", "additionalProperties": INDEX}

CLIP = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "The tokens whose backward signals were over TokenClip's bounds",
    **object_with(
        {
            "schema": {"const": SCHEMA},
            "time": {"type": "string"},
            "global_step": INTEGER_OR_NULL,
            "epoch": INDEX,
            "mini_batch": INDEX,
            "token_clip": object_with(
                {
                    "action": {"enum": ["log", "drop", "smooth"]},
                    "factor": _POSITIVE,
                    "over": _COUNTS_BY_BOUNDARY,
                    "cut": _COUNTS_BY_BOUNDARY,
                    "refused": list_of(TEXT),
                    "largest": _NUMBERS_BY_LAYER,
                    "usual": {"type": "object", "additionalProperties": NUMBER_OR_NULL},
                    "tokens": list_of(_CLIPPED_TOKEN),
                }
            ),
            "summary": TEXT,
        }
    ),
}

_CRITIC_MICRO_BATCH = object_with(
    {
        "rank": INDEX,
        "micro_batch": INDEX,
        "rows": INDEX,
        "tokens": INDEX,
        "norm": NUMBER,
        "threshold": NUMBER,
        "token_equivalent": NUMBER,
        "error": NUMBER_OR_NULL,
        "layer_norms": _NUMBERS_BY_LAYER,
    }
)

_CRITIC_VALUE = object_with(
    {
        "rank": INDEX,
        "micro_batch": INDEX,
        "row": INDEX,
        "position": INDEX,
        "value": NUMBER,
        "old_value": NUMBER,
        "return": NUMBER,
        "error": NUMBER,
        "weight": NUMBER,
    },
    token=TEXT_OR_NULL,
    context=TEXT_OR_NULL,
    reward=NUMBER_OR_NULL,
    data_source=TEXT_OR_NULL,
    uid=TEXT_OR_NULL,
)

CRITIC = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A spike of the critic's gradient: a line of critic.jsonl",
    **object_with(
        {
            "schema": {"const": SCHEMA},
            "gradloc_version": TEXT,
            "time": TEXT,
            "global_step": INTEGER_OR_NULL,
            "epoch": INDEX,
            "mini_batch": INDEX,
            "threshold": _POSITIVE,
            "token_norm": NUMBER,
            "global_norm": NUMBER,
            "layer_norms": _NUMBERS_BY_LAYER,
            "ordinary_token_norm": NUMBER_OR_NULL,
            "ordinary_layer_norms": {"anyOf": [_NUMBERS_BY_LAYER, {"type": "null"}]},
            "error": NUMBER_OR_NULL,
            "ordinary_error": NUMBER_OR_NULL,
            "micro_batches": list_of(_CRITIC_MICRO_BATCH),
            "values": list_of(_CRITIC_VALUE),
            "world_size": INDEX,
            "cause": {"enum": ["errors", "network", None]},
            "summary": TEXT,
        }
    ),
}

STEP = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "The figures of one step: a line of steps.jsonl",
    **object_with(
        {
            "schema": {"const": SCHEMA},
            "time": {"type": "string"},
            "global_step": INTEGER_OR_NULL,
            "threshold": NUMBER_OR_NULL,
            "token_norm_max": NUMBER_OR_NULL,
            "spike_margin": NUMBER_OR_NULL,
            "ratio_max": NUMBER_OR_NULL,
            "rollout_ratio_max": NUMBER_OR_NULL,
            "unlikely_share": NUMBER_OR_NULL,
            "triggered": NUMBER_OR_NULL,
        },
        # Older lines lack these.
        warnings=list_of(_WARNING),
    ),
}


def current(line: Any) -> Any:
    """A line of version 3 in the form of this one, where a culprit's `behind_end` is `after_eos`; others as given."""
    if not (isinstance(line, dict) and line.get("schema") == SCHEMA - 1):
        return line
    culprits = line.get("culprits")
    if isinstance(culprits, list):
        line = {**line, "culprits": [_renamed(culprit) for culprit in culprits]}
    return {**line, "schema": SCHEMA}


def _renamed(culprit: Any) -> Any:
    if not isinstance(culprit, dict):
        return culprit
    return {"after_eos" if name == "behind_end" else name: value for name, value in culprit.items()}


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
