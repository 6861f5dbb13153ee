"""make_patch.sh: the same bytes everywhere, hooks and fixes told apart, nothing lost, an honest --check."""

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trees
from trees import ACTOR, ALGOS, DELETED, KEYS, NEW, Project, ran, refused, snapshot, unchanged

pytestmark = pytest.mark.slow

PACKAGE = "verl/utils/gradloc"
SCORES = "verl/utils/reward_score"


@dataclasses.dataclass
class Made:
    """A project, its base, and a checkout after hooks were made there."""

    project: Project
    base: Path
    checkout: Path

    def init(self, place: Path, **environment: str) -> Path:
        ran(self.project.make("--init", place, "--target", "0.7.0", "--base-tree", self.base, **environment))
        return place

    def repo(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.project.make("--repo", self.checkout, "--base-tree", self.base, *arguments, **environment)

    def check(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.project.make("--check", "--base-tree", self.base, **environment)

    def state(self) -> list[dict[str, tuple[int, bytes]]]:
        return [snapshot(self.project.place), snapshot(self.checkout)]

    def change(self, name: str, old: str, new: str) -> None:
        file = self.checkout / name
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))


@pytest.fixture
def made(base_tree: Path, tmp_path: Path) -> Made:
    """A project with sources, and a checkout in which verl's own files were edited."""
    project = Project(tmp_path / "project", None)
    for name, text in (
        ("gradloc/__init__.py", "x = 1\n"),
        ("gradloc/deep/zone.py", "z = 1\n"),
        ("gradloc/README.md", "What is here.  \n"),
        ("rewards/ours.py", "ours = 1\n"),
        ("config/gradloc/actor.yaml", "key: 1\n"),
    ):
        trees.write(project.place / name, text)
    base = trees.copy_base(tmp_path / "base")
    trees.write(base / SCORES / "__init__.py", "# verl's\n")
    made = Made(project, base, tmp_path / "checkout")
    made.init(made.checkout)
    actor = made.checkout / ACTOR
    actor.write_text(actor.read_text() + "# last\n")
    (made.checkout / DELETED).unlink()
    for name in ("__pycache__/x.pyc", "protocol.py.orig", ".protocol.py.swp"):
        trees.write(made.checkout / "verl" / name, "left by a tool, and no edit\n")
    ran(made.repo())
    return made


@pytest.fixture
def fixed(made: Made) -> Made:
    """With a fix in a file that has a hook and one in a file that has none."""
    before = made.project.hooks.read_bytes()
    made.change(ACTOR, "import os\n", "import os  # fixed\n")
    made.change(ALGOS, "import numpy", "# fixed\nimport numpy")
    ran(made.repo("--fixes"))
    assert made.project.hooks.read_bytes() == before
    return made


# What the parts hold


def test_the_parts_lead_from_the_base_to_what_was_edited(fixed: Made, tmp_path: Path) -> None:
    package, hooks, fixes = (part.read_text() for part in fixed.project.parts("0.7.0"))
    names = [line.rpartition(" b/")[2] for line in package.splitlines() if line.startswith("diff --git ")]
    assert names == [KEYS, NEW, f"{PACKAGE}/deep/zone.py", f"{SCORES}/ours.py"]
    assert sorted(line.rpartition(" b/")[2] for line in hooks.splitlines() if "diff --git" in line) == [DELETED, ACTOR]
    assert "+# last" in hooks and "fixed" not in hooks and "new file" not in hooks + fixes
    assert "+import os  # fixed" in fixes and "+# fixed" in fixes
    # A release is all of it in one file.
    ran(fixed.project.make("--release", "0.7.0", "--base-tree", fixed.base))
    release = fixed.project.place / "build/gradloc-0.7.0.patch"
    for given in ([], ["--patch-file", release]):
        with unchanged(fixed.base):
            fixed.project.said("--repo", fixed.base, *given)
            for name in (ACTOR, ALGOS, NEW, KEYS, f"{SCORES}/ours.py", f"{PACKAGE}/deep/zone.py"):
                assert (fixed.base / name).read_bytes() == (fixed.checkout / name).read_bytes()
            assert not (fixed.base / DELETED).exists() and not (fixed.base / PACKAGE / "README.md").exists()
            fixed.project.said("--repo", fixed.base, "--reverse")
    # A new checkout starts there, and writes the same.
    second = dataclasses.replace(fixed, checkout=fixed.init(tmp_path / "second"))
    start = second.state()
    ran(second.repo())
    assert second.state() == start


