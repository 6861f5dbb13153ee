"""Tests of the engine and of the critic on a verl that is not patched, with the plugin."""

import sys

import pytest

import trees

pytestmark = [
    pytest.mark.slow,
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(not trees.HAS_PLUGINS, reason="the plugin is for verl 0.9"),
]
# What each hook serves, on two ranks: a search, what it leaves of training, evidence in and out of order, counts,
# checkpoints, and the critic. The patched verl has the other cases.
CASES = (
    "bit_identical and fsdp1-deferred or describes or counted_together or resuming and fsdp2 or planted_return"
    " or released"
)


def test_engines_are_watched_without_a_patch() -> None:
    """In a process of its own, whose ranks find the package under the names that the tests use (as_if_patched.py)."""
    path = [trees.BASE_TREE, trees.ROOT, trees.ROOT / "plugin", trees.ROOT / "tests/support"]
    files = [f"tests/multirank/test_{name}.py" for name in ("actor", "engine", "critic", "layer_clip")]
    done = trees.run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", CASES),
        cwd=trees.ROOT,
        PYTHONPATH=":".join(map(str, path)),
        VERL_USE_EXTERNAL_MODULES="embedded,gradloc_verl,as_if_patched",
    )
    printed = trees.ran(done)
    assert "7 passed" in printed and " skipped" not in printed
