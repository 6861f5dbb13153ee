"""make_patch.sh: the same bytes everywhere, hooks and fixes told apart, nothing lost, an honest --check."""

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from valid_events import events_in

import trees
from trees import ACTOR, ALGOS, FIXED, KEYS, NEW, Project, ran, refused, snapshot, unchanged

pytestmark = pytest.mark.slow

FILES = Path("patches/files")


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
    """A project, and a checkout in which verl's own files were edited."""
    project = Project(tmp_path / "project", None)
    base = trees.copy_base(tmp_path / "base")
    made = Made(project, base, tmp_path / "checkout")
    made.init(made.checkout)
    actor = made.checkout / ACTOR
    actor.write_text(actor.read_text() + "# last\n")
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


# The contents of the parts


def test_the_parts_lead_from_the_base_to_what_was_edited(fixed: Made, tmp_path: Path) -> None:
    hooks, fixes = (part.read_text() for part in fixed.project.parts("0.7.0"))
    assert [line.rpartition(" b/")[2] for line in hooks.splitlines() if "diff --git" in line] == [ACTOR]
    assert "+# last" in hooks and "fixed" not in hooks and "new file" not in hooks + fixes
    assert "+import os  # fixed" in fixes and "+# fixed" in fixes
    with unchanged(fixed.base):
        fixed.project.said(fixed.base)
        for name in (ACTOR, ALGOS, NEW, KEYS):
            assert (fixed.base / name).read_bytes() == (fixed.checkout / name).read_bytes()
        fixed.project.said(fixed.base, "--reverse")
    # A new checkout starts there, and writes the same.
    second = dataclasses.replace(fixed, checkout=fixed.init(tmp_path / "second"))
    start = second.state()
    ran(second.repo())
    assert second.state() == start


def test_an_edit_of_a_new_file_is_one_in_the_project(made: Made) -> None:
    """Checkouts have links to them."""
    before = made.project.text()
    (made.checkout / NEW).write_text("HOOKS = 2\n")
    ran(made.repo())
    ran(made.check())
    assert made.project.text() == before and (made.project.place / FILES / NEW).read_text() == "HOOKS = 2\n"


REFUSED = [
    ("verl/a.py", b"x = 1\n", ["is a new file, but hooks and fixes change verl's own"]),
    (FIXED, None, ["removes no file of verl's own"]),
    (ACTOR, b"x = 1", ["lacks the newline"]),
    (ACTOR, b"x = (\n", ["Python cannot compile"]),
    ("verl/version/version", b"\0\1", ["apply_patch.py would not take the patch"]),
]


def test_what_an_edit_may_not_be(made: Made) -> None:
    wanted = made.project.text()
    for place, content, words in REFUSED:
        file = made.checkout / place
        before = file.read_bytes() if file.exists() else None
        file.unlink() if content is None else file.write_bytes(content)
        refused(made.repo(), 3, *words)
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
    made.project.said(newer)
    assert (newer / ACTOR).read_bytes() == (checkout / ACTOR).read_bytes() and (newer / NEW).exists()


# Refusals


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
    hooks, _ = made.project.parts("0.7.0")
    data = hooks.read_bytes()
    refused(made.project.make("--check"), 3, "has no verl/__init__.py", "--base-tree")
    hooks.write_bytes(b"damaged\n")
    refused(made.project.make("--check"), 1, f"{hooks}.sha256", "checksum")
    for content, words in (
        (data.replace(b"+# last", b"+# last "), "whitespace"),
        (b"text before\n" + data, "other bytes"),
        (b"nonsense\n", "does not apply"),
        (data.replace(b"+# last", b"+  last"), "Python cannot compile"),
    ):
        trees.write_patch(hooks, content)
        refused(made.check(), 1, hooks.name, words)
    trees.write_patch(hooks, data)
    ran(made.check())
    for name, words in ((ALGOS, "would replace a file of verl's own"), ("verl/a.txt", "of a kind that the patch")):
        file = trees.write(made.project.place / FILES / name, "")
        refused(made.check(), 1, name, words)
        file.unlink()
    hooks.unlink()
    refused(made.check(), 1, "hooks.patch is missing")


