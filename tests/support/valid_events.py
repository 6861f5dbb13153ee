"""The events of an actor, which have to be what the evidence's schema says, whatever the test is about."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from gradloc.evidence.writer import jsonable
from gradloc_tools.schema import EVENT, conforms

VALIDATOR = Draft202012Validator(EVENT)


def valid_events(text: str) -> list[dict[str, Any]]:
    """Reads a list of events from JSON, in which NaN and infinities may be literals, and validates them."""
    events = json.loads(text)
    for event in map(jsonable, events):
        VALIDATOR.validate(event)
        assert conforms(event, EVENT)
    return events
