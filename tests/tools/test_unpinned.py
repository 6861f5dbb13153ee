"""apply_patch.py --unpinned: a verl that is no target, and that every hunk fits; and tools/which_hooks_fit.py."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import apply_patch
import trees
from tools import which_hooks_fit
from trees import ACTOR, ALGOS, DELETED, NEW, Patch, Project, refused, snapshot

UNTESTED = "is none that this patch was tested with"


@pytest.fixture
def fork(tree: Path) -> Path:
    """A release tree in which hooks are further down."""
    (tree / "verl/version/version").write_text("0.7.9\n")
    actor = tree / ACTOR
    lines = actor.read_text().splitlines(keepends=True)
    at = lines.index("import os\n") - 4
    actor.write_text("".join([*lines[:at], "# theirs\n" * 3, *lines[at:]]))
    algos = tree / ALGOS
    algos.write_text(f"# theirs\n{algos.read_text()}")
    return tree


def said(project: Project, *arguments: str | Path, code: int = 0) -> str:
    done = project.apply(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_it_is_applied_checked_and_taken_out(project: Project, fork: Path) -> None:
    before = snapshot(fork)
    refused(project.apply("--repo", fork), 3, "is 0.7.9", "or try --unpinned")
    command = ["--repo", fork, "--unpinned"]
    told = said(project, *command, "--check")
    assert UNTESTED in told and "(0.7.9)" in told and "spike_drill_step" in told
    assert snapshot(fork) == before
    told = said(project, *command)
    assert UNTESTED in told and "(as for verl 0.7.0, " in told
    actor = (fork / ACTOR).read_text()
    assert actor.startswith("# first\n") and "# theirs\n" in actor and "import os  # kept\n" in actor
    assert actor.endswith("# last\n") and (fork / NEW).exists() and not (fork / DELETED).exists()
    assert "(as for verl 0.7.0)" in said(project, *command, "--check", code=10)
    assert "already applied" in said(project, *command)
    refused(project.apply("--repo", fork, "--reverse"), 3, "where --unpinned was given, it is needed here, too")
    assert UNTESTED not in said(project, *command, "--reverse")
    assert snapshot(fork) == before
    assert "nothing to reverse" in said(project, *command, "--reverse")


def test_a_target_is_taken_as_ever(project: Project, tree: Path) -> None:
    for arguments in (["--check"], [], ["--reverse"]):
        told = said(project, "--repo", tree, "--unpinned", *arguments)
        assert UNTESTED not in told and "(verl 0.7.0, " in told
    said(project, "--repo", tree)
    (tree / NEW).write_text("left behind, and changed\n")
    shutil.copy(trees.BASE_TREE / ACTOR, tree / ACTOR)
    refused(project.apply("--repo", tree, "--unpinned"), 3, "patched")


@pytest.mark.parametrize("place", ["middle", "twice", "end", "start", "gone", "deleted"])
def test_one_hunk_that_does_not_fit_is_enough(project: Project, fork: Path, place: str) -> None:
    file, text = fork / ACTOR, (fork / ACTOR).read_text()
    if place == "middle":
        file.write_text(text.replace("import os\n", "import os as system\n"))
    elif place == "twice":
        at = text.index("import os\n")
        file.write_text(f"{text}{text[at - 200 : at + 200]}")
    elif place == "end":
        file.write_text(f"{text}# theirs\n")
    elif place == "start":
        file.write_text(f"# theirs\n{text}")
    elif place == "gone":
        file.unlink()
    else:
        file = fork / DELETED
        file.write_text("# theirs\n")
    before = snapshot(fork)
    name = str(file.relative_to(fork))
    refused(project.apply("--repo", fork, "--unpinned"), 3, "no patch fits", name, "which_hooks_fit.py")
    refused(project.apply("--repo", fork, "--unpinned", "--check"), 12, name)
    assert snapshot(fork) == before


def test_a_tree_that_is_partly_patched(project: Project, fork: Path, tmp_path: Path) -> None:
    shutil.copytree(fork, tmp_path / "before")
    said(project, "--repo", fork, "--unpinned")
    shutil.copy(tmp_path / "before" / ACTOR, fork / ACTOR)
    refused(project.apply("--repo", fork, "--unpinned"), 3, "partly patched", ACTOR)
    refused(project.apply("--repo", fork, "--unpinned", "--reverse"), 3, "partly patched", ACTOR)


@pytest.mark.parametrize("arguments", [[], ["--reverse"]], ids=["apply", "reverse"])
def test_an_interrupted_run_is_undone_and_repeated(project: Project, fork: Path, arguments: list[str]) -> None:
    command = ["--repo", fork, "--unpinned"]
    before = snapshot(fork)
    if arguments:
        said(project, *command)
    start = snapshot(fork)
    killed = project.apply_with(trees.at_call("replace", 3, "os.kill(os.getpid(), 9)"), *command, *arguments)
    assert killed.returncode == -9 and snapshot(fork) != start
    refused(project.apply(*command, "--check"), 11, "interrupted")
    assert "every file was put back" in said(project, *command, *arguments)
    if not arguments:
        said(project, *command, "--reverse")
    assert snapshot(fork) == before


def test_a_failing_write_puts_every_file_back(project: Project, fork: Path) -> None:
    before = snapshot(fork)
    failed = project.apply_with(trees.at_call("replace", 4, "raise OSError('disk')"), "--repo", fork, "--unpinned")
    refused(failed, 4, "every file was put back")
    assert snapshot(fork) == before


def test_a_checkout_may_be_at_any_commit_but_has_no_local_changes(project: Project, fork: Path) -> None:
    trees.commit_all(fork)
    said(project, "--repo", fork, "--unpinned", "--check")
    (fork / "verl/__init__.py").write_text("# changed\n")
    refused(project.apply("--repo", fork, "--unpinned"), 3, "local changes", "verl/__init__.py")
    said(project, "--repo", fork, "--unpinned", "--force")


def test_another_commit_in_which_no_file_of_the_patch_differs(project: Project, tree: Path) -> None:
    trees.commit_all(tree)
    refused(project.apply("--repo", tree), 3, "not the base commit", "--unpinned")
    told = said(project, "--repo", tree, "--unpinned")
    assert UNTESTED in told and "(verl 0.7.0, " in told
    assert UNTESTED not in said(project, "--repo", tree, "--unpinned", "--reverse")


def test_an_installed_verl(project: Project, fork: Path) -> None:
    refused(project.apply("--installed", PYTHONPATH=str(fork)), 3, "is 0.7.9")
    for arguments in ([], ["--reverse"]):
        done = project.apply("--installed", "--unpinned", *arguments, PYTHONPATH=str(fork))
        assert done.returncode == 0 and "(as for verl 0.7.0, " in done.stdout, done.stderr


@pytest.mark.parametrize("place", ["--installed", "--repo"])
def test_without_the_option_no_file_in_use_is_called_left_behind(
    project: Project, fork: Path, small_patch: Patch, place: str
) -> None:
    if place == "--repo":
        project.add_target("0.7.1", small_patch)
    command = [place] if place == "--installed" else [place, fork]
    paths = {"PYTHONPATH": str(fork)} if place == "--installed" else {}
    before = snapshot(fork)
    assert project.apply(*command, "--unpinned", **paths).returncode == 0
    for arguments, code in (([], 3), (["--reverse"], 3), (["--check"], 12)):
        done = project.apply(*command, *arguments, **paths)
        refused(done, code, "it is patched with --unpinned: give that here, too")
        assert "rm -r" not in done.stderr and "left" not in done.stderr
    # Where verl's own files are as they were, the new ones are left behind.
    new = (fork / NEW).read_bytes()
    assert project.apply(*command, "--unpinned", "--reverse", **paths).returncode == 0
    assert snapshot(fork) == before
    (fork / NEW).parent.mkdir(parents=True, exist_ok=True)
    (fork / NEW).write_bytes(new)
    refused(project.apply(*command, **paths), 3, "left files in it", "rm -r")


def test_which_target_is_taken(project: Project, fork: Path, small_patch: Patch) -> None:
    """The one for the version that the tree says it is, the one that is named, or the newest."""
    project.add_target("0.7.1", small_patch)
    command = ["--repo", fork, "--unpinned", "--check"]
    assert "(as for verl 0.7.1, " in said(project, *command)
    assert "(as for verl 0.7.0, " in said(project, *command, "--target", "0.7.0")
    (fork / "verl/version/version").write_text("0.7.0\n")
    assert "(as for verl 0.7.0, " in said(project, *command)


def test_drawn_edits_are_refused_or_give_what_git_gives(tmp_path: Path, small_patch: Patch) -> None:
    """Lines put in, taken out and repeated around the hunks. What is patched can be told from what is not."""
    trees.copy_base(tmp_path / "repo")
    patches = {patch.path: patch for patch in apply_patch.parse_patch(small_patch.hooks)}
    patch = patches[ACTOR]
    original = (tmp_path / "repo" / ACTOR).read_bytes().splitlines(keepends=True)[:60]
    (tmp_path / "small.patch").write_bytes(small_patch.hooks)
    trees.git(tmp_path / "repo", "init", "-q")
    taken = 0
    draw = random.Random(1)
    for _ in range(60):
        lines = list(original)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(lines))
            start = draw.randrange(len(lines))
            lines[at : at + draw.choice([0, 0, 1])] = draw.choice(
                [[b"# theirs\n"], lines[start : start + draw.randint(1, 9)]]
            )
        content = b"".join(lines)
        moved = apply_patch.moved_patch(patch, content)
        if moved is None:
            continue
        taken += 1
        (tmp_path / "repo" / ACTOR).write_bytes(content)
        trees.git(tmp_path / "repo", "apply", f"--include={ACTOR}", str(tmp_path / "small.patch"))
        patched = moved.result(content)
        assert patched == (tmp_path / "repo" / ACTOR).read_bytes()
        assert apply_patch.moved_patch(patch, patched) == moved
        assert moved.reversed().result(patched) == content
    assert 10 < taken < 60


def test_the_real_patch_as_git_applies_it(base_tree: Path, tmp_path: Path) -> None:
    tree = trees.copy_base(tmp_path / "tree", files=None)
    (target,) = apply_patch.narrowed(apply_patch.read_targets(), trees.TARGET)
    for part in (target.hooks, target.fixes):
        for change in apply_patch.load_part(part):
            file = tree / change.path
            file.write_text(f"# theirs\n{file.read_text()}")
    (tree / "verl/version/version").write_text("9.9\n")
    by_git = shutil.copytree(tree, tmp_path / "by_git")
    trees.git(by_git, "init", "-q")
    trees.git(by_git, "apply", *map(str, target.parts))
    before = snapshot(tree)
    command = [trees.ROOT / "apply_patch.py", "--repo", tree, "--unpinned", "--target", trees.TARGET]
    assert trees.run("python3", *command).returncode == 0
    assert snapshot(tree) == snapshot(by_git)
    assert trees.run("python3", *command, "--check").returncode == 10
    assert trees.run("python3", *command, "--reverse").returncode == 0
    assert snapshot(tree) == before


def test_the_commit_of_main_has_the_hooks_of_the_release_before_it() -> None:
    """It has no wheel, so what can be checked anywhere is that its patch is that of 0.9.1 in other lines."""
    targets = {target.version: target for target in apply_patch.read_targets()}
    main, release = targets["0.10.0.dev"], targets["0.9.1"]
    assert main.wheel_sha256 is None and main.commit is not None and release.wheel_sha256 is not None
    for ours, theirs in ((main.hooks, release.hooks), (main.fixes, release.fixes)):
        for change, same in zip(apply_patch.load_part(ours), apply_patch.load_part(theirs), strict=True):
            assert change.path == same.path and (change.old == same.old) == (change.new == same.new)
            ((hunks,), (others,)) = change.parts, same.parts
            assert [(hunk.old, hunk.new) for hunk in hunks] == [(hunk.old, hunk.new) for hunk in others]
    if (trees.ROOT / "build/0.10.0.dev/base/verl").is_dir():
        assert which_hooks_fit.main([str(trees.ROOT / "build/0.10.0.dev/base")]) == 0


# tools/which_hooks_fit.py


def fits(capsys: pytest.CaptureFixture[str], code: int, *arguments: str | Path) -> str:
    assert which_hooks_fit.main([*map(str, arguments), "--target", trees.TARGET]) == code
    return capsys.readouterr().out


def test_which_hooks_fit(base_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = trees.copy_base(tmp_path / "tree", files=None)
    told = fits(capsys, 0, tree)
    assert told.count(": fits\n") == told.count(": fits") > 20 and "Every hook and fix fits." in told
    assert "python -m gradloc_verl" in told

    score = tree / "verl/utils/reward_score/__init__.py"
    score.write_text(f"# theirs\n{score.read_text()}")
    assert "verl/utils/reward_score/__init__.py:104: fits, 1 line further down\n" in fits(capsys, 0, tree)

    expected = '        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")\n'
    score.write_text(score.read_text().replace(expected, "        return theirs()\n"))
    tracking = tree / "verl/utils/tracking.py"
    tracking.unlink()
    told = fits(capsys, 1, tree)
    assert "reward_score/__init__.py:104: rejected\n" in told
    assert f"      - {expected}      +         return theirs()\n" in told
    assert "tracking.py" in told and "rejected\n      there is no such file\n" in told
    assert "Every" not in told

    score.write_text((base_tree / "verl/utils/reward_score/__init__.py").read_text().replace("\n", "\r\n"))
    assert "CRLF" in fits(capsys, 1, tree)


def test_which_hooks_fit_a_patched_verl(capsys: pytest.CaptureFixture[str]) -> None:
    told = fits(capsys, 1, trees.ROOT / "build" / trees.TARGET / "verl")
    assert "rejected\n      it is there already: this verl is patched\n" in told


def test_which_hooks_fit_a_verl_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert which_hooks_fit.main([str(tmp_path)]) == 3
    assert which_hooks_fit.main(["main"]) == 3
    error = capsys.readouterr().err
    assert error.count("is neither a tree with verl/__init__.py nor a version") == 2
