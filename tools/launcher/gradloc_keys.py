# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc's keys among the user's Hydra overrides: a wrong one is refused before a minute of start-up."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from .errors import Refused
from .hydra import by_key
from .settings import ACTOR
from .values import COUNT, POSITIVE, Allowed, Text, check

_NULL = ("null", "None", "~")
_BOOLEAN = ("True", "False", "true", "false")
_SIZE = ("0", COUNT)

# The keys below actor_rollout_ref.actor, and what they take. What GradLoc itself checks: gradloc/config.py and
# gradloc/adapters/actor_config.py.
KEYS: dict[str, Allowed] = {
    "spike_detection": _BOOLEAN,
    "grad_norm_threshold": (POSITIVE, "auto"),
    "bisect_budget_steps": (COUNT,),
    "bisect_budget_seconds": (POSITIVE, "auto", *_NULL),
    "spike_trigger": ("unit", "global"),
    "bisect_until": ("explained", "exhaustive"),
    "spike_search": ("training", "replay"),
    "spike_action": ("log", "skip", "drop", "stop"),
    "spike_stop_after": (COUNT,),
    "spike_drill_step": (COUNT, *_NULL),
    "bisect_dump_dir": Text.DIRECTORY,
    "spike_log": ("texts", *_BOOLEAN, *_NULL),
    "spike_replay": _SIZE,
}
PARTS = {
    "layer_clip": frozenset("enable rule target z ratio beta warmup_steps min_bound max_norm log_layers".split()),
    "token_clip": frozenset("enable action factor beta warmup_steps max_share".split()),
}
# Those that the critic has, too, below `critic`.
OF_CRITIC = ("spike_detection", "grad_norm_threshold", "bisect_dump_dir")
# Below this, two names are two names.
_SIMILAR = 0.8


def check_overrides(overrides: Iterable[str], asked: Mapping[str, str]) -> str | None:
    """Checks the user's overrides, and returns a warning about those that have no effect, if there are some.

    Args:
        overrides: The user's Hydra overrides.
        asked: The settings that the user gives.

    Raises:
        Refused: A key is misspelled, or may not have its value.
    """
    given = by_key(overrides)
    for key, text in given.items():
        if key.startswith(f"{ACTOR}."):
            _check(key.removeprefix(f"{ACTOR}."), text.strip("'\""))
        elif key.removeprefix("critic.") in OF_CRITIC and "${" not in text:
            check(key, text.strip("'\""), KEYS[key.removeprefix("critic.")])
    off = given.get(f"{ACTOR}.spike_detection", "").lower() == "false"
    action = given.get(f"{ACTOR}.spike_action", asked.get("SPIKE_ACTION", "log")).strip("'\"")
    if off and action != "log" and "${" not in action:
        raise Refused(f"spike_action={action} needs {ACTOR}.spike_detection=True: set that, or spike_action=log")
    idle = [key for key in given if key.removeprefix(f"{ACTOR}.") in KEYS and not key.endswith(".spike_detection")]
    idle += [name for name in ("GRAD_NORM_THRESHOLD", "SPIKE_ACTION") if name in asked]
    if not off or not idle:
        return None
    return f"without spike_detection=True, {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect"


def _check(key: str, value: str) -> None:
    """Refuses a key below the actor's that is nearly one of GradLoc's, or a value that GradLoc does not take."""
    first, _, rest = key.partition(".")
    if key in KEYS:
        if "${" not in value:
            check(f"{ACTOR}.{key}", value, KEYS[key])
        return
    if first in PARTS:
        if not rest and not value.startswith(("{", "${")):
            raise Refused(f"{ACTOR}.{key} is a group of keys, not a value: give {ACTOR}.{key}.enable=True or False")
        if rest and rest not in PARTS[first]:
            raise Refused(f"{ACTOR}.{key} is no key: {first} has {', '.join(sorted(PARTS[first]))}")
        return
    near = get_close_matches(first, [*KEYS, *PARTS], 1, _SIMILAR)
    if near:
        raise Refused(f"{ACTOR}.{key} is no key: did you mean {ACTOR}.{near[0]}?")