def test_a_failure_of_the_tool_is_no_verdict(made: Made, tmp_path: Path) -> None:
    refused(made.check(TMPDIR=str(tmp_path / "absent")), 3, f"TMPDIR is {tmp_path / 'absent'}")
    done = trees.run("bash", made.project.place / "make_patch.sh", "--check", PYTHON="/no such python")
    refused(done, 3, "/no such python", "Python 3.10")


# The project's own patch


def test_the_real_patch_is_what_a_checkout_gives(base_tree: Path, tmp_path: Path) -> None:
    """Also in a clone as git for Windows makes it: every file of the project must stay as it is."""
    source, project = tmp_path / "source", tmp_path / "project"
    for name in ("patches", "tools"):
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


@pytest.fixture(scope="module")
def released(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of verl with one `git apply` of the release patch."""
    place = tmp_path_factory.mktemp("released")
    for name in ("gradloc", "patches", "tools"):
        shutil.copytree(trees.ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("apply_patch.py", "make_patch.sh"):
        shutil.copy(trees.ROOT / name, place)
    options = ["--release", trees.TARGET, "--base-tree", base_tree]
    ran(trees.run("bash", place / "make_patch.sh", *options, PYTHON=sys.executable))
    tree = trees.copy_base(place / "tree", files=None)
    trees.commit_all(tree)
    trees.git(tree, "apply", "--whitespace=error-all", str(place / f"dist/verl-{trees.TARGET}-gradloc.patch"))
    return tree


def alone(tree: Path, code: str, *arguments: str | Path) -> str:
    """What a program prints that has no other verl and GradLoc than those of the tree."""
    check = (
        f"\nimport gradloc, verl\nfor module in (gradloc, verl): assert module.__file__.startswith('{tree}/'), module"
        "\nfrom verl.utils.spikes import why_off\nassert why_off() is None"
    )
    path = os.pathsep.join(map(str, (tree, trees.ROOT / "tests/multirank", trees.ROOT / "tests/support")))
    environment = {"PYTHONPATH": path}
    if trees.HAS_PLUGINS:  # which takes a CPU for a device where this module says so
        shutil.copytree(trees.ROOT / "embedded", tree.parent / "dist/embedded", dirs_exist_ok=True)
        environment["VERL_USE_EXTERNAL_MODULES"] = "embedded"
    command = [sys.executable, "-B", "-c", code + check, *arguments]
    return ran(trees.run(*command, cwd=tree.parent / "dist", **environment))


@pytest.mark.smoke
def test_a_release_is_what_vendoring_gives(released: Path, tmp_path: Path) -> None:
    tree = trees.copy_base(tmp_path / "tree", files=None)
    ran(trees.run(sys.executable, trees.ROOT / "apply_patch.py", tree, "--vendor"))
    assert snapshot(released) == snapshot(tree)
    with pytest.raises(AssertionError, match="No module named 'gradloc'"):
        alone(released, "import gradloc")
    alone(released, "import verl.utils.spikes; verl.utils.spikes.why_off()")
    # apply_patch.py knows it, and takes it out.
    assert trees.run(sys.executable, trees.ROOT / "apply_patch.py", released, "--check", "--force").returncode == 10


SPIKE = """
import sys, tempfile, pathlib
import torch.distributed as dist
from actors import ENGINE, Case, build_actor
from batches import Words, build_batch, with_columns
from verl.utils import spikes

store = dist.FileStore(str(pathlib.Path(sys.argv[1]) / "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
case = Case(rows=4, mini_batch=4, planted=((0, 2, 3),))
batch = build_batch(case, 0)
with_columns(case, batch, 0)
actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e3, bisect_dump_dir=sys.argv[1])
metrics = actor.update_policy(batch)
if not ENGINE:
    spikes.write_evidence(actor, batch, Words(), metrics)
dist.destroy_process_group()
"""


@pytest.mark.every_target
def test_a_released_verl_finds_judges_and_writes_a_spike_alone(released: Path, tmp_path: Path) -> None:
    alone(released, SPIKE, tmp_path)
    (event,) = events_in(tmp_path)
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["position"], culprit["uid"]) == (2, 3, "0/2")
    assert event["complete"] and event["verdict"]["sentence"]
