"""tests/run.sh: which tests it runs, and what it does without a browser. What it sets up is there already."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TOOLS = "basename bash cat cp cut dirname flock ln mkdir mktemp mv nproc rm sed sha256sum sleep".split()

# pytest's plugins take two seconds to import.
QUICK_START = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def add_target(project: Path, version: str, shares: str | None = None) -> None:
    for name in (
        f"patches/{version}/PIN",
        "patches/package.patch",
        f"patches/{version}/hooks.patch",
        f"patches/{version}/fixes.patch",
        f"build/{version}/base/verl/__init__.py",
    ):
        write(project / name, "")
    write(project / f"build/{version}/base/ready", f"{version}\n")
    write(project / f"patches/{version}/PIN", f"WHEEL_SHA256={'0' * 64}\n")
    if shares:
        write(project / f"patches/{version}/PIN", f"WHEEL_SHA256={'0' * 64}\nREQUIREMENTS={shares}\n")


def make_venv(project: Path, version: str) -> None:
    """What run.sh takes for the virtual environment of a verl, made from requirements that are empty."""
    venv = project / "build" / ("venv" if version == "0.7.0" else f"venv-{version}")
    write(project / f"tests/requirements-{version}.txt", "")
    write(venv / "bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n', 0o755)
    for name in ("ruff", "deno", "mypy"):
        write(venv / "bin" / name, "#!/bin/sh\n", 0o755)
    python = subprocess.run([sys.executable, "-VV"], capture_output=True, check=True).stdout
    write(venv / "ready", hashlib.sha256(python).hexdigest())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The tests of the page and one other, and a PATH of its own (bin/): no Chromium, an apt-get that takes notes."""
    for name in ("tests/run.sh", "embedded/find_python.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    write(tmp_path / "bin/apt-get", f"#!/bin/sh\necho $1 >>{tmp_path}/apt\nexit 1\n", 0o755)
    write(tmp_path / "bin/python3.11", f'#!/bin/sh\nexec {sys.executable} "$@"\n', 0o755)
    for name in ("apply_patch.py", "make_patch.sh"):
        write(tmp_path / name, "")
    make_venv(tmp_path, "0.7.0")
    make_venv(tmp_path, "trackers")
    write(tmp_path / "patches/DEFAULT", "0.7.0\n")
    add_target(tmp_path, "0.7.0")
    write(tmp_path / "build/0.9.0/base/ready", "0.9.0\n")
    write(tmp_path / "tests/test_other.py", "def test_other():\n    pass\n")
    (tmp_path / "tests/report").mkdir()
    for name in ("browser.py", "evidence_samples.py", "test_report_browser.py"):
        shutil.copy(ROOT / "tests/report" / name, tmp_path / "tests/report")
    for name in ("gradloc", "gradloc_tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(project: Path, user: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    write(project / "bin/id", f"#!/bin/sh\necho {user}\n", 0o755)
    environment = os.environ | QUICK_START | {"PATH": str(project / "bin")}
    command = [project / "bin/bash", project / "tests/run.sh", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_tests_without_the_browser_do_not_ask_for_it(project: Path) -> None:
    done = run(project, 0, "-k", "test_other")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert "Chromium" not in done.stdout + done.stderr
    assert not (project / "apt").exists()


def test_without_a_browser_all_other_tests_run(project: Path) -> None:
    done = run(project, 1000)
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert "the tests of the report in a browser will fail" in done.stderr
    assert "apt-get install chromium chromium-driver" in done.stdout and "Traceback" not in done.stdout
    assert not (project / "apt").exists()


WHICH = """import os, pytest

@pytest.mark.every_target
def test_marked():
    print("MARKED", os.environ["GRADLOC_BASE_TREE"], os.environ["PYTHONPATH"])

@pytest.mark.smoke
def test_smoke():
    print("SMOKE", os.environ["GRADLOC_BASE_TREE"], os.environ["PYTHONPATH"])

@pytest.mark.target(version="0.9.1")
def test_named():
    print("NAMED", os.environ["GRADLOC_BASE_TREE"], os.environ["PYTHONPATH"])

def test_other():
    print("OTHER", os.environ["GRADLOC_BASE_TREE"])
"""


def ran(project: Path, *arguments: str) -> list[str]:
    """What of the four tests ran against which verl."""
    markers = '["every_target", "smoke", "target(version)"]'
    write(project / "pyproject.toml", f'[tool.pytest.ini_options]\nmarkers = {markers}\naddopts = "-s -q"\n')
    shutil.rmtree(project / "tests/report", ignore_errors=True)
    write(project / "tests/test_other.py", WHICH)
    environment = os.environ | QUICK_START | {"PATH": str(project / "bin")}
    done = subprocess.run(
        [project / "bin/bash", project / "tests/run.sh", *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [
        line.lstrip(".").split() for line in done.stdout.splitlines() if re.search("MARKED|SMOKE|NAMED|OTHER", line)
    ]
    for line in lines:
        version = Path(line[1]).parent.name
        assert Path(line[1]) == project / f"build/{version}/base"
        assert line[0] == "OTHER" or line[2].startswith(f"{project}/build/{version}/verl:")
    return [f"{line[0]} {Path(line[1]).parent.name}" for line in lines]


def test_which_tests_run_against_which_target(project: Path) -> None:
    """One that shares its requirements with another gets few tests."""
    add_target(project, "0.7.1", shares="0.7.0")
    add_target(project, "0.9.1")
    make_venv(project, "0.9.1")

    def all_of(version: str) -> list[str]:
        return [f"{name} {version}" for name in ("MARKED", "SMOKE", "NAMED", "OTHER")]

    default = [*all_of("0.7.0")]
    assert ran(project) == [*all_of("0.9.1")[:3], "SMOKE 0.7.1", *default]
    assert ran(project, "-k", "test_marked") == ["MARKED 0.7.0"]
    assert ran(project, "--target", "0.7.1") == all_of("0.7.1")
    shutil.rmtree(project / "build/venv")
    assert ran(project, "--target", "0.9.1") == all_of("0.9.1")
    assert (project / "build/base").resolve() == project / "build/0.7.0/base"
    assert (project / "build/verl").resolve() == project / "build/0.7.0/verl"


def test_each_run_has_logs_of_its_own(project: Path) -> None:
    """Those of a run that is at work stay, and those of one that has ended go."""
    for name in ("used", "ended"):
        write(project / f"build/logs.{name}/0/log", name)
    other = os.open(project / "build/logs.used", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        ran(project)
    finally:
        os.close(other)
    logs = project / "build/logs"
    assert {path.name for path in logs.parent.glob("logs.*")} == {"logs.used", logs.readlink().name}
    assert (project / "build/logs.used/0/log").read_text() == "used" and (logs / "0/code").read_text() == "0\n"


QUICK = """import pytest
from types import SimpleNamespace

@pytest.fixture
def launch():
    pass

@pytest.mark.slow
def test_slow():
    print("RAN slow")

def test_without_ranks():
    print("RAN without_ranks")

CASES = [(4, "fsdp2"), (2, "fsdp1"), (2, "fsdp2"), (1, "none")]

@pytest.mark.parametrize(("world", "case"), [(world, SimpleNamespace(wrap=wrap)) for world, wrap in CASES])
def test_with_ranks(launch, world, case):
    print("RAN with", world, case.wrap)

def test_on_two_ranks(launch):
    print("RAN on_two_ranks")
"""


@pytest.mark.parametrize("arguments", [["--quick"], ["--target", "0.7.1", "--quick"], ["--quick", "--target", "0.7.1"]])
def test_quick_leaves_out_slow_tests_and_all_but_one_case_with_ranks(project: Path, arguments: list[str]) -> None:
    add_target(project, "0.7.1", shares="0.7.0")
    shutil.rmtree(project / "build/venv-trackers")
    shutil.rmtree(project / "tests/report")
    write(
        project / "pyproject.toml",
        '[tool.pytest.ini_options]\nmarkers = ["slow"]\npythonpath = ["tests/support"]\naddopts = "-s -q"\n',
    )
    (project / "tests/test_other.py").unlink()
    for name in ("conftest.py", "support/trees.py"):
        write(project / "tests" / name, (ROOT / "tests" / name).read_text())
    write(project / "tests/one/test_first.py", QUICK)
    write(project / "tests/two/test_second.py", QUICK)
    write(project / "tests/unit/test_third.py", QUICK)
    environment = (
        os.environ | QUICK_START | {"PATH": str(project / "bin"), "PYTHONPATH": str(project / "tests/support")}
    )
    command = [project / "bin/bash", project / "tests/run.sh", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("RAN ")[2] for line in done.stdout.splitlines() if "RAN " in line]
    assert lines == ["without_ranks", "with 2 fsdp2"] * 3
    assert done.stdout.count("run.sh: pytest, ") == 2  # parts
    assert ("pytest, verl 0.7.1" in done.stdout) == ("--target" in arguments)


def test_the_plugins_tests_with_another_verl(project: Path, tmp_path: Path) -> None:
    add_target(project, "0.9.1")
    make_venv(project, "0.9.1")
    for name in ("unit/test_plugin_with_verl", "multirank/test_plugin_ranks", "trainer/test_plugin_run"):
        code = (
            "import os\ndef test_it():\n    print('BASE', os.environ['GRADLOC_BASE_TREE'], os.environ['PYTHONPATH'])\n"
        )
        write(project / f"tests/{name}.py", code)
    (tmp_path / "main").mkdir()
    environment = os.environ | QUICK_START | {"PATH": str(project / "bin"), "PYTEST_ADDOPTS": "-s"}
    command = [project / "bin/bash", project / "tests/run.sh", "--plugin"]
    done = subprocess.run([*command, tmp_path / "main"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(f"BASE {tmp_path}/main {project}/build/0.9.1/verl:") == 3
    chosen = [*command, tmp_path / "main", "-k", "test_plugin_run"]
    done = subprocess.run(chosen, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed, 2 deselected" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command, tmp_path / "none"], env=environment, capture_output=True, text=True)
    assert done.returncode and "none: No such file" in done.stderr


def test_an_unknown_target(project: Path) -> None:
    environment = os.environ | QUICK_START | {"PATH": str(project / "bin")}
    command = [project / "bin/bash", project / "tests/run.sh", "--target", "0.6.0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--target takes one of: 0.7.0" in done.stderr


def test_a_failing_test_of_another_target_fails_the_run(project: Path) -> None:
    add_target(project, "0.7.1", shares="0.7.0")
    write(project / "pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["smoke"]\n')
    shutil.rmtree(project / "tests/report")
    test = "import os, pytest\n@pytest.mark.smoke\ndef test_it():\n    assert '0.7.0' in os.environ['PYTHONPATH']\n"
    write(project / "tests/test_other.py", test)
    write(project / "tests/multirank/test_ranks.py", "def test_ranks():\n    pass\n")
    environment = os.environ | QUICK_START | {"PATH": str(project / "bin")}
    done = subprocess.run(
        [project / "bin/bash", project / "tests/run.sh"], env=environment, capture_output=True, text=True
    )
    parts = re.findall(r"pytest, verl (\S+), (\S+)|(\d (?:passed|failed))", done.stdout)
    expected = [
        "0.7.0 tests/multirank",
        "1 passed",
        "0.7.1 -m",
        "1 failed",
        "0.7.0 --ignore=tests/multirank",
        "1 passed",
    ]
    assert [f"{version} {first}".strip() or result for version, first, result in parts] == expected
    assert done.returncode == 1 and "1 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
