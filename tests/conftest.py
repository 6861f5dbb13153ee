"""Fixtures for the tests of the tools."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trees

# Tensors are tiny here. Threads that share them out spend 20 times the processor time on waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="no slow tests; one case with ranks of each file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, leaves out tests marked slow, and of tests that run ranks all but one of each file."""
    if not config.getoption("--quick"):
        return
    chosen: list[pytest.Item] = []
    files_with_ranks = set()
    for item in items:
        has_ranks = "launch" in getattr(item, "fixturenames", ())
        if item.get_closest_marker("slow") or (has_ranks and (item.path in files_with_ranks or not is_small(item))):
            continue
        if has_ranks:
            files_with_ranks.add(item.path)
        chosen.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def is_small(item: pytest.Item) -> bool:
    """Whether a test on several ranks takes two, with FSDP2, or does not say how many it takes."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("case")
    return parameters.get("world", parameters.get("size", 2)) == 2 and getattr(case, "wrap", "fsdp2") == "fsdp2"


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts its background jobs with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and whatever they start
    # inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.umask(0o022)  # the modes that the tests expect are those of most checkouts


# Libraries add variables when they are imported or first used; these are none of theirs.
NO_LIBRARY_ADDS = ("EMBEDDED_", "GRADLOC_", "VERL_")
AT_THE_START = set(os.environ) - {"PYTEST_CURRENT_TEST"}


def state_of_process() -> dict[str, Any]:
    signals = signal.valid_signals() - {signal.SIGALRM}  # which is the timer's
    kept = {name for name in os.environ if name in AT_THE_START or name.startswith(NO_LIBRARY_ADDS)}
    return {
        "handlers of signals": {number: signal.getsignal(number) for number in signals},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "working directory": os.getcwd(),
        "umask": re.findall(r"^Umask:\s+(\d+)", Path("/proc/self/status").read_text(), re.M),
        "os.environ": {name: os.environ[name] for name in kept},
    }


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Fails the test that does not: with SIGTERM ignored, say, a program that a later test ends would run for ever."""
    before = state_of_process()
    yield
    after = state_of_process()
    if changed := [f"{name}: {after[name]!r}" for name in after if after[name] != before[name]]:
        pytest.fail("left behind for the tests after it: " + "; ".join(changed))


@pytest.fixture(scope="session")
def base_tree() -> Path:
    """The unpatched verl that the patch is made for."""
    if not (trees.BASE_TREE / "verl" / "__init__.py").is_file():
        pytest.fail(f"{trees.BASE_TREE} has no unpatched verl; run the tests with: bash tests/run.sh")
    return trees.BASE_TREE


@pytest.fixture(scope="session")
def small_patch(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> trees.Patch:
    return trees.small_patch(tmp_path_factory.mktemp("small"))


@pytest.fixture
def project(small_patch: trees.Patch, tmp_path: Path) -> trees.Project:
    """A copy of the project whose patch changes a few real files in every possible way."""
    return trees.Project(tmp_path / "project", small_patch)


@pytest.fixture
def tree(base_tree: Path, tmp_path: Path) -> Path:
    """A release tree with the files that the small patch changes."""
    return trees.copy_base(tmp_path / "tree")
