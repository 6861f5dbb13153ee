# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared by commands: types of arguments, packages that may be missing, and the end of one with a process group."""

import argparse
import importlib
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from .files import is_special

Value = TypeVar("Value", int, float, str)

# Packages that are installed with the command; the extra has the rest.
_OWN = ("rich",)
_STARTED = time.monotonic()


def parser(name: str, what: str) -> argparse.ArgumentParser:
    """The parser of a command; `what`, its module's docstring, is shown as it stands."""
    return argparse.ArgumentParser(
        prog=f"gradloc {name}", description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def need(what: str, *modules: str) -> None:
    """Ends a command with a sentence if a module that it needs cannot be imported.

    Args:
        what (str): The start of the sentence: what needs them.
        *modules (str): The modules, each of a package of this name.
    """
    missing = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(module.split(".")[0])
    if missing:
        extra = "" if set(missing) <= set(_OWN) else "[replay]"
        names = ", ".join(missing[:-1]) + " and " * (len(missing) > 1) + missing[-1]
        install = f"run pip install '.{extra}' in GradLoc's checkout"
        sys.exit(f"{what} needs {names}, not installed for {sys.executable}: {install}")


def say(text: str) -> None:
    """Says on rank 0's stderr what is computed now, after the minutes so far: on a CPU a replay may take an hour."""
    if int(os.environ.get("RANK", 0)) == 0:
        seconds = int(time.monotonic() - _STARTED)
        print(f"{seconds // 60}:{seconds % 60:02} min  {text}", file=sys.stderr)


def in_a_sentence(error: Exception, path: str) -> str:
    """Why a command has no result; `path` stands where an error of the system names no file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename2 or error.filename or path}"
    return str(error)


def in_shell(*words: str) -> str:
    """Words of a command that is printed, as a shell takes them: paths may have blanks and quotes."""
    return shlex.join(words)


def argument(kind: Callable[[str], Value], holds: Callable[[Value], bool], text: str) -> Callable[[str], Value]:
    """The `type` of a command's argument: a value for which `holds` is true; `text` says what it must be."""

    def convert(given: str) -> Value:
        value = kind(given)
        if not holds(value):
            raise argparse.ArgumentTypeError(text.format(value))
        return value

    convert.__name__ = kind.__name__  # argparse says it of what is no number
    return convert


POSITIVE = argument(float, lambda value: 0 < value < math.inf, "it must be positive and finite")
NOT_NEGATIVE = argument(float, lambda value: 0 <= value < math.inf, "it must be finite, and not negative")
AT_LEAST_ONE = argument(int, lambda value: value >= 1, "it must be at least 1")


def output_file(path: str) -> str:
    """The `type` of an argument that names a file to write: what cannot be written is refused before any work."""
    folder = os.path.dirname(os.path.realpath(path))
    problem = ""
    if not path or os.path.isdir(path):
        problem = f"{path!r} is not a file: name one."
    elif not (os.path.exists(path) or os.path.isdir(folder)):
        problem = f"there is no folder {folder!r}. Make it, or name another."
    elif not os.access(path if is_special(path) else folder, os.W_OK):
        problem = f"{path!r} cannot be written: permission denied."
    if problem and not int(os.environ.get("RANK", 0)):  # rank 0 alone writes
        raise argparse.ArgumentTypeError(problem)
    return path


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command that joins a process group, and ends the process with its code, without the interpreter's end.

    torch's caches keep a group's threads alive after the group was destroyed. A thread that wants the interpreter's
    lock while the interpreter ends aborts the process, whose work is done.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)
