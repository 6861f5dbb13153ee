"""The patches that examples/upstream proposes to verl, each applied to a verl as released."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from callback_run import POSITION, RANK, ROW, ROWS
from valid_events import events_in, lines_in

import trees
from warm_python import warm_python

pytestmark = [
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(trees.TARGET != "0.9.1", reason="the patches are for verl 0.9.1"),
]
UPSTREAM = trees.ROOT / "examples/upstream"
PATCHES = sorted(UPSTREAM.glob("*.patch"))


def apply(patch: Path, tree: Path, *options: str) -> None:
    trees.ran(trees.run("git", "apply", "--whitespace=error-all", *options, patch, cwd=tree))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """verl as released, with the tests that come with it."""
    shutil.copytree(trees.BASE_TREE / "tests", tmp_path / "tree/tests")
    return trees.copy_base(tmp_path / "tree", files=None)


@pytest.fixture(scope="module")
def own_tests() -> Iterator[Callable[[Path, Path], subprocess.CompletedProcess[str]]]:
    """Runs the tests that a patch adds, in a tree."""

    def run(tree: Path, patch: Path) -> subprocess.CompletedProcess[str]:
        changed = trees.ran(trees.run("git", "apply", "--numstat", patch)).split()[2::3]
        tests = [name for name in changed if name.startswith("tests/")]
        options = ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tree]
        environment = {"PYTHONPATH": str(tree), "VERL_USE_EXTERNAL_MODULES": ""}
        return trees.run(python, "-m", "pytest", *options, *tests, cwd=tree, **environment)

    environment = {"PYTHONPATH": "", "PATH": ""}
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_python(Path(folder), environment) as python:
        yield run


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_its_tests_pass_and_without_its_fix_fail(
    tree: Path, patch: Path, own_tests: Callable[[Path, Path], subprocess.CompletedProcess[str]]
) -> None:
    apply(patch, tree, "--include=tests/*")
    without = own_tests(tree, patch)
    # With callbacks, there is nothing to import; of a fix, tests fail.
    assert without.returncode == (2 if patch.stem == "callbacks" else 1), without.stdout + without.stderr
    apply(patch, tree, "--include=verl/*")
    trees.ran(own_tests(tree, patch))


def test_they_apply_together(tree: Path) -> None:
    for patch in PATCHES:
        apply(patch, tree)


def test_callbacks_alone_find_a_planted_token(tree: Path, tmp_path: Path) -> None:
    apply(UPSTREAM / "callbacks.patch", tree)
    path = [tree, trees.ROOT, UPSTREAM, trees.ROOT / "tests/multirank", trees.ROOT / "tests/support"]
    script = trees.ROOT / "tests/multirank/callback_run.py"
    printed = trees.ran(trees.run(sys.executable, script, tmp_path, PYTHONPATH=":".join(map(str, path))))
    without, found, stops = json.loads(printed.splitlines()[-1])
    assert found == without  # the search leaves training as it is, bit for bit
    (event,) = events_in(tmp_path)
    assert (event["global_step"], event["mini_batch"], event["complete"]) == (7, 1, True)
    # A rank's mini-batch has half of its rows.
    assert [(c["rank"], c["row"], c["position"]) for c in event["culprits"]] == [(RANK, ROW - ROWS // 2, POSITION)]
    assert (tmp_path / event["replay"]).is_dir()
    assert [step["triggered"] for step in lines_in(tmp_path, "steps.jsonl")] == [1]
    assert (tmp_path / "checkpoint/gradloc_state.pt").is_file()
    assert stops == [False, False, False, True]
