# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""--help, and the table of settings in docs/launching.md. Both come from the settings.

PYTHONPATH=tools python -m launcher.usage   # rewrites the table in docs/launching.md
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .faults import FAULTS
from .settings import SETTINGS, Setting
from .targets import default_version

USAGE = """\
Usage: bash run_experiment.sh [options] [NAME=value ...] [Hydra overrides ...]

  --cluster        GRPO with FSDP and vLLM (default if nvidia-smi finds a GPU)
  --embedded       SmolLM2-135M on CPU, installed under .embedded/ (default without a GPU)
  --tiny           with --embedded: a random model of two layers, seconds per step
  --remedy         turn on TIS, SEQUENCE_MASK, TOKEN_CLIP_ACTION and LAYER_CLIP; NAME=off turns one off
  --drill          in step 2, plant a spike in a copy of a mini-batch and find it (default with --embedded)
  --fault NAME     with --embedded: plant a fault on purpose, to see what it looks like:
FAULTS  --target VERSION the verl to launch (default: the one that PYTHON has; with --embedded: DEFAULT)
  --python PYTHON  the Python with the patched verl (default: python3; with --embedded: one made for it)
  --plugin         GradLoc as a plugin of a verl 0.9.1 that is not patched (docs/plugin.md)
  --dry-run        print the command and stop
  --help           print this
  --               pass everything after it to verl unchanged

Hydra overrides (key=value, +key=value, ~key) come last in the command, so they win; --dry-run shows what
the command sets already.
Give settings as arguments NAME=value or as environment variables:

"""
_ROW = "  {:<24} {:<22} {:<24} {}\n"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "launching.md"
MARKED = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def help_text(remedy: bool, environment: Mapping[str, str]) -> str:
    """What --help prints; with --remedy the defaults are those with --remedy."""
    nodes = environment.get("SLURM_JOB_NUM_NODES") or "1"
    run = "MODEL-grpo" + ("-remedy" if remedy else "")
    faults = "".join(f"                     {name}: {fault.meaning}\n" for name, fault in FAULTS.items())
    usage = USAGE.replace("FAULTS", faults).replace("DEFAULT", default_version(PAGE.parents[1]))
    text = usage + _ROW.format("NAME", "CLUSTER DEFAULT", "EMBEDDED DEFAULT", "MEANING")
    for setting in SETTINGS:
        defaults = (
            _shown(setting, profile, remedy, nodes=nodes, run=run, now="TIME") for profile in ("cluster", "embedded")
        )
        text += _ROW.format(setting.name, *defaults, _meaning(setting))
    return text


def _shown(setting: Setting, profile: str, remedy: bool = False, **places: str) -> str:
    default = setting.default(profile, remedy=remedy)
    return "(prepared)" if default.startswith("{prepared}") else default.format(**places)


def _meaning(setting: Setting) -> str:
    return setting.meaning + (f" (with --remedy: {setting.remedy})" if setting.remedy else "")


def markdown() -> str:
    """The settings as a table for the documentation. What each means, --help says."""
    rows = ["| setting | cluster | embedded | verl's key |", "|---|---|---|---|"]
    for setting in SETTINGS:
        cells = [
            _code(_shown(setting, profile, nodes="1", run="MODEL-grpo", now="TIME"))
            for profile in ("cluster", "embedded")
        ]
        if setting.tiny:
            cells[1] += f" (`--tiny`: {_code(setting.tiny)})"
        if setting.remedy:
            cells = [f"{cell} (`--remedy`: {_code(setting.remedy)})" for cell in cells]
        rows.append(f"| {_code(setting.name)} | {' | '.join(cells)} | {_code(setting.key)} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    return text if text == "(prepared)" else f"`{text}`"


def main() -> None:
    PAGE.write_text(MARKED.sub(lambda _: markdown(), PAGE.read_text()))
    print(f"wrote the settings in {os.path.relpath(PAGE)}")


if __name__ == "__main__":
    main()
