"""Fixtures for the tests of the tools."""

from __future__ import annotations

import os
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
