"""Which tests run against which verl, and fixtures for the tests of the tools."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import trees


def pytest_configure() -> None:
    # A shell starts its background jobs with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and whatever they start
    # inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.umask(0o022)  # the modes that the tests expect are those of most checkouts


# Tests without a mark are for verl's older actor, or for no verl at all.
WITHOUT_MARK = ("0.7.0", "0.7.1")
# The marks of pyproject.toml, in the text of a file.
MARK = re.compile(r"\bmark\.(every_target|target\(([^)]*)\))")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out files with no test for the target: they may import what that verl does not have."""
    if collection_path.suffix != ".py" or trees.TARGET in WITHOUT_MARK or not trees.TARGET:
        return None
    marks = MARK.findall(collection_path.read_text())
    return None if any(mark == "every_target" or f'"{trees.TARGET}"' in versions for mark, versions in marks) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that are not for the target."""

    def is_for_target(item: pytest.Item) -> bool:
        if marker := item.get_closest_marker("target"):
            return trees.TARGET in marker.args
        return item.get_closest_marker("every_target") is not None or trees.TARGET in (*WITHOUT_MARK, "")

    config.hook.pytest_deselected(items=[item for item in items if not is_for_target(item)])
    items[:] = [item for item in items if is_for_target(item)]


@pytest.fixture(scope="session")
def base_tree() -> Path:
    """The unpatched verl that the patch is made for."""
    if not (trees.BASE_TREE / "verl" / "__init__.py").is_file():
        pytest.fail(f"{trees.BASE_TREE} has no unpatched verl; run the tests with: bash tests/run.sh")
    return trees.BASE_TREE


@pytest.fixture(scope="session")
def small_patch(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return trees.small_patch(tmp_path_factory.mktemp("small"))


@pytest.fixture
def project(small_patch: bytes, tmp_path: Path) -> trees.Project:
    """A copy of the project whose patch changes a few real files in every possible way."""
    return trees.Project(tmp_path / "project", small_patch)


@pytest.fixture
def tree(base_tree: Path, tmp_path: Path) -> Path:
    """A release tree with the files that the small patch changes."""
    return trees.copy_base(tmp_path / "tree")
