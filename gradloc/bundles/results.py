# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the results of replays, which lie beside their bundles."""

import json
from pathlib import Path
from typing import Any

from ..evidence.schema import conforms
from . import layout

_FILES = 64
_FILE_BYTES = 8 * 2**20

_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_NUMBER_OR_NULL = {"anyOf": [*_NUMBER["anyOf"], {"type": "null"}]}
_INDEX = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


RESULT = _object(
    format={"const": layout.FORMAT},
    kind={"const": layout.RESULT_KIND},
    time=_TEXT,
    bundle=_TEXT,
    global_step={"type": ["integer", "null"]},
    epoch=_INDEX,
    mini_batch=_INDEX,
    model=_TEXT,
    device=_TEXT,
    variant=_TEXT,
    variants=_list(_TEXT),
    recorded=_TEXT,
    notes=_list(_TEXT),
    sentences=_list(_TEXT),
    log_probs=_object(tokens=_INDEX, nonfinite=_INDEX, mean=_NUMBER_OR_NULL, max=_NUMBER_OR_NULL),
    units=_list(
        _object(
            rank=_INDEX,
            micro_batch=_INDEX,
            rows=_INDEX,
            norm=_NUMBER_OR_NULL,
            threshold=_NUMBER,
            replayed=_NUMBER,
            others=_list(_NUMBER),
            rest=_NUMBER_OR_NULL,
        )
    ),
    tokens=_list(
        _object(
            rank=_INDEX,
            micro_batch=_INDEX,
            row=_INDEX,
            position=_INDEX,
            token_id=_INDEX,
            culprit={"type": "boolean"},
            source=_TEXT_OR_NULL,
            grad_norm=_NUMBER_OR_NULL,
            replayed=_NUMBER,
            others=_list(_NUMBER),
            log_prob=_NUMBER,
            replayed_log_prob=_NUMBER,
            layer=_TEXT_OR_NULL,
            layer_norm=_NUMBER_OR_NULL,
            replayed_layer_norm=_NUMBER_OR_NULL,
        )
    ),
    layers=_list(_object(layer=_TEXT, norm=_NUMBER_OR_NULL, replayed=_NUMBER, others=_list(_NUMBER))),
    remedies=_list(_object(name=_TEXT, norm=_NUMBER, meaning=_TEXT)),
)


def read_results(directory: str) -> list[dict[str, Any]]:
    """The results beside the bundles of some evidence, in the order of their events; what is no result is left out.

    Args:
        directory (str): The directory of the evidence.
    """
    paths = sorted((Path(directory) / layout.FOLDER).glob(f"*{layout.RESULT_SUFFIX}"))[:_FILES]
    found = [result for path in paths if (result := _result(path)) is not None]
    return sorted(found, key=lambda result: (result["global_step"] or 0, result["epoch"], result["mini_batch"]))


def _result(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _FILE_BYTES:
            return None
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # being written, or no result
    fits = isinstance(result, dict) and not path.name.startswith(".") and conforms(result, RESULT)
    return result if fits else None
