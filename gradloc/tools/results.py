# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the results of replays and searches, which lie beside their bundles."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..bundles import limits
from .schema import (
    EVENT,
    INDEX,
    INTEGER_OR_NULL,
    NUMBER,
    NUMBER_OR_NULL,
    TEXT,
    TEXT_OR_NULL,
    YES_OR_NO,
    Form,
    conforms,
    list_of,
    object_with,
    or_null,
    parse,
    read_plain_file,
)

RESULT_KIND = "gradloc replay result"
# The end of the name of a replay's file beside its bundle.
RESULT_SUFFIX = ".result.json"
# And a search.
EVENT_SUFFIX = ".event.json"

_FILES = 1024
# The limit of all of them together.
_BYTES = 64 * 2**20

_FACTOR = or_null(object_with({"factor": NUMBER, "could_be": list_of(TEXT)}))
_REPLAYED = {"replayed": NUMBER, "others": list_of(NUMBER)}
_UNIT = {"rank micro_batch rows": INDEX, "threshold": NUMBER, "norm rest": NUMBER_OR_NULL, **_REPLAYED}
_TOKEN = {
    "rank micro_batch row position token_id": INDEX,
    "culprit": YES_OR_NO,
    "source layer": TEXT_OR_NULL,
    "log_prob replayed_log_prob": NUMBER,
    "grad_norm layer_norm replayed_layer_norm": NUMBER_OR_NULL,
    **_REPLAYED,
}
_REMEDY = {
    "name meaning": TEXT,
    "norm": NUMBER,
    "left ordinary_moved": NUMBER_OR_NULL,
    "override note": TEXT_OR_NULL,
    "under": YES_OR_NO,
    "masked": object_with({"tokens culprits": INDEX}),
}

RESULT = object_with(
    {
        "format": {"enum": [limits.FORMAT]},
        "kind": {"enum": [RESULT_KIND]},
        "time bundle model device variant recorded": TEXT,
        "global_step": INTEGER_OR_NULL,
        "epoch mini_batch": INDEX,
        "variants notes sentences": list_of(TEXT),
        "log_probs": object_with({"tokens nonfinite": INDEX, "mean max": NUMBER_OR_NULL}),
        "units": list_of(object_with(_UNIT)),
        "tokens": list_of(object_with(_TOKEN)),
        "layers": list_of(object_with({"layer": TEXT, "norm": NUMBER_OR_NULL, **_REPLAYED})),
        "remedies": list_of(object_with(_REMEDY)),
    },
    {
        "remedy_notes": list_of(TEXT),
        "cause": TEXT_OR_NULL,
        "same_weights": YES_OR_NO,
        "temperature": or_null(object_with({"fits training gap left": NUMBER})),
        "switches": list_of(object_with({"name": TEXT, "norm": NUMBER, "log_probs culprit": NUMBER_OR_NULL})),
        "scale": or_null(object_with({"gradient reduced loss": _FACTOR})),
    },
)
# Overrides are to be copied into a shell: nothing but keys and plain values.
_OVERRIDES = re.compile(r"[a-z_.]+=[\w.-]+( [a-z_.]+=[\w.-]+)*", re.ASCII)


def read_results(directory: str) -> list[dict[str, Any]]:
    """The results beside the bundles of some evidence, in the order of their events; what is no result is left out.

    They may come from a stranger, so at most the 1024 newest files are read, 64 MiB together.
    """
    found = filter(_has_safe_overrides, _read(directory, RESULT_SUFFIX, RESULT))
    return sorted(found, key=lambda result: (result["global_step"] or 0, result["epoch"], result["mini_batch"]))


def read_events(directory: str) -> list[dict[str, Any]]:
    """The events of searches beside these bundles, the last one written at the end, within the same limits."""
    return _read(directory, EVENT_SUFFIX, EVENT)


def _read(directory: str, suffix: str, form: Form) -> list[dict[str, Any]]:
    files = []
    for path in (Path(directory) / limits.FOLDER).glob(f"[!.]*{suffix}"):
        with suppress(OSError):
            files.append((path.lstat().st_mtime_ns, path))
    left = _BYTES
    found: list[dict[str, Any]] = []
    for _, path in sorted(files, reverse=True)[:_FILES]:
        try:
            data = read_plain_file(path, left)
            left -= len(data)
            value = parse(data)
        except (OSError, ValueError):
            continue  # being written, or something else
        if isinstance(value, dict) and conforms(value, form):
            found.insert(0, value)
    return found


def _has_safe_overrides(result: Mapping[str, Any]) -> bool:
    overrides = (row["override"] for row in result["remedies"])
    return all(override is None or _OVERRIDES.fullmatch(override) is not None for override in overrides)
