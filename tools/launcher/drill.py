# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""In which step of a run the drill is."""

from collections.abc import Mapping

from .errors import Refused
from .settings import ACTOR

DEFAULT_STEP = 2
_DETECTION = f"{ACTOR}.spike_detection"
_DEPENDS_ON = frozenset({_DETECTION, f"{ACTOR}.spike_drill_step", "trainer.total_training_steps"})


def step(
    values: Mapping[str, str], asked: str | None, drill: bool, fault: str | None, overrides: Mapping[str, str]
) -> str:
    """The step of the drill, checked against what it depends on; `null` for none.

    By default there is none with a fault (a drill is about a run without faults), and where Hydra overrides decide
    whether GradLoc is on, or how many steps the run has.

    Args:
        values: The settings.
        asked: The value of SPIKE_DRILL_STEP that the user gives, if any.
        drill: Whether --drill is given.
        fault: The fault of the run.
        overrides: The user's Hydra overrides by their keys.
    """
    if drill and asked == "null":
        raise Refused("SPIKE_DRILL_STEP=null (no drill) contradicts --drill: leave one of them out")
    steps = int(values["TOTAL_STEPS"]) if values["TOTAL_STEPS"] != "null" else None
    explicit = asked not in (None, "null")
    if overrides.get(_DETECTION, "").lower() == "false" and (explicit or drill):
        named = f"SPIKE_DRILL_STEP is {asked}" if explicit else "--drill is given"
        raise Refused(f"{named}, and a drill needs GradLoc, but spike_detection is False: leave one of them out")
    if explicit:
        if steps is not None and int(values["SPIKE_DRILL_STEP"]) > steps:
            raise Refused(
                f"SPIKE_DRILL_STEP is {asked}, and the run ends with step {steps}: give a step from 1 to {steps}"
            )
        return values["SPIKE_DRILL_STEP"]
    unknown = steps is None or not _DEPENDS_ON.isdisjoint(overrides)
    if not drill and (unknown or fault is not None or values["SPIKE_DRILL_STEP"] == "null"):
        return "null"
    return str(min(DEFAULT_STEP, steps or DEFAULT_STEP))