def test_an_edit_of_the_linked_package_is_one_of_the_sources(made: Made) -> None:
    (made.checkout / NEW).write_text("x = 2\n")
    (made.checkout / PACKAGE / "new.py").write_text("n = 1\n")
    (made.checkout / KEYS).write_text("key: 2\n")
    refused(made.check(), 1, "is not what the sources hold", NEW, "new.py", KEYS, "--sources")
    hooks = made.project.hooks.read_bytes()
    ran(made.project.make("--sources"))
    ran(made.check())
    package = made.project.package.read_text()
    assert "+x = 2" in package and "+n = 1" in package and "+key: 2" in package
    assert made.project.hooks.read_bytes() == hooks
    assert (made.project.place / "gradloc/new.py").read_text() == "n = 1\n"


REFUSED = [
    ("rewards/__init__.py", b"", ["would replace a file of verl's own"]),
    ("gradloc/bad.py", b"x = (\n", ["Python cannot compile"]),
    ("gradloc/a#b.py", b"x = 1\n", ["apply_patch.py would not take the patch"]),
    ("verl/a.py", b"x = 1\n", ["is a new file, but hooks and fixes change verl's own"]),
    (ACTOR, b"x = 1", ["lacks the newline"]),
    (ACTOR, b"\0\1", ["apply_patch.py would not take the patch", "binary"]),
]


def test_what_the_sources_and_an_edit_may_not_hold(made: Made) -> None:
    wanted = made.project.text()
    for place, content, words in REFUSED:
        in_checkout = place.startswith("verl/")
        file = (made.checkout if in_checkout else made.project.place) / place
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(content)
        refused(made.repo(), 3, *words, *([] if b"\0" in content else [file.name]))
        assert made.project.text() == wanted
        file.unlink() if before is None else file.write_bytes(before)
    ran(made.repo())
    (made.checkout / ALGOS).chmod(0o755)
    refused(made.repo(), 3, f"{ALGOS} has another mode, or is a symbolic link now")


# Hooks and fixes


def test_an_edit_is_a_hook_unless_it_is_said_to_be_a_fix(fixed: Made) -> None:
    before = fixed.state()
    for _ in range(2):
        ran(fixed.repo())
        assert fixed.state() == before
    fixes = fixed.project.fixes.read_text()
    # Edits beside a fix are hooks, in whichever file; the fix is moved, but the same.
    (fixed.checkout / ACTOR).write_text("# first\n" + (fixed.checkout / ACTOR).read_text())
    (fixed.checkout / ALGOS).write_text((fixed.checkout / ALGOS).read_text() + "# a hook, too\n")
    ran(fixed.repo())
    hooks = fixed.project.hooks.read_text()
    assert "+# first" in hooks and "+# a hook, too" in hooks and "fixed" not in hooks
    lines = [line for line in fixes.splitlines() if line[:1] in "+-"]
    assert [line for line in fixed.project.fixes.read_text().splitlines() if line[:1] in "+-"] == lines
    ran(fixed.check())


def test_an_edit_of_a_fix_has_to_be_said_to_be_one(fixed: Made) -> None:
    hooks = fixed.project.hooks.read_bytes()
    fixed.change(ACTOR, "import os  # fixed\n", "import os  # fixed again\n")
    before = fixed.state()
    refused(fixed.repo(), 3, ACTOR, "cannot be told from the fixes", "--fixes")
    assert fixed.state() == before
    ran(fixed.repo("--fixes"))
    assert b"fixed again" in fixed.project.fixes.read_bytes()
    fixed.change(ACTOR, "import os  # fixed again\n", "import os\n")
    fixed.change(ALGOS, "# fixed\nimport numpy", "import numpy")
    ran(fixed.repo("--fixes"))
    assert fixed.project.fixes.read_bytes() == b"" and fixed.project.hooks.read_bytes() == hooks
    ran(fixed.check())


