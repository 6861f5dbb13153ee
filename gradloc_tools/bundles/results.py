# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the results of replays, which lie beside their bundles."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradloc.bundles import limits

from ..foreign_json import parse
from ..schema import (
    INDEX,
    INTEGER_OR_NULL,
    NUMBER,
    NUMBER_OR_NULL,
    TEXT,
    TEXT_OR_NULL,
    conforms,
    fields,
    list_of,
    object_with,
)
from .plain_file import read_plain_file

RESULT_KIND = "gradloc replay result"
# What a replay writes beside the bundle of this name.
RESULT_SUFFIX = ".result.json"

_FILES = 64
# Of all of them together.
_BYTES = 16 * 2**20

_TEMPERATURE = object_with({"fits": NUMBER, "training": NUMBER, "gap": NUMBER, "left": NUMBER})
_FACTOR = {"anyOf": [object_with({"factor": NUMBER, "spread": NUMBER, "could_be": list_of(TEXT)}), {"type": "null"}]}

_SWITCH = object_with({"name": TEXT, "norm": NUMBER, "log_probs": NUMBER_OR_NULL, "culprit": NUMBER_OR_NULL})

_REPLAYED = {"replayed": NUMBER, "others": list_of(NUMBER)}

_UNIT = object_with(
    {
        **fields("rank micro_batch rows", INDEX),
        **_REPLAYED,
        "norm": NUMBER_OR_NULL,
        "threshold": NUMBER,
        "rest": NUMBER_OR_NULL,
    }
)
_TOKEN = object_with(
    {
        **fields("rank micro_batch row position token_id", INDEX),
        **_REPLAYED,
        "culprit": {"type": "boolean"},
        **fields("source layer", TEXT_OR_NULL),
        **fields("log_prob replayed_log_prob", NUMBER),
        **fields("grad_norm layer_norm replayed_layer_norm", NUMBER_OR_NULL),
    }
)
_REMEDY = object_with(
    {
        **fields("name meaning", TEXT),
        "norm": NUMBER,
        **fields("left ordinary_moved", NUMBER_OR_NULL),
        **fields("override note", TEXT_OR_NULL),
        "under": {"type": "boolean"},
        "masked": object_with({"tokens": INDEX, "culprits": INDEX}),
    }
)
_SCALE = object_with({"gradient": _FACTOR, "reduced": _FACTOR, "loss": _FACTOR})

RESULT = object_with(
    {
        "format": {"const": limits.FORMAT},
        "kind": {"const": RESULT_KIND},
        **fields("time bundle model device variant recorded", TEXT),
        "global_step": INTEGER_OR_NULL,
        **fields("epoch mini_batch", INDEX),
        **fields("variants notes sentences", list_of(TEXT)),
        "log_probs": object_with({"tokens": INDEX, "nonfinite": INDEX, "mean": NUMBER_OR_NULL, "max": NUMBER_OR_NULL}),
        "units": list_of(_UNIT),
        "tokens": list_of(_TOKEN),
        "layers": list_of(object_with({"layer": TEXT, "norm": NUMBER_OR_NULL, **_REPLAYED})),
        "remedies": list_of(_REMEDY),
    },
    remedy_notes=list_of(TEXT),
    cause=TEXT_OR_NULL,
    same_weights={"type": "boolean"},
    temperature={"anyOf": [_TEMPERATURE, {"type": "null"}]},
    switches=list_of(_SWITCH),
    scale={"anyOf": [_SCALE, {"type": "null"}]},
)
# Overrides are to be copied into a shell: nothing but keys and plain values.
_OVERRIDES = re.compile(r"[a-z_.]+=[\w.-]+( [a-z_.]+=[\w.-]+)*", re.ASCII)


def read_results(directory: str) -> list[dict[str, Any]]:
    """The results beside the bundles of some evidence, in the order of their events; what is no result is left out.

    They may come from a stranger, so at most 64 files are read, 16 MiB together.
    """
    paths = sorted((Path(directory) / limits.FOLDER).glob(f"[!.]*{RESULT_SUFFIX}"))[:_FILES]
    found, left = [], _BYTES
    for path in paths:
        try:
            data = read_plain_file(path, left)
            left -= len(data)
            result = parse(data)
        except (OSError, ValueError):
            continue  # being written, or no result
        if isinstance(result, dict) and conforms(result, RESULT) and _has_safe_overrides(result):
            found.append(result)
    return sorted(found, key=lambda result: (result["global_step"] or 0, result["epoch"], result["mini_batch"]))


def _has_safe_overrides(result: Mapping[str, Any]) -> bool:
    overrides = (row["override"] for row in result["remedies"])
    return all(override is None or _OVERRIDES.fullmatch(override) is not None for override in overrides)
