"""make_patch.sh with a patch for each of several verl releases: the same package in all, and hooks of their own."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import trees
from trees import ACTOR, ALGOS, NEW, Project, refused, snapshot

PACKAGE = "verl/utils/gradloc"
SCORES = "verl/utils/reward_score"
OURS = "def f():\n    return 1\n"


@dataclasses.dataclass
class Two:
    """A project with two targets, and for each its base and its checkout."""

    project: Project
    bases: dict[str, Path]
    checkouts: dict[str, Path]

    def patch(self, version: str) -> bytes:
        return self.project.text(version)

    def make(self, *arguments: str | Path) -> str:
        done = self.project.make(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def release(place: Path, version: str) -> Path:
    trees.copy_base(place)
    if version != "0.7.0":
        trees.make_next_release(place, version)
    return place


@pytest.fixture
def two(base_tree: Path, tmp_path: Path) -> Two:
    project = Project(tmp_path / "project", None)
    project.add_target("0.7.1", None)
    bases = {version: release(project.place / "build" / version / "base", version) for version in ("0.7.0", "0.7.1")}
    made = Two(project, bases, {version: tmp_path / version for version in bases})
    for version, checkout in made.checkouts.items():
        made.make("--init", checkout, "--base", bases[version])
        (checkout / PACKAGE).mkdir(exist_ok=True)
        (checkout / NEW).write_text("x = 1\n")
        (checkout / SCORES).mkdir(exist_ok=True)
        (checkout / SCORES / "ours.py").write_text(OURS)
        hooked = checkout / {"0.7.0": ACTOR, "0.7.1": ALGOS}[version]
        hooked.write_text(f"{hooked.read_text()}# hook for {version}\n")
        made.make("--repo", checkout)
    return made


def test_a_change_of_the_package_needs_one_checkout(two: Two, tmp_path: Path) -> None:
    """The package is that of every target: --check applies it to each base."""
    assert "0.7.0" in (said := two.make("--check")) and "0.7.1" in said
    hooks = (two.project.place / "patches/0.7.1/hooks.patch").read_bytes()
    (two.project.place / "gradloc/__init__.py").write_text("x = 2\n")
    (two.project.place / "gradloc/deep").mkdir()
    (two.project.place / "gradloc/deep/zone.py").write_text("z = 1\n")
    (two.project.place / "rewards/ours.py").write_text(OURS.replace("1", "3"))
    two.make("--repo", two.checkouts["0.7.0"])
    two.make("--check")
    for version, checkout in two.checkouts.items():
        assert b"+x = 2\n" in two.patch(version) and b"deep/zone.py" in two.patch(version)
        assert f"+# hook for {version}".encode() in two.patch(version)
        fresh = tmp_path / f"fresh-{version}"
        two.make("--init", fresh, "--base", two.bases[version])
        assert (fresh / SCORES / "ours.py").read_text() == OURS.replace("1", "3")
        two.make("--repo", fresh)
        assert checkout.exists()
    two.make("--check")
    assert (two.project.place / "patches/0.7.1/hooks.patch").read_bytes() == hooks


def test_a_hook_changes_in_its_own_target_only(two: Two) -> None:
    before = two.patch("0.7.0")
    algos = two.checkouts["0.7.1"] / ALGOS
    algos.write_text(algos.read_text().replace("# hook", "# other hook"))
    two.make("--repo", two.checkouts["0.7.1"])
    assert b"+# other hook for 0.7.1" in two.patch("0.7.1") and two.patch("0.7.0") == before
    two.make("--check")


def test_a_checkout_that_missed_a_change_takes_it(two: Two) -> None:
    (two.project.place / "gradloc/__init__.py").write_text("x = 2\n")
    two.make("--repo", two.checkouts["0.7.0"])
    before = snapshot(two.project.place)
    two.make("--repo", two.checkouts["0.7.1"])
    assert (two.checkouts["0.7.1"] / NEW).read_text() == "x = 2\n"
    assert snapshot(two.project.place) == before


def test_a_file_of_ours_that_a_verl_has_itself(two: Two) -> None:
    """Only the target of that verl is concerned."""
    (two.bases["0.7.1"] / SCORES).mkdir()
    (two.bases["0.7.1"] / SCORES / "ours.py").write_text("# verl's\n")
    refused(two.project.make("--check"), 3, "rewards/ours.py would replace a file of verl's own")
    two.make("--check", "--target", "0.7.0")


def test_check_names_the_target(two: Two) -> None:
    hooks = two.project.parts("0.7.1")[1]
    trees.write_patch(hooks, hooks.read_bytes().replace(b"# hook for 0.7.1", b"# hook for 0.7.1 "))
    refused(two.project.make("--check"), 1, "patches/0.7.1/hooks.patch", "does not apply")
    two.make("--check", "--target", "0.7.0")
    refused(two.project.make("--check", "--target", "0.7.1", "--base-tree", two.bases["0.7.1"]), 1, "hooks.patch")
    # The given tree is the base of its own target; the other one has its own.
    shutil.rmtree(two.bases["0.7.0"] / "verl/trainer")
    refused(two.project.make("--check", "--base-tree", two.bases["0.7.0"]), 1, "patches/0.7.1/hooks.patch")


def test_what_says_which_target_is_meant(two: Two, tmp_path: Path) -> None:
    assert "verl 0.7.1" in two.make("--init", tmp_path / "a", "--base", two.bases["0.7.1"])
    assert "verl 0.7.1" in two.make("--init", tmp_path / "b", "--base", tmp_path / "a")
    other = release(tmp_path / "other", "0.8.0")
    refused(two.project.make("--init", tmp_path / "c", "--base", other), 3, "is not verl 0.7.0 or 0.7.1")
    refused(two.project.make("--init", tmp_path / "c", "--target", "0.8.0"), 3, "no patch for verl 0.8.0")
    refused(two.project.make("--check", "--base-tree", other), 3, "is not verl 0.7.0 or 0.7.1", "--target")
    refused(two.project.make("--repo", tmp_path / "a", "--target", "0.7.0"), 3, "made from verl 0.7.1, not 0.7.0")
    # Without a note, the version of the base says it.
    shutil.rmtree(tmp_path / "a/.git/gradloc")
    before = two.patch("0.7.0")
    two.make("--repo", tmp_path / "a")
    assert two.patch("0.7.0") == before
    trees.commit_all(other)
    refused(two.project.make("--repo", other), 3, "does not say which verl", "0.7.0 or 0.7.1")


def test_a_clone_with_the_commit_of_a_target(two: Two, tmp_path: Path) -> None:
    commit = trees.commit_all(release(tmp_path / "clone", "0.7.1"))
    refused(two.project.make("--init", tmp_path / "new", "--base", tmp_path / "clone"), 3, "neither commit")
    refused(
        two.project.make("--init", tmp_path / "new", "--base", tmp_path / "clone", "--target", "0.7.1"),
        3,
        "a known commit of verl 0.7.1",
    )
    trees.write_pin(two.project.place / "patches/0.7.1", commit, "0.7.1")
    assert "verl 0.7.1" in two.make("--init", tmp_path / "new", "--base", tmp_path / "clone")
    (two.project.place / "patches/DEFAULT").write_text("0.9.9\n")
    refused(two.project.make("--init", tmp_path / "newer"), 3, "DEFAULT must hold one of 0.7.0 and 0.7.1")


def test_a_commit_that_was_not_released(two: Two, tmp_path: Path) -> None:
    """Where its tree is not there, its hooks are checked by their checksums alone, and --check says so."""
    commit = trees.commit_all(release(tmp_path / "clone", "0.7.1"))
    (two.project.place / "patches/0.7.1/PIN").write_text(f"VERSION=0.7.1\nCOMMIT={commit}\n")
    assert "the patch for verl 0.7.1 is what the sources produce" in two.make("--check")
    shutil.rmtree(two.bases["0.7.1"])
    unchecked = f"not checked beyond the checksums: verl 0.7.1 is the commit {commit}, which was not released"
    assert unchecked in two.make("--check")
    refused(two.project.make("--release", "0.7.1"), 3, commit, "give a tree with --base-tree")
    refused(two.project.make("--init", tmp_path / "new", "--target", "0.7.1"), 3, commit, "--base")
    two.make("--init", tmp_path / "new", "--base", tmp_path / "clone")
    hooks = two.project.parts("0.7.1")[1]
    hooks.write_bytes(hooks.read_bytes() + b"\n")
    refused(two.project.make("--check"), 1, "patches/0.7.1/hooks.patch.sha256")


def test_a_wheel_that_is_not_the_pinned_one(two: Two, tmp_path: Path) -> None:
    wheel = two.project.place / "build/wheel/verl-0.7.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"other")
    refused(two.project.make("--init", tmp_path / "new"), 3, str(wheel), "SHA-256", "delete it")