def test_a_checkout_undoes_no_work_of_another_nor_its_own(fixed: Made, tmp_path: Path) -> None:
    second = dataclasses.replace(fixed, checkout=fixed.init(tmp_path / "second"))
    trees.git(fixed.checkout, "stash", "-q")
    before = fixed.state()
    for arguments in ([], ["--fixes"]):
        refused(fixed.repo(*arguments), 3, "edits of verl's own files are gone", "bring them back")
    assert fixed.state() == before
    trees.git(fixed.checkout, "stash", "pop", "-q")
    second.change(ALGOS, "# fixed\n", "# fixed\n# hook\n")
    ran(second.repo("--fixes"))
    before = fixed.state()
    refused(fixed.repo(), 3, "fixes.patch has changed", "would be lost", "--init")
    assert fixed.state() == before


def test_an_interrupted_run_is_repeated_by_one_at_a_time(made: Made) -> None:
    """The state after a kill between the two files: a new patch beside an old checksum, and an old note."""
    made.change(ACTOR, "# last\n", "# last\n# more\n")
    interrupted = [Path(f"{made.project.hooks}.sha256"), made.checkout / ".git/gradloc/hooks.patch"]
    old = [file.read_bytes() for file in interrupted]
    ran(made.repo())
    wanted = made.state()
    for file, content in zip(interrupted, old, strict=True):
        file.write_bytes(content)
    patches = os.open(made.project.place / "patches", os.O_RDONLY)
    fcntl.flock(patches, fcntl.LOCK_EX)
    refused(made.repo(), 3, f"another make_patch.sh is at work on {made.project.place}")
    os.close(patches)
    ran(made.repo())
    assert made.state() == wanted


# The same bytes


def test_the_same_bytes_whatever_the_settings(made: Made, tmp_path: Path) -> None:
    wanted = made.project.text()
    home = tmp_path / "home"
    trees.write(home / "ignore", "*.py\n")
    trees.write(
        home / ".gitconfig",
        f"[core]\nautocrlf = true\nabbrev = 5\nexcludesFile = {home}/ignore\n[commit]\ngpgSign = true\n"
        "[diff]\nnoprefix = true\ncontext = 10\nalgorithm = patience\nrenames = copies\nexternal = false\n",
    )
    hostile = {"HOME": str(home), "LC_ALL": "C.UTF-8", "GIT_DIFF_OPTS": "-u9", "GIT_EXTERNAL_DIFF": "false"}
    hostile |= {"GIT_DIR": str(tmp_path), "GIT_LITERAL_PATHSPECS": "1", "GIT_DEFAULT_HASH": "sha256", "TMPDIR": "."}
    hostile |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "diff.noprefix", "GIT_CONFIG_VALUE_0": "true"}
    hostile |= {"SHELLOPTS": "noclobber:noglob", "CDPATH": "/:/tmp", "BASH_FUNC_git%%": "() { false; }"}
    for folder in (made.checkout, made.base, made.project.place):
        (folder / ".gitattributes").write_text("*.py text eol=crlf ident diff=python whitespace=-trailing-space\n")
        (folder / ".gitignore").write_text("*.py\n")
    ran(made.repo(**hostile, cwd=home))
    ran(made.check(**hostile, cwd=home))
    assert made.project.text() == wanted
    # Committed edits give the same, and so does a checkout that is made there.
    trees.git(made.checkout, "add", "-A")
    trees.git(made.checkout, "commit", "-q", "-m", "all")
    again = dataclasses.replace(made, checkout=made.init(tmp_path / "again", **hostile))
    for checkout in (made, again):
        ran(checkout.repo(**hostile))
        assert made.project.text() == wanted


def test_the_way_to_a_new_target(made: Made, tmp_path: Path) -> None:
    """As CONTRIBUTING.md describes it, where a hook has a conflict."""
    made.project.add_target("0.7.1", None)
    newer = trees.make_next_release(shutil.copytree(made.base, tmp_path / "newer"), "0.7.1")
    theirs = (newer / ACTOR).read_text() + "# theirs\n"
    (newer / ACTOR).write_text(theirs)
    checkout, named = tmp_path / "0.7.1", ["--base-tree", newer]
    refused(made.project.make("--check", *named), 3, "say with --target which verl it is: 0.7.0 or 0.7.1")
    ran(made.project.make("--init", checkout, "--target", "0.7.1", *named))
    trees.git(checkout, "fetch", "-q", str(made.checkout), "gradloc-base")
    conflict = trees.run("git", "-C", checkout, "apply", "--3way", made.project.hooks)
    assert conflict.returncode == 1 and "<<<<<<<" in (checkout / ACTOR).read_text()
    (checkout / ACTOR).write_text(theirs + "# last\n")
    trees.git(checkout, "reset", "-q")
    before = made.project.text("0.7.0")
    ran(made.project.make("--repo", checkout, *named))
    ran(made.project.make("--check", "--target", "0.7.1", *named))
    assert made.project.text("0.7.0") == before
    made.project.said("--repo", newer)
    assert (newer / ACTOR).read_bytes() == (checkout / ACTOR).read_bytes() and not (newer / DELETED).exists()


