"""tests/run.sh: which tests it runs and what it says at the end. What it sets up is there already."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trees
from trees import write

pytestmark = pytest.mark.slow
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
SETTINGS = """[tool.pytest.ini_options]
markers = ["every_target", "slow", "smoke", "target(version)"]
pythonpath = ["tests/support"]
"""
# pytest's plugins take two seconds to import.
QUICK_START = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def add_target(project: Path, version: str, shares: str | None = None) -> None:
    """A target with its patch and, unless it shares another's, a virtual environment from empty requirements."""
    patches = ("files/verl/utils/spikes.py", f"{version}/hooks.patch", f"{version}/fixes.patch")
    for name in (*(f"patches/{patch}" for patch in patches), f"build/{version}/base/verl/__init__.py"):
        write(project / name, "")
    write(project / f"build/{version}/base/ready", f"{version}\n")
    shared = f"REQUIREMENTS={shares}\n" if shares else ""
    write(project / f"patches/{version}/PIN", f"WHEEL_SHA256={'0' * 64}\n{shared}")
    if not shares:
        make_venv(project, version)


def make_venv(project: Path, version: str) -> None:
    venv = project / "build" / ("venv" if version == "0.7.0" else f"venv-{version}")
    write(project / f"tests/requirements-{version}.txt", "")
    write(venv / "bin/python", PYTHON, 0o755)
    for name in ("ruff", "deno", "mypy"):
        write(venv / "bin" / name, f"#!/bin/sh\necho Success: no issues found by {name}\n", 0o755)
    python = subprocess.run([sys.executable, "-VV"], capture_output=True, check=True).stdout
    write(venv / "ready", hashlib.sha256(python).hexdigest())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without tests, for which this Python is the one that is found."""
    for name in ("tests/run.sh", "embedded/find_python.sh", "tests/conftest.py", "tests/support/trees.py"):
        write(tmp_path / name, (trees.ROOT / name).read_text())
    write(tmp_path / "bin/python3.11", PYTHON, 0o755)
    for name in ("apply_patch.py", "make_patch.sh"):
        write(tmp_path / name, "")
    make_venv(tmp_path, "trackers")
    write(tmp_path / "patches/DEFAULT", "0.7.0\n")
    write(tmp_path / "pyproject.toml", SETTINGS)
    add_target(tmp_path, "0.7.0")
    write(tmp_path / "build/0.9.0/base/ready", "0.9.0\n")
    return tmp_path


def run(project: Path, *arguments: str | Path, options: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the project's tests, with options for each pytest."""
    environment = QUICK_START | {"PYTEST_ADDOPTS": f"-p no:cacheprovider {options}"}
    path = f"{project}/bin:{os.environ['PATH']}"
    return trees.run("bash", project / "tests/run.sh", *arguments, PATH=path, **environment)


WHICH = """import os, pytest
def say(name):
    print("RAN", name, os.environ["GRADLOC_BASE_TREE"], os.environ["PYTHONPATH"])

@pytest.mark.every_target
def test_marked():
    say("MARKED")

@pytest.mark.smoke
def test_smoke():
    say("SMOKE")

@pytest.mark.target(version="0.9.1")
def test_named():
    say("NAMED")

def test_other():
    say("OTHER")
"""


def ran(project: Path, *arguments: str | Path) -> list[str]:
    """What of the four tests ran against which verl."""
    found = []
    for name, base, path in re.findall(r"RAN (\S+) (\S+) (\S+)", trees.ran(run(project, *arguments, options="-s -q"))):
        version = Path(path.partition("/verl:")[0]).name
        assert Path(base) == project / ("main" if "--plugin" in arguments else f"build/{version}/base")
        found.append(f"{name} {version}")
    return found


def test_which_tests_run_against_which_target(project: Path) -> None:
    """One that shares its requirements with another gets few tests."""
    add_target(project, "0.7.1", shares="0.7.0")
    add_target(project, "0.9.1")
    write(project / "tests/test_other.py", WHICH)

    def all_of(version: str) -> list[str]:
        return [f"{name} {version}" for name in ("MARKED", "SMOKE", "NAMED", "OTHER")]

    assert ran(project) == [*all_of("0.9.1")[:3], "SMOKE 0.7.1", *all_of("0.7.0")]
    assert ran(project, "-k", "test_marked") == ["MARKED 0.7.0"]
    assert ran(project, "--target", "0.7.1") == all_of("0.7.1")
    shutil.rmtree(project / "build/venv")
    assert ran(project, "--target", "0.9.1") == all_of("0.9.1")
    assert (project / "build/verl").resolve() == project / "build/0.7.0/verl"
    # The plugin's tests, with another verl.
    (project / "main").mkdir()
    for name in ("unit/test_plugin_with_verl", "trainer/test_end_to_end"):
        write(project / f"tests/{name}.py", WHICH)
    assert ran(project, "--plugin", project / "main") == all_of("0.9.1") * 2


FAILS_WITH_ANOTHER = """import os, pytest
@pytest.mark.smoke
def test_it():
    assert "0.7.0" in os.environ["PYTHONPATH"]
@pytest.mark.skip(reason="no GPU")
def test_skipped():
    pass
"""


def test_a_run_ends_with_a_line_for_each_part(project: Path) -> None:
    """With another verl a test fails, and the run with it."""
    add_target(project, "0.7.1", shares="0.7.0")
    write(project / "tests/test_other.py", FAILS_WITH_ANOTHER)
    done = run(project, options="-ra")
    assert done.returncode == 1 and not done.stderr, done.stderr
    summary = done.stdout[done.stdout.index("run.sh: 0.7.1 marked: ") :]
    said = re.sub(r"\d+:\d\d min", "M:SS min", summary)
    assert re.sub("(failed .*?) - .*", r"\1", said).splitlines() == [
        "run.sh: 0.7.1 marked: 1 failed, 1 deselected, M:SS min",
        "    failed tests/test_other.py::test_it",
        "    log: build/logs/0/log",
        "run.sh: 0.7.0 rest: 1 passed, 1 skipped, M:SS min",
        "    skipped [1] tests/test_other.py:5: no GPU",
        "run.sh: 0.7.0 types: Success: no issues found by mypy, M:SS min",
    ]


def test_a_run_that_hangs_ends_in_time_and_tells_where(project: Path) -> None:
    write(project / "tests/test_other.py", "import time\ndef test_hangs():\n    time.sleep(600)\n")
    script = project / "tests/run.sh"
    script.write_text(script.read_text().replace("MOST_MINUTES=86", "MOST_MINUTES=0").replace("left : 60", "left : 2"))
    done = run(project)
    assert done.returncode == 124 and "test_other.py:3: KeyboardInterrupt" in done.stdout
    last = r"run\.sh: 0\.7\.0 rest: no tests ran, \d+:\d\d min\n    log: build/logs/0/log\n"
    assert re.search(rf"{last}run\.sh: 0\.7\.0 types: .*\n$", done.stdout), done.stdout
