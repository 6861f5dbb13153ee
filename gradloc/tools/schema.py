# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what may come from a stranger: ordinary files up to a size, JSON within limits of its size in memory and of its
depth, and values that conform to JSON Schemas.

The schemas of lines are made of the types in gradloc/lines.py, which say what each field means.
"""

import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints, is_typeddict

from .. import lines
from ..evidence.writer import DEPTH
from ..judge.rules import SOURCES

Form = dict[str, Any]

# JSON has no NaN and no infinities, so they are strings.
NUMBER: Form = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
NUMBER_OR_NULL: Form = {"anyOf": [*NUMBER["anyOf"], {"type": "null"}]}
INDEX: Form = {"type": "integer", "minimum": 0}
INTEGER_OR_NULL: Form = {"type": ["integer", "null"]}
TEXT: Form = {"type": "string"}
TEXT_OR_NULL: Form = {"type": ["string", "null"]}
YES_OR_NO: Form = {"type": "boolean"}


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


@cache
def _fields_of(kind: Any) -> dict[str, Any]:
    """The types of a line's fields, or of those of a part of it."""
    return get_type_hints(kind, include_extras=True)


def form_of(kind: Any) -> Form:
    """The form of the JSON values of a type: that of a field of `gradloc.lines`."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind == lines.Source:
        return {"enum": [*SOURCES]}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        keyword, limit = inner[1]
        base = {"type": {int: "integer", float: "number"}[inner[0]]} if keyword != "enum" else {}
        return {**base, keyword: [*limit] if keyword == "enum" else limit}
    if origin is list:
        return list_of(form_of(inner[0]))
    if origin is dict:
        return by_name(form_of(inner[1]))
    if origin is not None:  # a type or None
        (of,) = (each for each in inner if each is not type(None))
        return or_null(form_of(of))
    forms = {name: form_of(of) for name, of in _fields_of(kind).items()}
    required = {name: form for name, form in forms.items() if name in kind.__required_keys__}
    return object_with(required, {name: form for name, form in forms.items() if name not in required})


_PLAIN = {
    int: {"type": "integer"},
    float: NUMBER,
    float | None: NUMBER_OR_NULL,
    str: TEXT,
    str | None: TEXT_OR_NULL,
    bool: YES_OR_NO,
    Any: {},
}


def with_numbers(value: Any, kind: Any) -> Any:
    """A value of this type as it was before it was written: with its NaN and infinities as numbers."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float:
        return float(value)
    if origin is Annotated:
        return with_numbers(value, inner[0])
    if origin is list:
        return [with_numbers(each, inner[0]) for each in value]
    if origin is dict:
        return {name: with_numbers(each, inner[1]) for name, each in value.items()}
    if origin is not None and value is not None:
        return with_numbers(value, next(each for each in inner if each is not type(None)))
    if is_typeddict(kind):
        kinds = _fields_of(kind)
        return {name: with_numbers(each, kinds.get(name, Any)) for name, each in value.items()}
    return value


def _schema_of(kind: Any) -> Form:
    """The schema of a line of a file."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": kind.__doc__.split(".")[0], **form_of(kind)}


EVENT, CLIP, CRITIC, STEP, NOTE = map(
    _schema_of, (lines.Event, lines.ClipLine, lines.CriticSpike, lines.Step, lines.Note)
)

# The fields of a culprit, and of a token in a clip line, that the actor writes. None of them has a text of a sample.
CULPRIT_FIELDS, CLIPPED_TOKEN_FIELDS = (
    tuple(name for name in _fields_of(kind) if name not in _fields_of(lines.Texts))
    for kind in (lines.Culprit, lines.ClippedToken)
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
