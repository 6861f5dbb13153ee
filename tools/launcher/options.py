# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: options, settings and Hydra overrides."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import faults
from .errors import Refused


@dataclass
class Options:
    """What the command line asks for.

    Args:
        profile: `cluster` or `embedded`; None until the machine decides.
        drill: Whether a spike is to be planted and found, as a test.
        fault: The fault to plant; None for none.
        target: The version of verl; None for that of the Python that trains, or the default one.
        python: The Python that trains, or None for the profile's own.
        plugin: Whether GradLoc is a plugin of a verl that is not patched.
        settings: The arguments NAME=value.
        overrides: What goes to verl as it is.
    """

    profile: str | None = None
    tiny: bool = False
    remedy: bool = False
    drill: bool = False
    fault: str | None = None
    target: str | None = None
    python: str | None = None
    plugin: bool = False
    dry_run: bool = False
    help: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line; raises Refused for what is no option, setting or override."""
    options = Options()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        match argument:
            case "--cluster" | "--embedded":
                if options.profile not in (None, argument[2:]):
                    raise Refused("--cluster and --embedded exclude each other: give one")
                options.profile = argument[2:]
            case "--tiny":
                options.tiny = True
            case "--remedy":
                options.remedy = True
            case "--drill":
                options.drill = True
            case "--fault":
                names = ", ".join(faults.FAULTS)
                options.fault = _next(rest, f"--fault needs the name of a fault after it: {names}")
                faults.find(options.fault)
            case "--target":
                options.target = _next(rest, "--target needs a version of verl after it")
            case "--python":
                options.python = _next(rest, "--python needs the path of a Python interpreter after it")
            case "--plugin":
                options.plugin = True
            case "--dry-run":
                options.dry_run = True
            case "--help" | "-h":
                options.help = True
            case "--":
                options.overrides += rest
                break
            case _:
                _add_value(options, argument)
    return options


def _next(rest: list[str], otherwise: str) -> str:
    """Takes the value of an option; raises Refused with the sentence if there is none."""
    if not rest or not rest[0] or rest[0].startswith("-"):
        raise Refused(otherwise)
    return rest.pop(0)


def _add_value(options: Options, argument: str) -> None:
    if argument.startswith("-"):
        raise Refused(
            f"unknown option {argument}: see --help for the options, or put -- before arguments meant for verl"
        )
    name, equals, value = argument.partition("=")
    if equals and re.fullmatch("[A-Z][A-Z0-9_]*", name):
        if not value:
            raise Refused(f"{name} is empty: give it a value, or leave it out")
        options.settings[name] = value
    elif equals or argument.startswith("~"):
        options.overrides.append(argument)
    else:
        raise Refused(
            f"'{argument}' is neither an option nor a Hydra override: "
            "write overrides as key=value, options as in --help"
        )


def choose_profile(options: Options) -> str:
    """The profile that is asked for, or the one that fits the machine."""
    profile = options.profile
    if profile is None:
        profile = "cluster" if not (options.tiny or options.fault) and _has_gpu() else "embedded"
    if options.tiny and profile != "embedded":
        raise Refused("--tiny belongs to --embedded: leave it out, or give --embedded")
    if options.fault and profile != "embedded":
        raise Refused("--fault belongs to --embedded: leave it out, or give --embedded")
    return profile


def _has_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    except OSError:
        return False
    return re.search(rb"^GPU [0-9]", listed, re.MULTILINE) is not None
