# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a setting may be, what a command needs, and how one with a process group ends."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeGuard, TypeVar

Value = TypeVar("Value", int, float, str)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold, NaN and infinities left out; a bool is not a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_positive_integer(value: object) -> TypeGuard[int]:
    """Whether it is an int of at least 1; a bool is not an int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def argument(kind: Callable[[str], Value], holds: Callable[[Value], bool], text: str) -> Callable[[str], Value]:
    """The `type` of a command's argument: a value for which `holds` is true; `text` says what it must be."""

    def convert(given: str) -> Value:
        value = kind(given)
        if not holds(value):
            raise argparse.ArgumentTypeError(text.format(value))
        return value

    convert.__name__ = kind.__name__  # argparse says it of what is no number
    return convert


def need(module: str, what: str) -> None:
    """Ends a command with a sentence if a module that it needs cannot be imported.

    Args:
        module (str): The module, of a package of this name.
        what (str): The start of the sentence: what needs it.
    """
    package = module.split(".")[0]
    try:
        importlib.import_module(module)
    except ImportError:
        sys.exit(f"{what} needs {package}, which is not installed: pip install {package}")


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
