# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON Schemas of lines: an event or a clip line of spikes.jsonl, a step of steps.jsonl, a spike of critic.jsonl,
or a note.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

from gradloc.evidence.writer import SCHEMA
from gradloc.judge.rules import SOURCES, UNLIKELY

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


def fields(names: str, schema: dict[str, Any], meaning: str = "") -> dict[str, dict[str, Any]]:
    """Fields of one schema, by their names; `tools/field_tables.py` writes their meaning into the documentation."""
    return dict.fromkeys(names.split(), {**schema, "description": meaning} if meaning else schema)


def _by_name(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _line(title: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a line of a file."""
    start = {
        **fields("schema", {"const": SCHEMA}, "version of the form"),
        **fields("time", TEXT, "UTC"),
        **fields("global_step", INTEGER_OR_NULL, "the trainer's step"),
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": title, **object_with({**start, **required}, **(optional or {}))}


_SOURCE = {"enum": list(SOURCES)}
_NUMBERS = list_of(NUMBER)
_NUMBERS_BY_LAYER = _by_name(NUMBER)

_MINI_BATCH = fields("epoch mini_batch", INDEX, "PPO epoch, and mini-batch in it, from 0")
_VERSION = fields("gradloc_version", TEXT, "that wrote the line")
_PLACE = {
    **fields("rank micro_batch row", INDEX, "rank; micro-batch and row of its mini-batch, from 0"),
    **fields("position", INDEX, "position in the response, from 0"),
}

_MICRO_BATCH = {
    **fields("rank micro_batch", INDEX, "from 0"),
    **fields("rows tokens", INDEX, "number of responses; of response tokens"),
    **fields("norm threshold", NUMBER, "norm of that rank's own gradient; its threshold, τ·√Σw²"),
    **fields("token_equivalent", NUMBER, "norm/√Σw², to be compared with τ"),
    **fields("layer_norms", _NUMBERS_BY_LAYER, "norm by layer"),
}
_UNIT = object_with(
    {
        **_MICRO_BATCH,
        **fields("broken_tokens", INDEX, "tokens with a NaN or infinite log-prob or coefficient"),
        **fields(
            "rest",
            _or_null(object_with({"tokens": INDEX, "norm": NUMBER, "threshold": NUMBER})),
            "without culprits: `tokens` left, their `norm` and `threshold`; `null`: not measured",
        ),
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
    **_PLACE,
    **fields("token_id", {"type": "integer"}, "its id"),
    **fields("weight coefficient", NUMBER, "w_t, its weight in the loss; ∂L/∂log p_t"),
    **fields("suspicion", NUMBER, "|∂L/∂log p_t|·(1 − p_t), by which the search ranks tokens"),
    **fields("log_prob", NUMBER, "log p_t of the policy before the step"),
    **fields("advantage", NUMBER_OR_NULL, "its advantage"),
    **fields("kl_coefficient", NUMBER_OR_NULL, "the KL loss's part of `coefficient`"),
    **fields("old_log_prob ref_log_prob rollout_log_prob", NUMBER_OR_NULL, "of the old policy, reference and rollout"),
    **fields("entropy", NUMBER_OR_NULL, "of the policy at its position, in nats"),
    **fields("ratio rollout_ratio", NUMBER_OR_NULL, "importance ratio to the old policy; to the rollout"),
    **fields(
        "sequence_ratio", NUMBER_OR_NULL, "geometric mean of the response's ratios, to the rollout where it is known"
    ),
    **fields(
        "misaligned_share",
        NUMBER_OR_NULL,
        "share of its response whose log-probs differ from the rollout's by over 1 nat, or are NaN",
    ),
    **fields("after_eos", _YES_NO_OR_NULL, "whether it is after the end of the turn"),
    **fields("source", _SOURCE, "the first of `sources`"),
    **fields("sources", list_of(_SOURCE), "the rules that hold, the most specific first"),
    **fields("response_suspicion", _or_null(_NUMBERS), "suspicion of each of `response_tokens`"),
    **fields(
        "response_kl",
        _or_null(object_with(fields("k1 k2 k3", _NUMBERS))),
        "their KL to the reference by `k1`, `k2` and `k3`",
    ),
}
# Older events lack these.
_TURNS = {
    **fields("turn", INTEGER_OR_NULL, "its run of tokens with response_mask 1, from 1; `null` if there is one"),
    **fields(
        "mismatch_start mismatch_turn", INTEGER_OR_NULL, "where the mismatch to the rollout begins; in which turn"
    ),
    **fields("misplaced", _YES_NO_OR_NULL, "whether its rollout's or reference's log-probs belong to other tokens"),
    **fields("shift", INTEGER_OR_NULL, "by how many positions they are moved"),
    **fields("response_length", INTEGER_OR_NULL, "tokens of its response"),
    **fields("entropy_coefficient", NUMBER_OR_NULL, "∂L/∂H_t"),
}
# The trainer adds these: to any token, and to those that a search has named or suspects.
_SHORT_TEXTS = {
    **fields("token context", TEXT_OR_NULL, "its text; the text around it, in which «» mark it"),
    **fields("data_source uid", TEXT_OR_NULL, "of its prompt"),
    **fields("reward", NUMBER_OR_NULL, "of its response"),
}
_TEXTS = {
    **_SHORT_TEXTS,
    **fields("prompt response", TEXT_OR_NULL, "the texts"),
    **fields("response_tokens", _or_null(list_of(TEXT)), "up to 512 tokens around it, decoded one by one"),
    **fields("response_tokens_start", INDEX, "the position of the first of these"),
    **fields("ground_truth", {}, "of its prompt"),
}

_CULPRIT = object_with(
    {
        **_TOKEN_FIELDS,
        **fields("grad_norm", NUMBER, "‖g_t‖: the norm of its part of the gradient, divided by its weight"),
        **fields("threshold", _POSITIVE, "τ"),
        **fields("share", NUMBER_OR_NULL, "the norm of that part over its micro-batch's"),
        **fields("layer_norms", _NUMBERS_BY_LAYER, "`grad_norm` by layer"),
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
        **_MINI_BATCH,
        **fields("micro_batches", INDEX, "number of micro-batches with a gradient"),
        **fields("passes budget", INDEX, "extra passes made; allowed"),
        **fields(
            "trigger",
            object_with({"kind": {"enum": ["unit", "global"]}, "norm": NUMBER, "threshold": NUMBER}),
            "what started the search: `kind` (`unit` or `global`), `norm`, `threshold`",
        ),
        **fields(
            "threshold", _POSITIVE, "τ; in the warm-up of `auto`, ten times the largest norm so far (1e30 without one)"
        ),
        **fields("loss_scale", _POSITIVE, "fp16's loss scale, else 1; norms are without it"),
        **fields(
            "global_norm global_threshold",
            NUMBER,
            "norm of the reduced gradient before clipping; its threshold, τ·√Σw²/W",
        ),
        **fields(
            "ordinary_layer_norms",
            _or_null(_NUMBERS_BY_LAYER),
            "each layer's median norm/√Σw² in micro-batches under their thresholds (or in the last mini-batch without "
            "a spike)",
        ),
        **fields(
            "diagnosis",
            {"enum": ["tokens", "diffuse", "nonfinite", "overflow", "incomplete", "unsearched", "under"]},
            "what the search has shown",
        ),
        **fields("until", {"enum": ["explained", "exhaustive"]}, "`bisect_until`"),
        **fields(
            "explained",
            _YES_NO_OR_NULL,
            "whether each of `units` is under its threshold without its culprits; `null`: not measured",
        ),
        **fields("more_tokens", {"type": ["integer", "null"], "minimum": 0}, "estimated other tokens over τ"),
        **fields("units", list_of(_UNIT), "the micro-batches over their thresholds"),
        **fields("culprits", list_of(_CULPRIT), "the tokens named, the largest `grad_norm` first"),
        **fields(
            "diffuse",
            list_of(_DIFFUSE),
            "parts over their thresholds: `rank` (`null`: several), `micro_batch`, `rows`, number of `tokens`, `norm`, "
            "`threshold`, `largest_tokens` (`row`, `position`, `grad_norm`, `share`)",
        ),
        **fields(
            "open_segments",
            list_of(object_with({"rank": INTEGER_OR_NULL, "micro_batch": INDEX, "tokens": INDEX, "threshold": NUMBER})),
            "parts left open: `rank` (`null`: all), `micro_batch`, number of `tokens`, `threshold`",
        ),
        **fields("action", {"enum": ["log", "skip", "drop", "stop"]}, "`spike_action`"),
        **fields("applied", _YES_OR_NO, "whether it could be carried out"),
        **fields("complete", _YES_OR_NO, "whether the search finished, with nothing diffuse"),
        **fields(
            "layer_clip",
            _or_null(_by_name(object_with({"norm": NUMBER, "bound": NUMBER_OR_NULL, "factor": NUMBER}))),
            "LayerClip in this step, by layer: `norm`, `bound` and `factor`",
        ),
        **fields("summary", TEXT, "what most culprits are; a layer far above its ordinary share"),
        **fields(
            "median_advantage median_weight",
            NUMBER_OR_NULL,
            "medians over the mini-batch's tokens of |advantage| where not zero; of the weight",
        ),
        **fields("seconds", {"type": "number"}, "duration on the slowest rank"),
        **fields(
            "search",
            {"enum": ["local", "reduced", "recorded", "replayed"]},
            "by each rank's own gradient (`local`) or the `reduced` one; `recorded`: none; `replayed`: later",
        ),
        **fields("world_size", {"type": "integer", "minimum": 1}, "W, the data-parallel ranks"),
        **fields("error", TEXT_OR_NULL, "why the search was aborted"),
    },
    # Older events lack these.
    {
        **_VERSION,
        **fields(
            "drill", _or_null(_DRILL), "of a drill: what was `planted` (`rank`, `row`, `position`), `found`, `passes`"
        ),
        **fields("fault", TEXT_OR_NULL, "what the embedded profile has planted"),
        **fields("replay", TEXT_OR_NULL, "the bundle's folder in `bisect_dump_dir`, on the node of rank 0"),
        **fields(
            "without_tokens",
            _or_null(_WITHOUT_TOKENS),
            "a diffuse micro-batch's gradient from no token: `rank`, `micro_batch`, `norm`, its `share`, `layer_norms`",
        ),
        **fields(
            "broken_parameters",
            _or_null(object_with({"count": INDEX, "of": INDEX, "names": list_of(TEXT)})),
            "if `global_norm` is not finite: parameters with such a gradient: `count`, `of` all, up to 16 `names` in "
            "backward order",
        ),
        **fields("verdict", _or_null(_VERDICT), "the cause: `cause`, `culprits`, `ordinary`, `sentence`, `check`"),
        **fields(
            "steps_since_resume", {"type": ["integer", "null"], "minimum": 1}, "steps since a checkpoint was loaded"
        ),
        **fields("budget_seconds", NUMBER_OR_NULL, "seconds allowed; `null`: no limit"),
        **fields("out_of_time", _YES_OR_NO, "whether they were used up"),
        **fields("suspected", list_of(_SUSPECTED), "if `recorded`: up to 16 tokens by `suspicion`, unmeasured"),
        **fields("replaces", TEXT, "if `replayed`: SHA-256 of the line that it replaces, without its end"),
        **fields("suspected_ranks", list_of(INDEX), "the ranks whose tokens these may be"),
    },
)

NOTE = _line(
    "What was left out of the file at this place",
    {
        **fields(
            "note",
            {"enum": ["text_limit", "rate_limit", "size_limit", "unwritable"]},
            "`text_limit`: the texts of the event above; `rate_limit`: this step's after the 16th; `size_limit`: all "
            "events from here on; `unwritable`: an event over 16 MiB",
        ),
        **fields("count", {"type": "integer", "minimum": 1}, "how many of these"),
        **fields("message", TEXT, "the note in a sentence"),
    },
)

_CLIPPED_TOKEN = object_with(
    {
        **{name: _PLACE[name] for name in ("rank", "micro_batch", "row")},
        **fields("position", {"type": "integer"}, "position in the response, from 0; negative in the prompt"),
        **fields("boundary", TEXT, "where it was first over its bound on the way back from the loss"),
        **fields("multiple", NUMBER, "its signal there over the usual largest one"),
        **fields("cut", _YES_OR_NO, "whether it was cut there"),
        **fields("token_id", INTEGER_OR_NULL, "its id"),
        **fields(
            "weight advantage log_prob old_log_prob rollout_log_prob",
            NUMBER_OR_NULL,
            "as of a culprit; `null` in the prompt",
        ),
    },
    **_SHORT_TEXTS,
)
# As CULPRIT_FIELDS, of a token in a clip line.
CLIPPED_TOKEN_FIELDS: tuple[str, ...] = tuple(_CLIPPED_TOKEN["required"])

_TOKEN_CLIP = object_with(
    {
        **fields("action", {"enum": ["log", "drop", "smooth"]}, "`token_clip.action`"),
        **fields("factor", _POSITIVE, "`token_clip.factor`"),
        **fields("over cut", _by_name(INDEX), "by boundary, number of signals over the bound; of those cut"),
        **fields(
            "refused", list_of(TEXT), "boundaries where some were not cut, because they were more than `max_share`"
        ),
        **fields("largest", _NUMBERS_BY_LAYER, "by boundary, the largest signal"),
        **fields("usual", _by_name(NUMBER_OR_NULL), "by boundary, the usual largest; `null` in the warm-up"),
        **fields("tokens", list_of(_CLIPPED_TOKEN), "at most 64 tokens, the largest multiple first"),
    }
)

CLIP = _line(
    "The tokens whose backward signals were over TokenClip's bounds",
    {
        **_MINI_BATCH,
        **fields("token_clip", _TOKEN_CLIP, "what TokenClip has found and cut"),
        **fields("summary", TEXT, "the line in one sentence"),
    },
)

_CRITIC_MICRO_BATCH = object_with({**_MICRO_BATCH, "error": NUMBER_OR_NULL})

_CRITIC_VALUE = object_with(
    {**_PLACE, **fields("value old_value return error weight", NUMBER)},
    **_SHORT_TEXTS,
)

CRITIC = _line(
    "A spike of the critic's gradient: a line of critic.jsonl",
    {
        **_VERSION,
        **_MINI_BATCH,
        **fields("world_size", INDEX, "W, the data-parallel ranks"),
        **fields("threshold", _POSITIVE, "τ for one value"),
        **fields("token_norm", NUMBER, "the largest norm/√Σw² of a micro-batch"),
        **fields("global_norm", NUMBER, "norm of the reduced gradient"),
        **fields("ordinary_token_norm", NUMBER_OR_NULL, "`token_norm` of the last mini-batch without a spike"),
        **fields("error ordinary_error", NUMBER_OR_NULL, "root mean square of v − R, now; in that mini-batch"),
        **fields("layer_norms", _NUMBERS_BY_LAYER, "`global_norm` by layer"),
        **fields("ordinary_layer_norms", _or_null(_NUMBERS_BY_LAYER), "the same in that mini-batch, over √Σw²"),
        **fields("micro_batches", list_of(_CRITIC_MICRO_BATCH), "at most 8 over their thresholds, with their `error`"),
        **fields(
            "values",
            list_of(_CRITIC_VALUE),
            "the four largest errors: `value` v, `old_value` before the update, `return` R, `error` v − R, `weight`; "
            "place and texts as of a culprit",
        ),
        **fields(
            "cause",
            {"enum": ["errors", "network", None]},
            "`errors`: at least twice the usual, and grown at least a third as much as the norm; else `network`; "
            "`null`: the usual is not known",
        ),
        **fields("summary", TEXT, "the line in a few sentences"),
    },
)

STEP = _line(
    "The figures of one step: a line of steps.jsonl",
    {
        **fields("threshold", NUMBER_OR_NULL, "τ in the mini-batch with the largest norm; `null` in the warm-up"),
        **fields(
            "token_norm_max",
            NUMBER_OR_NULL,
            "largest norm/√Σw² of all micro-batches (of the reduced gradient with `spike_trigger=global`)",
        ),
        **fields("spike_margin", NUMBER_OR_NULL, "largest token-equivalent norm/τ: 1 is the threshold"),
        **fields("ratio_max", NUMBER_OR_NULL, "largest importance ratio to the old policy"),
        **fields(
            "rollout_ratio_max",
            NUMBER_OR_NULL,
            "largest ratio between a token's probabilities in training and in the rollout, either way round",
        ),
        **fields("unlikely_share", NUMBER_OR_NULL, f"share of tokens with a probability under {UNLIKELY:g}"),
        **fields("triggered", NUMBER_OR_NULL, "number of events"),
    },
    # Older lines lack these: what is wrong with the run without any spike.
    {
        **fields(
            "warnings",
            list_of(object_with(fields("name sentence check", TEXT), share=NUMBER_OR_NULL)),
            "causes of a whole run: `name`, `sentence`, `check`, `share` of the responses",
        ),
        **fields("misplaced_share", NUMBER_OR_NULL, "share of responses whose log-probs belong to other tokens"),
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
    options = schema.get("anyOf")
    if type(value) is float and (options is NUMBER["anyOf"] or options is NUMBER_OR_NULL["anyOf"]):
        return True
    if options is not None:
        return any(conforms(value, option) for option in options)
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
