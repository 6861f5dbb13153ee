# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The values of the settings in a run: arguments, environment and defaults."""

import os
from collections.abc import Mapping
from pathlib import Path

from . import drill as drills
from . import faults, old_names
from .errors import Refused
from .settings import BY_NAME, CLIPS, OFF, SETTINGS, Setting
from .values import Text, check


def run_name(values: Mapping[str, str]) -> str:
    """The name of a run: one with another model, or other clips, must not resume from its checkpoints."""
    name = (os.path.basename(values["MODEL_PATH"].rstrip("/")) or "/").lower() + "-grpo"
    clips = {clip: values[clip] for clip in CLIPS}
    if all(value == OFF for value in clips.values()):
        return name
    if all(BY_NAME[clip].remedy == value for clip, value in clips.items()):
        return f"{name}-remedy"
    return f"{name}-clip-{'-'.join(clips.values())}"


def resolve(
    given: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    profile: str,
    tiny: bool,
    remedy: bool,
    prepared: Path,
    now: str,
    drill: bool = False,
    fault: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The value of every setting, checked; directories are absolute.

    An argument wins over the environment, and that over the default. An empty variable of the environment counts as
    none. Raises Refused for the first setting that is unknown or may not have its value. `overrides` are the user's
    Hydra overrides by their keys.
    """
    old_names.refuse(given, environment)
    for name in given:
        if name not in BY_NAME:
            raise Refused(f"unknown setting {name}: see --help for the settings")
    asked = {name: text for name in BY_NAME if (text := given.get(name) or environment.get(name))}
    defaults = {setting.name: setting.default(profile, tiny, remedy) for setting in SETTINGS}
    if fault is not None:
        defaults |= faults.find(fault).settings
    places = {"prepared": str(prepared), "now": now, "nodes": environment.get("SLURM_JOB_NUM_NODES") or "1"}

    def value(setting: Setting, **more: str) -> str:
        return asked.get(setting.name) or defaults[setting.name].format(**places, **more)

    run = run_name({name: value(BY_NAME[name]) for name in ("MODEL_PATH", *CLIPS)})
    values = {setting.name: value(setting, run=run) for setting in SETTINGS}
    for setting in SETTINGS:
        check(setting.name, values[setting.name], setting.allowed)
    step = drills.step(values, asked.get("SPIKE_DRILL_STEP"), drill, fault, overrides or {})
    return values | {"SPIKE_DRILL_STEP": step} | _directories(values)


def _directories(values: Mapping[str, str]) -> dict[str, str]:
    """The directories as absolute paths; that of the evidence may be given as one in OUTPUT_DIR."""
    output, dump = values["OUTPUT_DIR"], values["BISECT_DUMP_DIR"]
    if dump.startswith("OUTPUT_DIR/"):
        dump = f"{output}/{dump.removeprefix('OUTPUT_DIR/')}"
    directories = {"OUTPUT_DIR": os.path.realpath(output), "BISECT_DUMP_DIR": os.path.realpath(dump)}
    for name, directory in directories.items():
        check(name, directory, Text.DIRECTORY)
    return directories
