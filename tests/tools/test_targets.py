"""apply_patch.py with a patch for each of several verl releases: which one it takes, and what it says otherwise."""

import shutil
import subprocess
from pathlib import Path

import pytest

import apply_patch
import trees
from trees import ACTOR, ALGOS, NEW, Patch, Project, refused, unchanged

BOTH = "0.7.0 and 0.7.1"


@pytest.fixture(scope="session")
def next_patch(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Patch:
    return trees.small_patch(tmp_path_factory.mktemp("next"), "0.7.1")


@pytest.fixture
def two(project: Project, next_patch: Patch) -> Project:
    """A project with a second target, whose commit is not known."""
    project.add_target("0.7.1", next_patch)
    return project


@pytest.fixture
def newer(tree: Path, tmp_path: Path) -> Path:
    """A release tree of the second target."""
    return trees.make_next_release(shutil.copytree(tree, tmp_path / "newer"))


@pytest.mark.parametrize("version", ["0.7.0", "0.7.1"])
def test_each_release_gets_its_own_patch(two: Project, tree: Path, newer: Path, version: str) -> None:
    place = {"0.7.0": tree, "0.7.1": newer}[version]
    with unchanged(place):
        assert f"(verl {version}, " in two.said("--installed", "--check", PYTHONPATH=str(place))
        assert f"(verl {version}, " in two.said(place)
        assert (place / NEW).exists()
        assert ("as in 0.7.1" in (place / ALGOS).read_text()) == (version == "0.7.1")
        assert f"(verl {version})" in two.said(place, "--check", code=10)
        two.said(place, "--target", version, "--reverse")


@pytest.mark.parametrize("release", [None, "0.9.9\n"])
def test_content_decides_where_the_version_says_nothing(two: Project, newer: Path, release: str | None) -> None:
    """Also after a kill, when half of the files are patched."""
    version = newer / "verl/version/version"
    version.unlink() if release is None else version.write_text(release)
    with unchanged(newer):
        assert "(verl 0.7.1, " in two.said(newer, "--check")
        killed = two.apply_with(trees.at_call("replace", 4, "os.kill(os.getpid(), 9)"), newer)
        assert killed.returncode == -9
        refused(two.apply(newer, "--check"), 11, "an interrupted run left", "run again without --check")
        assert "(verl 0.7.1, " in two.said(newer)
        two.said(newer, "--check", code=10)
        assert "(verl 0.7.1, " in two.said(newer, "--reverse")


def test_a_commit_decides_before_the_content(two: Project, tree: Path, newer: Path) -> None:
    """In a checkout of one target with a file of the other, the changed file is named. The other has no commit."""
    trees.commit_all(newer)
    assert "(verl 0.7.1, " in two.said(newer, "--check")
    two.pin(trees.commit_all(tree))
    shutil.copy(newer / ALGOS, tree / ALGOS)
    refused(two.apply(tree, "--check"), 12, f"found verl 0.7.0 with changes in {ALGOS}; ")
    assert "(verl 0.7.1, " in two.said(tree, "--check", "--force")
    (newer / "verl/__init__.py").write_text("# changed\n")
    refused(two.apply(newer), 3, "local changes", "verl/__init__.py")


def one_sentence(done: subprocess.CompletedProcess[str], code: int, found: str) -> None:
    """Says which verl is there, which ones the patch takes, and what takes others."""
    refused(done, code, found, f"the patch takes {BOTH} as released", "0.9 has the plugin (docs/use/plugin.md)")
    assert len(done.stderr.strip()) <= 200, done.stderr


def test_a_verl_of_no_target_and_a_target_that_is_named(two: Project, newer: Path) -> None:
    for file in (ACTOR, ALGOS):
        (newer / file).write_text("other\n")
    one_sentence(two.apply(newer), 3, f"found verl 0.7.1 with changes in {ALGOS} and 1 more; ")
    (newer / "verl/version/version").write_text("main-of-some-day-with-a-long-name\n")
    given = [newer]
    with unchanged(newer):
        for arguments, code in (([*given, "--check"], 12), (["--installed"], 3), ([*given, "--reverse"], 3)):
            done = two.apply(*arguments, PYTHONPATH=str(newer))
            one_sentence(done, code, "found verl main-of-some; ")
    trees.make_next_release(trees.copy_base(newer))
    refused(two.apply(newer, "--target", "0.7.0"), 3, "is 0.7.1, not 0.7.0; leave --target out")
    refused(two.apply(newer, "--target", "0.6.0"), 3, "no patch for verl 0.6.0", "0.7.0 or 0.7.1")


@pytest.mark.parametrize("action", ["--reverse", "--check"])
def test_a_wrong_target_advises_no_deletion_of_a_patch(two: Project, newer: Path, action: str) -> None:
    two.said(newer)
    arguments = ["--installed", "--target", "0.7.0", action]
    done = two.apply(*arguments, PYTHONPATH=str(newer))
    refused(done, 12 if action == "--check" else 3, "is 0.7.1, not 0.7.0; leave --target out")
    assert "rm -r" not in done.stderr and "restore" not in done.stderr
    # As an older patch left it: its content is of no target, the version is.
    for file in (ACTOR, ALGOS, NEW):
        (newer / file).write_text("# of an older patch\n")
    done = two.apply(*arguments, PYTHONPATH=str(newer))
    assert "is 0.7.1, not 0.7.0; leave --target out" in done.stderr
    assert "rm -r" not in done.stderr


def test_a_tree_that_fits_several_has_to_say_which_it_is(project: Project, tree: Path, small_patch: Patch) -> None:
    """Two releases may have the same files where the patch changes them."""
    project.add_target("0.7.1", small_patch)
    assert "(verl 0.7.0, " in project.said(tree, "--check")
    (tree / "verl/version/version").write_text("0.7.1.dev3\n")
    assert "(verl 0.7.1, " in project.said(tree, "--check")
    (tree / "verl/version/version").unlink()
    refused(project.apply(tree, "--check"), 12, f"fits the patches for {BOTH}", "--target")
    assert "(verl 0.7.0, " in project.said(tree, "--check", "--target", "0.7.0")


def test_the_real_targets(tmp_path: Path) -> None:
    targets = apply_patch.read_targets()
    assert [target.version for target in targets] == ["0.7.0", "0.7.1", "0.9.1"]
    assert (apply_patch.PATCHES / "DEFAULT").read_text().strip() == "0.7.0"
    for target in targets:
        assert NEW in {change.path for change in apply_patch.load_target(target)}
        for part in target.parts:
            assert trees.run("sha256sum", "-c", f"{part.name}.sha256", cwd=part.parent).returncode == 0, part
    said = f"apply_patch: {apply_patch.not_taken(tmp_path, [ACTOR] * 30)}"
    assert len(said) <= 200 and "takes 0.7.0, 0.7.1 and 0.9.1 as released" in said, said
