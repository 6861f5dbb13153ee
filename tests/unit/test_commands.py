"""The command `gradloc`: what it takes, what it says of what is missing, and that its help opens with an example."""

import json
import os
import subprocess
import sys

import pytest
from notation import Capsys

import trees
from gradloc import __main__ as gradloc_command
from gradloc import __version__

COMMANDS = ["report", "check", "replay", "convert", "selftest"]


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_is_a_screen_that_names_every_command(arguments: list[str], capsys: Capsys) -> None:
    assert gradloc_command.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"gradloc {name} " in out for name in COMMANDS)
    assert out.count("\n") <= 24 and max(map(len, out.splitlines())) <= 120


def test_the_version_and_an_unknown_command(capsys: Capsys) -> None:
    assert gradloc_command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradloc {__version__}\n"
    # An unknown command is one sentence.
    assert gradloc_command.main(["reprot", "DIR"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'reprot'" in line and all(name in line for name in COMMANDS)


def without_packages(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A module's command in a Python where none is installed, as -S makes it."""
    return trees.run(sys.executable, "-S", "-m", *arguments, cwd=trees.ROOT, PYTHONPATH="")


def test_the_plugins_check_without_a_verl_is_a_sentence() -> None:
    """Its package, which has the scorers, says nothing."""
    done = without_packages("gradloc.plugin")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "has no verl that can be imported" in line


@pytest.mark.parametrize("arguments", [["--help"], ["report", "examples/spike", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "gradloc", *arguments]
    done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, cwd=trees.ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    # Output that cannot be written is one.
    with open(__file__, "rb") as unwritable:
        done = subprocess.run(program, stdout=unwritable, stderr=subprocess.PIPE, cwd=trees.ROOT)
    assert done.returncode == 2 and done.stderr.endswith(b"Bad file descriptor: standard output\n")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_installed_is_one_sentence(name: str) -> None:
    """After the help, where that is asked for."""
    readers = ("report", "check")
    missing, extra = ("rich", ".") if name in readers else ("torch", ".[replay]")
    for option in ["evidence"] if name in readers else ["evidence", "--help"]:
        done = without_packages("gradloc", name, option)
        assert done.returncode == 1 and (f"\n    gradloc {name} " in done.stdout) == (option == "--help")
        (line,) = done.stderr.splitlines()
        assert missing in line and line.endswith(f"run pip install '{extra}' in GradLoc's checkout")


def test_a_reports_figures_are_there_whatever_is_missing() -> None:
    done = without_packages("gradloc", "report", "examples/spike", "--json")
    assert json.loads(trees.ran(done))["events"] == 1
