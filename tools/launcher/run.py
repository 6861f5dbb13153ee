# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is about to start: what was asked for, with everything that follows from it."""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from . import command, gradloc_keys, renamed_keys, targets
from .errors import Refused
from .hydra import by_key
from .options import Options
from .resolve import resolve
from .set_up import check_embedded
from .settings import ACTOR, WITHOUT_DURATION

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".embedded"
DUMP_KEY = f"{ACTOR}.bisect_dump_dir"


@dataclass(frozen=True)
class Run:
    """A run that is about to start.

    Args:
        asked: The command line.
        profile: `cluster` or `embedded`.
        target: The version of verl.
        values: The settings.
        overrides: The user's Hydra overrides, with the names of this verl.
        prepared: Where the set-up of the embedded profile writes model and data.
        ray_directory: Ray's files, in the embedded profile.
    """

    asked: Options
    profile: str
    target: str
    values: dict[str, str]
    overrides: list[str]
    prepared: Path
    ray_directory: str

    @property
    def interpreter(self) -> str:
        if self.asked.python is not None:
            return self.asked.python
        return "python3" if self.profile == "cluster" else str(self.venv / "bin/python")

    @property
    def state(self) -> Path:
        """What the set-up of the embedded profile writes for this verl."""
        return _state(self.asked, self.target)

    @property
    def venv(self) -> Path:
        """The embedded profile's own virtual environment."""
        return self.state / "venv"

    @property
    def command(self) -> list[str]:
        overrides = command.overrides(
            self.profile,
            self.values,
            self.ray_directory,
            ROOT,
            self.target,
            tiny=self.asked.tiny,
            fault=self.asked.fault,
            plugin=self.asked.plugin,
            given=self.overrides,
        )
        return [self.interpreter, "-m", "verl.trainer.main_ppo", *overrides]

    @property
    def output(self) -> Path:
        return Path(self.values["OUTPUT_DIR"])

    @property
    def evidence(self) -> Path:
        return Path(self.values["BISECT_DUMP_DIR"])

    @property
    def usual(self) -> bool:
        """Whether the run is the embedded profile's default, whose seconds are known."""
        if self.asked.tiny or self.asked.fault or self.overrides or self.target != targets.default_version(ROOT):
            return False
        usual = resolve({}, {}, profile="embedded", tiny=False, remedy=False, prepared=self.prepared, now="any")
        return all(self.values[name] == usual[name] for name in usual.keys() - WITHOUT_DURATION)

    @property
    def added(self) -> dict[str, str]:
        """Variables on top of the environment."""
        return command.added_environment(self.profile, self.values, os.environ, ROOT, self.asked.fault)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | self.added


def plan(asked: Options, profile: str) -> Run:
    """Everything about the run; raises Refused for what cannot be run."""
    target = _choose_target(asked, profile)
    prepared = _state(asked, target) / ("tiny" if asked.tiny else "smollm2")
    overrides = [renamed_keys.translated(override, target) for override in asked.overrides]
    for override, used in zip(asked.overrides, overrides, strict=True):
        if override != used:
            print(f"run_experiment.sh: for verl {target}, {override} is {used}", file=sys.stderr)
        elif renamed_keys.is_gone(override, target):
            raise Refused(f"verl {target} has no {override.partition('=')[0]}: see docs/migrating.md, or leave it out")
    given = by_key(asked.overrides)
    if directory := given.get(DUMP_KEY):
        raise Refused(f"bisect_dump_dir is the setting BISECT_DUMP_DIR here: give BISECT_DUMP_DIR={directory}")
    if warning := gradloc_keys.check_overrides(asked.overrides, asked.settings):
        print(f"run_experiment.sh: {warning}", file=sys.stderr)
    values = resolve(
        asked.settings,
        os.environ,
        profile=profile,
        tiny=asked.tiny,
        remedy=asked.remedy,
        prepared=prepared,
        drill=asked.drill,
        fault=asked.fault,
        overrides=given,
        now=time.strftime("%Y%m%d-%H%M%S"),
    )
    # Unix sockets lie in Ray's directory, and their names may have no more than 107 characters: keep it short.
    return Run(asked, profile, target, values, overrides, prepared, ray_directory=f"/tmp/gradloc-{os.getpid()}")


def _state(asked: Options, target: str) -> Path:
    return STATE / (f"{target}-plugin" if asked.plugin else target)


def _choose_target(asked: Options, profile: str) -> str:
    """The version of verl that is asked for, or that training's Python has, or the default one."""
    if asked.target is not None:
        targets.check(asked.target, ROOT)
    if asked.python is not None and shutil.which(asked.python) is None:
        raise Refused(f"there is no Python at {asked.python}: give another with --python")
    python = asked.python or ("python3" if profile == "cluster" else None)
    target = targets.choose(asked.target, python, ROOT, os.environ)
    if asked.plugin and targets.number(target) < targets.number("0.9.1"):
        raise Refused(f"--plugin needs verl 0.9.1 and this is for {target}: give --target 0.9.1, or leave --plugin out")
    if profile == "embedded" and python is None:
        check_embedded(target, ROOT)
    return target
