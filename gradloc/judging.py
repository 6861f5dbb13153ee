# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the judge what is wrong with a spike, or with the run; an error in it costs the answer alone."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints, is_typeddict

from . import judge
from .facts import Place, TrainedRow
from .guarded import ForeseenError, PatientThread, guarded
from .lines import Answer, ClipLine, CriticSpike, Event, kind_of
from .version import __version__

# The other ranks wait while rank 0 asks. A judge that has been late may still be at its work, so that no other follows.
_thread = PatientThread("the judge, which is not asked again (gradloc report judges spikes later, but not the run),")
# By kind of line, its type, and the fields that the judge gives it.
_JUDGED: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "spike": (Event, ("identities", "warnings", "verdict", "summary")),
    "clip": (ClipLine, ("summary",)),
    "critic": (CriticSpike, ("cause", "summary")),
}


def asked(
    question: Callable[[], Any],
    otherwise: Any = None,
    form: Any = Any,
    undone: str = "the judge of spikes and of the run gives no answer",
) -> Any:
    """What a question to the judge gives; something else if it is not in time, or was not before, or after an error.

    Args:
        form (type, optional): What the answer must be in JSON, of the types in gradloc/lines.py.
        undone (str): What an error leaves undone, a sentence.
    """
    if not _thread.was_late:
        with guarded(undone):
            return _thread.run(lambda: in_form(question(), form))
    return otherwise


def in_form(answer: Any, form: Any) -> Any:
    """A plain copy of what the judge says, or has kept.

    Raises:
        ForeseenError: It is not of the form, one of the types in gradloc/lines.py.
    """
    if form is Any:
        return answer
    plain = json.loads(json.dumps(answer))
    if not _fits(plain, form):
        raise ForeseenError(f"it has another form than release {__version__} reads: {str(plain)[:200]}")
    return plain


def _fits(value: Any, form: Any) -> bool:
    """Whether a JSON value has a type; fields that a type does not name are allowed, as in `gradloc.tools.schema`."""
    origin, inner = get_origin(form), get_args(form)
    if is_typeddict(form):
        if not isinstance(value, dict) or not form.__required_keys__ <= value.keys():
            return False
        of = get_type_hints(form, include_extras=True)
        return all(_fits(value[name], of[name]) for name in value.keys() & of.keys())
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if origin is Annotated and isinstance(inner[1], str):
        return _fits(value, inner[0])
    if origin is Annotated:
        keyword, limit = inner[1]
        return _fits(value, inner[0]) and (value in limit if keyword == "enum" else value > limit)
    if inner:  # a type or None
        return any(_fits(value, each) for each in inner)
    return type(value) in ((int, float) if form is float else (form,))


def judged(
    line: Mapping[str, Any], answer: Answer | None = None, rows: Mapping[Place, TrainedRow] | None = None
) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; after an error in the judge, with empty ones.

    Args:
        line (Mapping): An event, a clip line or a critic's spike.
        answer (dict, optional): What the judge says of its update.
        rows (Mapping, optional): All rows of an event's mini-batch.
    """
    kind = kind_of(line)
    of_kind = {"spike": {"verdict": None}, "critic": {"cause": None}}.get(kind, {})
    unjudged = {**line, **of_kind, "summary": ""}
    of_line, names = _JUDGED[kind]

    def question() -> dict[str, Any]:
        found = judge.judged(line, rows, answer)
        forms = get_type_hints(of_line, include_extras=True)
        return unjudged | {name: in_form(found[name], forms[name]) for name in names}

    return asked(question, unjudged)


def in_one_line(line: Mapping[str, Any]) -> str:
    """The verdict with its check, then the summary, for logs and trackers; where nothing is judged, the facts.

    Args:
        line (Mapping): An event, a clip line or a critic's spike.
    """
    verdict = line.get("verdict") or {}
    parts = (verdict.get("sentence"), verdict.get("check"), line.get("summary"))
    text = " ".join(str(part) for part in parts if part)
    if text or kind_of(line) != "spike":
        return text or "it is not judged."
    tokens = line["culprits"] or line.get("suspected", ())
    places = [f"{each['rank']}, {each['row']}, {each['position']} ({each.get('source')})" for each in tokens[:3]]
    return (
        f"diagnosis {line.get('diagnosis')}; {len(tokens)} tokens (rank, row, position, source): {'; '.join(places)}."
    )
