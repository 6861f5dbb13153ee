"""make_patch.sh: the same bytes everywhere, nothing lost between the two places of the package, honest --check."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import trees
from trees import ACTOR, ALGOS, DELETED, NEW, Project, refused, snapshot

PACKAGE = "verl/utils/gradloc"


def edit(checkout: Path) -> None:
    actor = checkout / ACTOR
    actor.write_text(actor.read_text() + "# last\n")
    (checkout / DELETED).unlink()
    (checkout / PACKAGE).mkdir()
    (checkout / NEW).write_text("x = 1\n")
    (checkout / PACKAGE / "__pycache__").mkdir()
    (checkout / PACKAGE / "__pycache__/x.pyc").write_bytes(b"stale")


@pytest.fixture
def source(base_tree: Path, tmp_path: Path) -> Path:
    return trees.copy_base(tmp_path / "base")


@pytest.fixture
def made(source: Path, tmp_path: Path) -> tuple[Project, Path]:
    """A project and its checkout after the first generation of the patch."""
    project = Project(tmp_path / "project", None)
    checkout = tmp_path / "checkout"
    done = project.make("--init", checkout, "--base", source)
    assert done.returncode == 0, done.stderr
    edit(checkout)
    done = project.make("--repo", checkout)
    assert done.returncode == 0, done.stderr
    return project, checkout


def state(project: Project, checkout: Path) -> list[dict[str, tuple[int, bytes]]]:
    return [snapshot(project.place), snapshot(checkout)]


def test_first_generation(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = made
    assert (project.place / "gradloc/__init__.py").read_text() == "x = 1\n"
    assert b"__pycache__" not in project.patch.read_bytes()
    assert project.make("--check", "--base-tree", source).returncode == 0
    # The patch leads from the base to what was edited, and a new checkout starts there.
    assert project.apply("--repo", source).returncode == 0
    shutil.rmtree(checkout / PACKAGE / "__pycache__")
    assert snapshot(source) == snapshot(checkout)
    assert project.apply("--repo", source, "--reverse").returncode == 0
    done = project.make("--init", tmp_path / "second", "--base", source)
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "second") == snapshot(checkout)
    before = state(project, tmp_path / "second")
    assert project.make("--repo", tmp_path / "second").returncode == 0
    assert state(project, tmp_path / "second") == before


def test_same_bytes_whatever_the_settings(made: tuple[Project, Path], tmp_path: Path) -> None:
    project, checkout = made
    wanted = project.patch.read_bytes()
    home = tmp_path / "home"
    home.mkdir()
    (home / "attributes").write_text("*.py -diff eol=crlf\n")
    (home / "ignore").write_text("*.py\n")
    (home / ".gitconfig").write_text(
        f"[core]\nautocrlf = true\nabbrev = 5\nattributesFile = {home}/attributes\nexcludesFile = {home}/ignore\n"
        "[diff]\nnoprefix = true\nmnemonicPrefix = true\ncontext = 10\nalgorithm = patience\nrenames = copies\n"
        "external = false\ninterHunkContext = 9\nsuppressBlankEmpty = true\n[color]\nui = always\n"
        "[commit]\ngpgSign = true\n[tag]\ngpgSign = true\n"
    )
    hostile = {
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "GIT_DIFF_OPTS": "-u9",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_DIR": str(tmp_path),
    }
    (checkout / ".git/info/exclude").write_text("gradloc/\n")
    (checkout / ".git/info/attributes").write_text("*.py binary\n")
    trees.git(checkout, "config", "diff.context", "0")
    done = project.make("--repo", checkout, **hostile)
    assert done.returncode == 0, done.stderr
    assert project.patch.read_bytes() == wanted
    # Committed, partly committed and packed edits give the same.
    trees.git(checkout, "add", "-f", NEW)
    trees.git(checkout, "commit", "-q", "-m", "one file")
    assert project.make("--repo", checkout).returncode == 0
    assert project.patch.read_bytes() == wanted
    (checkout / ".git/info/exclude").write_text("__pycache__/\n")
    (checkout / ".git/info/attributes").unlink()
    trees.git(checkout, "add", "-A")
    trees.git(checkout, "commit", "-q", "-m", "the rest")
    trees.git(checkout, "gc", "-q")
    assert project.make("--repo", checkout).returncode == 0
    assert project.patch.read_bytes() == wanted
    done = project.make("--init", tmp_path / "again", "--base", checkout, **hostile)
    assert done.returncode == 0, done.stderr
    assert project.make("--repo", tmp_path / "again", **hostile).returncode == 0
    assert project.patch.read_bytes() == wanted


def test_init_takes_wheel_tree_or_clone(source: Path, tmp_path: Path) -> None:
    project = Project(tmp_path / "project", None)
    wheel = tmp_path / "verl-0.7.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in trees.SOME_FILES:
            archive.write(source / name, name)
        archive.writestr("tests/__init__.py", "")
    assert project.make("--init", tmp_path / "from_wheel", "--base", wheel).returncode == 0
    assert project.make("--init", tmp_path / "from_tree", "--base", source).returncode == 0
    bases = [trees.git(tmp_path / name, "rev-parse", "gradloc-base") for name in ("from_wheel", "from_tree")]
    assert bases[0] == bases[1] == trees.git(tmp_path / "from_tree", "rev-parse", "HEAD")
    commit = trees.commit_all(source)
    refused(project.make("--init", tmp_path / "from_clone", "--base", source), 3, "neither commit")
    project.pin(commit)
    (source / "later.txt").write_text("later\n")
    trees.commit_all(source)
    assert project.make("--init", tmp_path / "from_clone", "--base", source).returncode == 0
    assert trees.git(tmp_path / "from_clone", "rev-parse", "HEAD", "gradloc-base").split() == [commit] * 2
    assert snapshot(tmp_path / "from_clone") == snapshot(tmp_path / "from_wheel")


def test_init_refuses(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = made
    new = tmp_path / "new"
    (tmp_path / "text.whl").write_text("no wheel")
    refused(project.make("--init", checkout, "--base", source), 3, "exists already")
    refused(project.make("--init", new, "--base", tmp_path / "absent"), 3, "does not exist")
    refused(project.make("--init", new, "--base", tmp_path / "text.whl"), 3, "not a wheel")
    refused(project.make("--init", new, "--base", project.place), 3, "verl/__init__.py")
    refused(project.make("--init", tmp_path / "text.whl/new", "--base", source), 3, "cannot be written")
    plain = tmp_path / "plain"
    shutil.copytree(checkout, plain, ignore=shutil.ignore_patterns(".git"))
    refused(project.make("--init", new, "--base", plain), 3, "does not apply")
    (source / "verl/version/version").write_text("0.8.0\n")
    refused(project.make("--init", new, "--base", source), 3, "not verl 0.7.0")
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".gradloc")]
    assert not new.exists() and not left


# The two places of the package


def test_package_is_taken_from_the_side_that_changed(made: tuple[Project, Path]) -> None:
    project, checkout = made
    ours, theirs = project.place / "gradloc", checkout / PACKAGE
    (ours / "a.py").write_text("a = 1\n")
    (theirs / "b.py").write_text("b = 1\n")
    (ours / "same.py").write_text("s = 1\n")
    (theirs / "same.py").write_text("s = 1\n")
    assert project.make("--repo", checkout).returncode == 0
    for side in (ours, theirs):
        assert sorted(path.name for path in side.glob("*.py")) == ["__init__.py", "a.py", "b.py", "same.py"]
    (ours / "a.py").write_text("a = 2\n")
    (theirs / "b.py").unlink()
    (theirs / NEW.rpartition("/")[2]).write_text("x = 2\n")
    assert project.make("--repo", checkout).returncode == 0
    for side in (ours, theirs):
        assert (side / "a.py").read_text() == "a = 2\n" and (side / "__init__.py").read_text() == "x = 2\n"
        assert not (side / "b.py").exists()
    assert b"+a = 2" in project.patch.read_bytes() and b"b.py" not in project.patch.read_bytes()


@pytest.mark.parametrize("ours", ["x = 2\n", None])
def test_changed_on_both_sides(made: tuple[Project, Path], ours: str | None) -> None:
    project, checkout = made
    file = project.place / "gradloc/__init__.py"
    (project.place / "gradloc/other.py").write_text("y = 1\n")
    file.unlink() if ours is None else file.write_text(ours)
    (checkout / NEW).write_text("x = 3\n")
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, "__init__.py", "changed both")
    assert state(project, checkout) == before


def test_an_unpatched_side_is_no_deletion(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = made
    trees.commit_all(source)
    trees.git(source, "tag", "gradloc-base")
    before = state(project, source)
    refused(project.make("--repo", source), 3, "apply the patch to it first")
    assert state(project, source) == before
    shutil.rmtree(project.place / "gradloc")
    refused(project.make("--repo", checkout), 3, "gradloc/ is empty")
    assert (checkout / NEW).exists()


def test_stale_checkout_does_not_undo_the_work_of_another(made: tuple[Project, Path], source: Path) -> None:
    project, checkout = made
    second = checkout.parent / "second"
    assert project.make("--init", second, "--base", source).returncode == 0
    (second / ALGOS).write_text("# hook\n")
    assert project.make("--repo", second).returncode == 0
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, "would be lost")
    assert state(project, checkout) == before
    assert project.make("--repo", checkout, "--force").returncode == 0
    assert ALGOS.encode() not in project.patch.read_bytes()


def test_interrupted_regeneration_is_repeated(made: tuple[Project, Path]) -> None:
    """The state after a kill between the two files: a new patch beside an old checksum."""
    project, checkout = made
    (checkout / NEW).write_text("x = 2\n")
    checksum = Path(f"{project.patch}.sha256")
    old = checksum.read_bytes()
    record = checkout / ".git/gradloc-patch.sha256"
    recorded = record.read_bytes()
    assert project.make("--repo", checkout).returncode == 0
    wanted = state(project, checkout)
    checksum.write_bytes(old)
    record.write_bytes(recorded)
    assert project.make("--repo", checkout).returncode == 0
    assert state(project, checkout) == wanted


# Revisions and other outputs


def test_base_head_and_output(made: tuple[Project, Path], tmp_path: Path) -> None:
    project, checkout = made
    trees.git(checkout, "add", "-A")
    trees.git(checkout, "commit", "-q", "-m", "first")
    (checkout / ALGOS).write_text("# second\n")
    output = tmp_path / "out.patch"
    before = state(project, checkout)
    done = project.make("--repo", checkout, "--base", "HEAD", "--output", output)
    assert done.returncode == 0, done.stderr
    assert ALGOS in output.read_text() and ACTOR not in output.read_text()
    assert project.make("--repo", checkout, "--head", "HEAD", "--output", output).returncode == 0
    assert output.read_bytes() == project.patch.read_bytes()
    assert Path(f"{output}.sha256").read_text().split()[1] == "out.patch"
    assert state(project, checkout) == before
    assert project.make("--repo", checkout, "--head", "HEAD").returncode == 0
    (project.place / "gradloc/mine.py").write_text("m = 1\n")
    refused(project.make("--repo", checkout, "--head", "HEAD"), 3, "changes that")
    refused(project.make("--repo", checkout, "--base", "nothing"), 3, "not a revision")
    refused(project.make("--repo", checkout, "--head", "nothing"), 3, "not a revision")
    refused(project.make("--repo", checkout, "--output", tmp_path / "absent/x"), 3, "existing directory")


def test_a_patch_that_would_not_be_taken_is_not_written(made: tuple[Project, Path]) -> None:
    project, checkout = made
    before = project.patch.read_bytes()
    (checkout / ALGOS).chmod(0o755)
    refused(project.make("--repo", checkout), 3, "apply_patch.py would not take the patch", ALGOS)
    assert project.patch.read_bytes() == before


def test_what_editors_and_tools_leave_is_no_edit(made: tuple[Project, Path]) -> None:
    project, checkout = made
    before = project.patch.read_bytes()
    for name in ("protocol.py.orig", "protocol.py.rej", ".protocol.py.swp", "protocol.py~"):
        (checkout / "verl" / name).write_text("left\n")
    assert project.make("--repo", checkout).returncode == 0
    assert project.patch.read_bytes() == before


def test_a_newer_base_with_a_conflict(made: tuple[Project, Path], tmp_path: Path) -> None:
    """The way that CONTRIBUTING.md describes."""
    project, _ = made
    newer = trees.copy_base(tmp_path / "newer")
    trees.commit_all(newer)
    actor = newer / ACTOR
    theirs = actor.read_text() + "# theirs\n"
    actor.write_text(theirs)
    project.pin(trees.commit_all(newer))
    trees.git(newer, "tag", "gradloc-base")
    shutil.copytree(newer, tmp_path / "unpatched")
    conflict = trees.run("git", "-C", newer, "apply", "--3way", project.patch)
    assert conflict.returncode == 1 and "<<<<<<<" in actor.read_text()
    actor.write_text(theirs + "# last\n")
    package = snapshot(project.place / "gradloc")
    done = project.make("--repo", newer)
    assert done.returncode == 0, done.stderr
    assert snapshot(project.place / "gradloc") == package
    assert project.make("--check", "--base-tree", tmp_path / "unpatched").returncode == 0
    assert project.apply("--repo", tmp_path / "unpatched").returncode == 0
    assert snapshot(tmp_path / "unpatched") == snapshot(newer)


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("verl/a.py", b"x = 1 \n", "whitespace"),
        ("verl/a.py", b"x = 1\r\n", "whitespace"),
        ("verl/a.py", b"x = 1", "newline"),
        ("verl/a.bin", b"\0\1", "binary"),
        (f"{PACKAGE}/notes.txt", b"notes\n", "Python files only"),
    ],
)
def test_content_that_a_patch_should_not_hold(
    made: tuple[Project, Path], path: str, content: bytes, words: str
) -> None:
    project, checkout = made
    (checkout / path).write_bytes(content)
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, Path(path).name, words)
    assert state(project, checkout) == before


def test_bad_checkouts(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = made
    refused(project.make("--repo", tmp_path / "absent"), 3, "not a directory")
    refused(project.make("--repo", tmp_path), 3, "not a usable git checkout")
    refused(project.make("--repo", checkout / "verl"), 3, "top of a verl checkout")
    (checkout / "verl/link.py").symlink_to("protocol.py")
    refused(project.make("--repo", checkout), 3, "link.py", "symbolic link")
    (checkout / "verl/link.py").unlink()
    (project.place / "gradloc/data.txt").write_text("data\n")
    refused(project.make("--repo", checkout), 3, "data.txt")
    (project.place / "gradloc/data.txt").unlink()
    trees.commit_all(source)
    refused(project.make("--repo", source), 3, "--base")
    (source / "setup.py").write_text("1\n")
    trees.git(source, "tag", "gradloc-base")
    trees.commit_all(source)
    refused(project.make("--repo", source), 3, "setup.py", "outside verl/")
    fresh = Project(tmp_path / "fresh", None)
    assert fresh.make("--init", tmp_path / "untouched", "--base", trees.copy_base(tmp_path / "b")).returncode == 0
    refused(fresh.make("--repo", tmp_path / "untouched"), 3, "nothing differs")
    (fresh.place / "patches/BASE_COMMIT").write_text("COMMIT=abc\n")
    refused(fresh.make("--check"), 3, "BASE_COMMIT")


def test_usage(made: tuple[Project, Path]) -> None:
    project, checkout = made
    for arguments in (
        [],
        ["--repo"],
        ["--repo", ""],
        ["--check", "--repo", checkout],
        ["--check", "--output", "x"],
        ["--repo", checkout, "--base-tree", checkout],
        ["--unknown"],
        ["extra"],
    ):
        refused(project.make(*arguments), 2)
    done = project.make("--help")
    assert done.returncode == 0 and "Exit codes" in done.stdout


def test_no_git(made: tuple[Project, Path], tmp_path: Path) -> None:
    project, checkout = made
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    refused(project.make("--repo", checkout, PATH=str(tmp_path)), 3, "git is not on PATH")


# --check


def check(project: Project, source: Path):
    return project.make("--check", "--base-tree", source)


def test_check_notices(made: tuple[Project, Path], source: Path) -> None:
    project, _ = made
    data = project.patch.read_bytes()
    module = project.place / "gradloc/__init__.py"
    module.write_text("x = 2\n")
    refused(check(project, source), 1, "__init__.py")
    module.write_text("x = 1\n")
    (project.place / "gradloc/new.py").write_text("n = 1\n")
    refused(check(project, source), 1, "new.py")
    (project.place / "gradloc/new.py").rename(project.place / "gradloc/notes.txt")
    refused(check(project, source), 3, "notes.txt")
    (project.place / "gradloc/notes.txt").unlink()
    Path(f"{project.patch}.sha256").write_text(f"{'0' * 64}  gradloc.patch\n")
    refused(check(project, source), 1, "checksum")
    trees.write_patch(project.patch, data.replace(b"+# last", b"+# last "))
    refused(check(project, source), 1, "whitespace")
    trees.write_patch(project.patch, data.replace(b"@@ def", b"@@ class").replace(b"@@ class", b"@@ xclass"))
    refused(check(project, source), 1, "other bytes")
    trees.write_patch(project.patch, b"text before\n" + data)
    refused(check(project, source), 1, "other bytes")
    trees.write_patch(project.patch, b"nonsense\n")
    refused(check(project, source), 1, "does not apply")
    trees.write_patch(project.patch, data)
    assert check(project, source).returncode == 0
    (source / ACTOR).write_text("other\n")
    refused(check(project, source), 1, "does not apply")
    refused(check(project, project.place), 3, "--base-tree")
    project.patch.unlink()
    refused(check(project, source), 1, "missing")


def test_check_without_a_base(made: tuple[Project, Path]) -> None:
    """PYTHON=false stands for a machine that cannot download the wheel."""
    project, _ = made
    command = ("env", "PYTHON=false", "bash", project.place / "make_patch.sh", "--check")
    done = trees.run(*command)
    assert done.returncode == 0 and "NOT checked" in done.stdout, done.stderr
    (project.place / "gradloc/__init__.py").write_text("x = 2\n")
    refused(trees.run(*command), 1, "__init__.py")


def test_the_real_patch_is_in_sync(base_tree: Path) -> None:
    command = ("env", f"PYTHON={sys.executable}", "bash", trees.ROOT / "make_patch.sh")
    done = trees.run(*command, "--check", "--base-tree", base_tree)
    assert done.returncode == 0, done.stderr


def test_the_real_patch_comes_back_from_a_new_checkout(base_tree: Path, tmp_path: Path) -> None:
    command = ("env", f"PYTHON={sys.executable}", "bash", trees.ROOT / "make_patch.sh")
    done = trees.run(*command, "--init", tmp_path / "checkout", "--base", base_tree)
    assert done.returncode == 0, done.stderr
    done = trees.run(*command, "--repo", tmp_path / "checkout", "--output", tmp_path / "gradloc.patch")
    assert done.returncode == 0, done.stderr
    for name in ("gradloc.patch", "gradloc.patch.sha256"):
        assert (tmp_path / name).read_bytes() == (trees.ROOT / "patches" / name).read_bytes()