# What is refused


def test_what_init_and_the_command_line_refuse(made: Made, tmp_path: Path) -> None:
    new = tmp_path / "new"
    refused(made.project.make("--init", made.checkout, "--base-tree", made.base), 3, "exists already")
    refused(made.project.make("--init", new), 3, "has no verl/__init__.py", "--base-tree", "tests/run.sh")
    (made.base / ACTOR).write_text("# other\n")
    refused(made.project.make("--init", new, "--base-tree", made.base), 3, "hooks.patch does not apply")
    assert not new.exists() and not list(tmp_path.glob(".gradloc*"))
    refused(made.project.make("--repo", made.base, "--base-tree", made.base), 3, str(made.base), "--init made")
    for arguments in ([], ["--repo", ""], ["--check", "--repo", "x"], ["--release", "0.7.0", "--fixes"]):
        refused(made.project.make(*arguments), 2)
    assert "Exit codes" in ran(made.project.make("--help"))


# --check


def test_check_notices(made: Made) -> None:
    """Without a base it is no verdict, unless a checksum is wrong already."""
    package, hooks, _ = made.project.parts("0.7.0")
    files, data = package.read_bytes(), hooks.read_bytes()
    refused(made.project.make("--check"), 3, "has no verl/__init__.py", "--base-tree")
    hooks.write_bytes(b"damaged\n")
    refused(made.project.make("--check"), 1, f"{hooks}.sha256", "checksum")
    trees.write_patch(hooks, data)
    for part, content, words in (
        (package, files.replace(b"100644", b"100755", 1), KEYS),
        (package, b"nonsense\n", "is not what the sources hold"),
        (hooks, data.replace(b"+# last", b"+# last "), "whitespace"),
        (hooks, b"text before\n" + data, "other bytes"),
        (hooks, b"nonsense\n", "does not apply"),
        (hooks, data.replace(b"+# last", b"+  last"), "Python cannot compile"),
    ):
        right = part.read_bytes()
        trees.write_patch(part, content)
        refused(made.check(), 1, part.name, words)
        trees.write_patch(part, right)
    ran(made.check())
    hooks.unlink()
    refused(made.check(), 1, "hooks.patch is missing")


def test_a_failure_of_the_tool_is_no_verdict(made: Made, tmp_path: Path) -> None:
    refused(made.check(TMPDIR=str(tmp_path / "absent")), 3, f"TMPDIR is {tmp_path / 'absent'}")
    done = trees.run("bash", made.project.place / "make_patch.sh", "--check", PYTHON="/no such python")
    refused(done, 3, "/no such python", "Python 3.10")


# The project's own patch


def test_the_real_patch_is_what_its_sources_give(base_tree: Path, tmp_path: Path) -> None:
    """Also in a clone as git for Windows makes it: every file of the project must stay as it is."""
    source, project = tmp_path / "source", tmp_path / "project"
    for name in ("config", "gradloc", "patches", "rewards", "tools"):
        shutil.copytree(trees.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitattributes", "apply_patch.py", "make_patch.sh"):
        shutil.copy(trees.ROOT / name, source)
    trees.commit_all(source)
    trees.git(source, "clone", "-q", "-c", "core.autocrlf=true", str(source), str(project))
    assert snapshot(project) == snapshot(source)
    named = ["--target", trees.TARGET, "--base-tree", base_tree]
    checkout = tmp_path / "checkout"
    with unchanged(project):
        for arguments in (["--check", *named], ["--init", checkout, *named], ["--repo", checkout, *named[2:]]):
            ran(trees.run("bash", project / "make_patch.sh", *arguments, PYTHON=sys.executable))
