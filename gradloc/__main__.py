# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Says what is wrong with an update, and which tokens a spike of the gradient norm comes from.

    gradloc report DIR                          what the spikes of a run come from
    gradloc report DIR --html report.html       the same as a page that opens offline
    gradloc report DIR_A DIR_B                  two runs side by side
    gradloc check PATH...                       which identities hold in records, batches or evidence
    gradloc replay BUNDLE --remedies            what each remedy would have left of a spike
    gradloc replay BUNDLE --search              find the tokens of a spike that was only recorded
    gradloc convert FILE... --out DIR           make a bundle of another trainer's records
    gradloc selftest --model MODEL              does it work on this machine, and what does it cost?
    gradloc patch --installed                   patch the verl that this Python imports
    gradloc COMMAND --help                      a command's options
    gradloc --version

DIR is a run's bisect_dump_dir, BUNDLE a folder in DIR/replay.
"""

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .tools.command_line import end_with, in_a_sentence, need
from .version import __version__

# The modules that each command needs besides those installed with it.
_NEEDS: dict[str, tuple[str, ...]] = {
    "report": (),
    "check": (),
    "replay": ("torch", "safetensors", "transformers"),
    "convert": ("torch", "safetensors"),
    "selftest": ("torch", "transformers"),
    "patch": (),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `gradloc`; returns the exit code of the command named first, or 2 if it names none."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name == "--version":
        print(f"gradloc {__version__}")
        return 0
    if name not in _NEEDS:
        print(f"gradloc: there is no command {name!r}; it takes {', '.join(_NEEDS)}, or --help", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(rest) and not all(map(find_spec, _NEEDS[name])):
        source = Path(__file__).parent / name / "command.py"
        print(ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))))
        print("\nIts options are listed where what it needs is installed.")
    need(f"gradloc {name}", *_NEEDS[name])
    return int(module_of(name).main(rest))


def module_of(name: str) -> ModuleType:
    """The module of a command. `patch` is apply_patch.py, which is in the package only where a wheel made it."""
    package = Path(__file__).parent
    if name == "patch" and not (package / "patch").is_dir():
        if not (package.parent / "apply_patch.py").is_file():
            sys.exit(f"gradloc: {package} has no patches; run apply_patch.py in a checkout of GradLoc")
        return importlib.import_module("apply_patch")
    return importlib.import_module(f".{name}.command", __package__)


def run() -> NoReturn:
    """The console script: `main`, and the end of the process."""
    if "RANK" in os.environ or sys.argv[1:2] == ["selftest"]:
        end_with(main)
    code = 0
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader of the output, such as head, has seen enough
            print(f"gradloc: {in_a_sentence(error, 'standard output')}", file=sys.stderr)
            code = 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    run()
