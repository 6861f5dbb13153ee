"""The events of an actor, which have to be what the evidence's schema says, whatever the test is about."""

import json
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator

from gradloc.evidence.writer import jsonable
from gradloc.tools.schema import EVENT, NOTE, conforms

VALIDATOR = Draft202012Validator(EVENT)


def events_in(folder: Path) -> list[dict[str, Any]]:
    """Reads and validates those of a folder of evidence without other lines."""
    return valid_events(f"[{','.join((folder / 'spikes.jsonl').read_text().splitlines())}]")


def valid_events(text: str) -> list[dict[str, Any]]:
    """Reads a list of events from JSON, in which NaN and infinities may be literals, and validates them."""
    events = json.loads(text)
    for event in map(jsonable, events):
        VALIDATOR.validate(event)
        assert conforms(event, EVENT)
    return events


def lines_in(folder: Path, name: str = "spikes.jsonl") -> list[dict[str, Any]]:
    """The lines of a file, of whatever kind."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def notes_in(folder: Path, name: str = "spikes.jsonl") -> list[dict[str, Any]]:
    """The notes of what was left out of a file."""
    notes = [line for line in lines_in(folder, name) if "note" in line]
    for note in notes:
        jsonschema.validate(note, NOTE)
    return notes
