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
OURS = "# ours\n\n\ndef f():\n    return 1\n"


@dataclasses.dataclass
class Two:
    """A project with two targets, and for each its base and its checkout."""

    project: Project
    bases: dict[str, Path]
    checkouts: dict[str, Path]

    def patch(self, version: str) -> bytes:
        return (self.project.place / "patches" / version / "gradloc.patch").read_bytes()

    def make(self, *arguments: str | Path) -> str:
        done = self.project.make(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def release(place: Path, version: str) -> Path:
    trees.copy_base(place)
    if version != "0.7.0":
        trees.make_next_release(place, version)
    (place / SCORES).mkdir()
    (place / SCORES / "math_verify.py").write_text(f"# verl's, as in {version}\n\n\ndef f():\n    return 0\n")
    return place


@pytest.fixture
def two(base_tree: Path, tmp_path: Path) -> Two:
    project = Project(tmp_path / "project", None)
    project.add_target("0.7.1", None)
    bases = {version: release(project.place / "build" / version / "base", version) for version in ("0.7.0", "0.7.1")}
    made = Two(project, bases, {version: tmp_path / version for version in bases})
    for version, checkout in made.checkouts.items():
        made.make("--init", checkout, "--base", bases[version])
        (checkout / PACKAGE).mkdir()
        (checkout / NEW).write_text("x = 1\n")
        (checkout / SCORES / "math_verify.py").write_text(OURS)
        hooked = checkout / {"0.7.0": ACTOR, "0.7.1": ALGOS}[version]
        hooked.write_text(f"{hooked.read_text()}# hook for {version}\n")
        made.make("--repo", checkout)
    return made


def test_a_change_of_the_package_needs_one_checkout(two: Two, tmp_path: Path) -> None:
    """The other target's patch is what its own checkout would give: --check applies it to its base."""
    assert "0.7.0" in (said := two.make("--check")) and "0.7.1" in said
    hooks = (two.project.place / "patches/0.7.1/hooks.patch").read_bytes()
    (two.project.place / "gradloc/__init__.py").write_text("x = 2\n")
    (two.project.place / "gradloc/deep").mkdir()
    (two.project.place / "gradloc/deep/zone.py").write_text("z = 1\n")
    (two.project.place / "rewards/math_verify.py").write_text(OURS.replace("1", "3"))
    two.make("--repo", two.checkouts["0.7.0"])
    two.make("--check")
    for version, checkout in two.checkouts.items():
        assert b"+x = 2\n" in two.patch(version) and b"deep/zone.py" in two.patch(version)
        assert f"+# hook for {version}".encode() in two.patch(version)
        fresh = tmp_path / f"fresh-{version}"
        two.make("--init", fresh, "--base", two.bases[version])
        assert (fresh / SCORES / "math_verify.py").read_text() == OURS.replace("1", "3")
        two.make("--repo", fresh)
        assert checkout.exists()
    two.make("--check")
    assert (two.project.place / "patches/0.7.1/hooks.patch").read_bytes() == hooks


def test_a_replaced_file_that_is_given_up(two: Two) -> None:
    (two.project.place / "rewards/math_verify.py").unlink()
    (two.project.place / "rewards/new.py").write_text("n = 1\n")
    two.make("--repo", two.checkouts["0.7.1"])
    two.make("--check")
    for version in two.bases:
        assert b"math_verify" not in two.patch(version) and b"rewards" not in two.patch(version)


def test_a_hook_changes_in_its_own_target_only(two: Two) -> None:
    before = two.patch("0.7.0")
    algos = two.checkouts["0.7.1"] / ALGOS
    algos.write_text(algos.read_text().replace("# hook", "# other hook"))
    two.make("--repo", two.checkouts["0.7.1"])
    assert b"+# other hook for 0.7.1" in two.patch("0.7.1") and two.patch("0.7.0") == before
    two.make("--check")


def test_a_checkout_that_missed_a_change_does_not_undo_it(two: Two) -> None:
    (two.project.place / "gradloc/__init__.py").write_text("x = 2\n")
    two.make("--repo", two.checkouts["0.7.0"])
    before = snapshot(two.project.place)
    refused(two.project.make("--repo", two.checkouts["0.7.1"]), 3, "would be lost")
    assert snapshot(two.project.place) == before


def test_an_interrupted_run_is_repeated(two: Two) -> None:
    """The state after a kill between two patches: the other target's is new, the checkout's own is old."""
    own = two.project.place / "patches/0.7.0"
    record = two.checkouts["0.7.0"] / ".git/gradloc-patch.sha256"
    old = {path: path.read_bytes() for path in [*own.iterdir(), record]}
    (two.project.place / "rewards/math_verify.py").write_text(OURS.replace("1", "3"))
    two.make("--repo", two.checkouts["0.7.0"])
    wanted = snapshot(two.project.place)
    for path, content in old.items():
        path.write_bytes(content)
    two.make("--repo", two.checkouts["0.7.0"])
    assert snapshot(two.project.place) == wanted


def test_a_patch_of_other_sources_is_not_renewed(two: Two) -> None:
    place = two.project.place / "patches/0.7.1/gradloc.patch"
    (two.checkouts["0.7.1"] / SCORES / "math_verify.py").write_text("# another\n")
    two.make("--repo", two.checkouts["0.7.1"], "--output", place)
    (two.project.place / "gradloc/__init__.py").write_text("x = 2\n")
    before = snapshot(two.project.place)
    refused(two.project.make("--repo", two.checkouts["0.7.0"]), 3, f"{SCORES}/math_verify.py", "restore patches/")
    assert snapshot(two.project.place) == before


def test_check_names_the_target(two: Two) -> None:
    old = two.patch("0.7.1")
    (two.project.place / "gradloc/__init__.py").write_text("x = 2\n")
    two.make("--repo", two.checkouts["0.7.0"])
    trees.write_patch(two.project.place / "patches/0.7.1/gradloc.patch", old)
    refused(two.project.make("--check"), 1, "patches/0.7.1/gradloc.patch", "__init__.py")
    two.make("--check", "--target", "0.7.0")
    refused(two.project.make("--check", "--target", "0.7.1", "--base-tree", two.bases["0.7.1"]), 1, "__init__.py")
    # The given tree is the base of its own target; the other one has its own.
    shutil.rmtree(two.bases["0.7.0"] / "verl/trainer")
    refused(two.project.make("--check", "--base-tree", two.bases["0.7.0"]), 1, "patches/0.7.1/gradloc.patch")


def test_what_says_which_target_is_meant(two: Two, tmp_path: Path) -> None:
    assert "verl 0.7.1" in two.make("--init", tmp_path / "a", "--base", two.bases["0.7.1"])
    assert "verl 0.7.1" in two.make("--init", tmp_path / "b", "--base", tmp_path / "a")
    other = release(tmp_path / "other", "0.8.0")
    refused(two.project.make("--init", tmp_path / "c", "--base", other), 3, "is not verl 0.7.0 or 0.7.1")
    refused(two.project.make("--init", tmp_path / "c", "--target", "0.8.0"), 3, "no patch for verl 0.8.0")
    refused(two.project.make("--check", "--base-tree", other), 3, "is not verl 0.7.0 or 0.7.1", "--target")
    refused(two.project.make("--repo", tmp_path / "a", "--target", "0.7.0"), 3, "made from verl 0.7.1, not 0.7.0")
    # Without a note, the version of the base says it.
    (tmp_path / "a/.git/gradloc-target").unlink()
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


def test_a_wheel_that_is_not_the_pinned_one(two: Two, tmp_path: Path) -> None:
    wheel = two.project.place / "build/wheel/verl-0.7.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"other")
    refused(two.project.make("--init", tmp_path / "new"), 3, str(wheel), "SHA-256", "delete it")
