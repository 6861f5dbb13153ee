"""make_patch.sh: the same bytes everywhere, nothing lost between the two places of the package, honest --check."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trees
from trees import ACTOR, ALGOS, DELETED, KEYS, NEW, Project, refused, snapshot

pytestmark = pytest.mark.slow

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


def test_a_target_without_a_wheel_is_checked_if_it_is_named(made: tuple[Project, Path], source: Path) -> None:
    project, _ = made
    patches = project.place / "patches"
    shutil.copytree(patches / "0.7.0", patches / "0.10.0.dev")
    (patches / "0.10.0.dev/PIN").write_text(f"VERSION=0.10.0.dev\nCOMMIT={'0' * 40}\n")
    (patches / "DEFAULT").write_text("0.7.0\n")
    done = project.make("--check", "--base-tree", source)
    assert done.returncode == 0 and "not checked beyond the checksums" in done.stdout, done.stderr
    refused(project.make("--check", "--target", "0.10.0.dev"), 3, "the rest cannot be checked", "--base-tree")


def test_first_generation(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = made
    assert (project.place / "gradloc/__init__.py").read_text() == "x = 1\n"
    assert b"__pycache__" not in project.text()
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
    wanted = project.text()
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
    assert project.text() == wanted
    # Committed, partly committed and packed edits give the same.
    trees.git(checkout, "add", "-f", NEW)
    trees.git(checkout, "commit", "-q", "-m", "one file")
    assert project.make("--repo", checkout).returncode == 0
    assert project.text() == wanted
    (checkout / ".git/info/exclude").write_text("__pycache__/\n")
    (checkout / ".git/info/attributes").unlink()
    trees.git(checkout, "add", "-A")
    trees.git(checkout, "commit", "-q", "-m", "the rest")
    trees.git(checkout, "gc", "-q")
    assert project.make("--repo", checkout).returncode == 0
    assert project.text() == wanted
    done = project.make("--init", tmp_path / "again", "--base", checkout, **hostile)
    assert done.returncode == 0, done.stderr
    assert project.make("--repo", tmp_path / "again", **hostile).returncode == 0
    assert project.text() == wanted


def test_attributes_change_no_byte(source: Path, tmp_path: Path) -> None:
    """Those of the development checkout, of the base and of the folder that the tool runs in."""
    attributes = "*.py text eol=crlf ident diff=python filter=x whitespace=-trailing-space\n"
    crlf = source / "verl/utils/__init__.py"
    crlf.write_bytes(crlf.read_bytes().replace(b"\n", b"\r\n") + b"# $Id$\r\n")
    plain = Project(tmp_path / "project", None)
    checkout = tmp_path / "checkout"
    assert plain.make("--init", checkout, "--base", source).returncode == 0
    edit(checkout)
    assert plain.make("--repo", checkout).returncode == 0
    (checkout / ".gitattributes").write_text(attributes)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / ".gitattributes").write_text(attributes)
    wanted = plain.text()
    (checkout / ".git/info/attributes").unlink(missing_ok=True)
    for place in (hostile, checkout):
        done = plain.make("--repo", checkout, cwd=place)
        assert done.returncode == 0, done.stderr
        assert plain.text() == wanted
        done = plain.make("--check", "--base-tree", source, cwd=place)
        assert done.returncode == 0, done.stderr
    clone = tmp_path / "clone"
    shutil.copytree(source, clone)
    trees.commit_all(clone)
    (clone / ".gitattributes").write_text(attributes)
    trees.git(clone, "add", ".gitattributes")
    trees.git(clone, "commit", "-q", "-m", "attributes")
    plain.pin(trees.git(clone, "rev-parse", "HEAD"))
    assert plain.make("--init", tmp_path / "again", "--base", clone, cwd=hostile).returncode == 0
    assert (tmp_path / "again" / crlf.relative_to(source)).read_bytes() == crlf.read_bytes()
    assert trees.git(tmp_path / "again", "diff", "--name-only") == "\n".join(sorted([ACTOR, DELETED]))


def test_a_clone_made_with_autocrlf(base_tree: Path, tmp_path: Path) -> None:
    """As git for Windows makes them: every file of the project must stay as it is."""
    source, clone = tmp_path / "source", tmp_path / "clone"
    source.mkdir()
    for name in (".gitattributes", "apply_patch.py", "make_patch.sh", "run_experiment.sh"):
        shutil.copy(trees.ROOT / name, source)
    for name in ("config", "embedded", "gradloc", "patches", "rewards", "tools"):
        shutil.copytree(trees.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    trees.commit_all(source)
    trees.git(source, "clone", "-q", "-c", "core.autocrlf=true", str(source), str(clone))
    assert snapshot(clone) == snapshot(source)
    done = trees.run(sys.executable, clone / "apply_patch.py", "--repo", base_tree, "--check", "--force")
    assert done.returncode == 0, done.stderr
    check = ["--check", "--target", trees.TARGET, "--base-tree", base_tree]
    done = trees.run("bash", clone / "make_patch.sh", *check, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert trees.run("bash", clone / "run_experiment.sh", "--dry-run").returncode == 0


HOSTILE = {
    "hash": {"GIT_DEFAULT_HASH": "sha256"},
    "pathspecs": {"GIT_LITERAL_PATHSPECS": "1"},
    "trace": {"GIT_TRACE": "1", "GIT_TEMPLATE_DIR": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent"},
    "settings": {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "diff.noprefix", "GIT_CONFIG_VALUE_0": "true"},
    "folder": {"TMPDIR": "."},
    "options": {"SHELLOPTS": "noclobber:noglob", "CDPATH": "/:/tmp", "BASH_FUNC_git%%": "() { false; }"},
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_the_environment_does_not_matter(source: Path, tmp_path: Path, hostile: dict[str, str]) -> None:
    project, checkout = Project(tmp_path / "project", None), tmp_path / "checkout"
    assert project.make("--init", checkout, "--base", source, **hostile).returncode == 0
    edit(checkout)
    for arguments in (["--repo", checkout], ["--repo", checkout], ["--check", "--base-tree", source]):
        done = project.make(*arguments, **hostile)
        assert done.returncode == 0, done.stderr
    assert project.make("--check", "--base-tree", source).returncode == 0
    done = project.make("--init", tmp_path / "again", "--base", checkout, **hostile)
    assert done.returncode == 0, done.stderr


def test_a_repository_of_another_hash(made: tuple[Project, Path], tmp_path: Path) -> None:
    project, checkout = made
    shutil.rmtree(checkout / ".git")
    trees.git(checkout, "init", "-q", "--object-format=sha256")
    trees.commit_all(checkout)
    trees.git(checkout, "tag", "gradloc-base")
    refused(project.make("--repo", checkout), 3, str(checkout), "SHA-256")
    refused(project.make("--init", tmp_path / "new", "--base", checkout), 3, str(checkout), "SHA-256")


def test_shells_and_links(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, _ = made
    (tmp_path / "link").symlink_to(project.place / "make_patch.sh")
    for shell, script in (("sh", project.place / "make_patch.sh"), ("bash", tmp_path / "link")):
        done = trees.run(shell, script, "--check", "--base-tree", source, PYTHON=sys.executable)
        assert done.returncode == 0, done.stderr


def test_init_takes_wheel_tree_or_clone(source: Path, tmp_path: Path) -> None:
    project = Project(tmp_path / "project", None)
    wheel = tmp_path / "verl-0.7.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in trees.SOME_FILES:
            archive.write(source / name, name)
        archive.writestr("tests/__init__.py", "")
    (tmp_path / "from_wheel").mkdir()
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
    trees.git(source, "clone", "-q", "--bare", str(source), str(tmp_path / "bare"))
    assert project.make("--init", tmp_path / "from_bare", "--base", tmp_path / "bare").returncode == 0
    assert snapshot(tmp_path / "from_bare") == snapshot(tmp_path / "from_clone")


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
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source / "verl/__init__.py", "verl/__init__.py")
    refused(project.make("--init", new, "--base", wheel), 3, f"{wheel} is not verl 0.7.0")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    refused(project.make("--init", new, "--base", wheel), 3, f"{wheel} has no verl/__init__.py")
    (tmp_path / "here").mkdir()
    done = project.make("--init", ".", "--base", plain, cwd=tmp_path / "here")
    refused(done, 3, "the current directory cannot be replaced")
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
    assert b"+a = 2" in project.text() and b"b.py" not in project.text()


def test_folders_of_the_package(made: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    """They are taken to the other side and into the patch; what explains them to readers of the sources is not."""
    project, checkout = made
    ours, theirs = project.place / "gradloc", checkout / PACKAGE

    def files(side: Path) -> list[str]:
        return sorted(str(file.relative_to(side)) for file in side.rglob("*.*") if file.suffix != ".pyc")

    for folder, module in ((ours / "search", "__init__.py"), (theirs / "measure/deep", "probe.py")):
        folder.mkdir(parents=True)
        (folder / module).write_text("x = 1\n")
        (folder / "README.md").write_text("What is here.  \n")
    (ours / "README.md").write_text("The subpackages.\n")
    assert project.make("--repo", checkout).returncode == 0
    modules = ["__init__.py", "measure/deep/probe.py", "search/__init__.py"]
    assert files(ours) == sorted([*modules, "README.md", "search/README.md"])
    assert files(theirs) == sorted([*modules, "measure/deep/README.md"])
    assert b"README" not in project.text()
    assert check(project, source).returncode == 0
    # Nor is a committed one.
    trees.git(checkout, "add", "-A", "verl")
    trees.git(checkout, "commit", "-q", "-m", "all")
    release = ["--release", "0.7.0", "--base-tree", source, "--output", tmp_path / "y.patch"]
    assert project.make(*release).returncode == 0
    assert project.make("--repo", checkout, "--head", "HEAD", "--output", tmp_path / "x.patch").returncode == 0
    assert (tmp_path / "x.patch").read_bytes() == (tmp_path / "y.patch").read_bytes()
    before = snapshot(source)
    assert project.apply("--repo", source).returncode == 0
    assert files(source / PACKAGE) == modules
    assert project.apply("--repo", source, "--reverse").returncode == 0
    assert snapshot(source) == before
    assert project.make("--init", tmp_path / "second", "--base", source).returncode == 0
    assert files(tmp_path / "second" / PACKAGE) == modules
    # A folder goes with its last file.
    shutil.rmtree(ours / "measure")
    (theirs / "search/__init__.py").unlink()
    (theirs / "measure/deep/README.md").unlink()
    assert project.make("--repo", checkout).returncode == 0
    assert files(ours) == ["README.md", "__init__.py", "search/README.md"]
    assert files(theirs) == ["__init__.py"] and not (theirs / "measure").exists()


# Rewards: new files beside verl's

SCORES = "verl/utils/reward_score"


@pytest.fixture
def rewarded(source: Path, tmp_path: Path) -> tuple[Project, Path]:
    """As made, with a hook and two new files among verl's rewards."""
    (source / SCORES).mkdir()
    (source / SCORES / "__init__.py").write_text("# verl's __init__\n")
    project, checkout = Project(tmp_path / "project", None), tmp_path / "checkout"
    assert project.make("--init", checkout, "--base", source).returncode == 0
    edit(checkout)
    (checkout / SCORES / "__init__.py").write_text("# verl's __init__\n# a hook\n")
    assert project.make("--repo", checkout).returncode == 0
    assert not (project.place / "rewards").exists()
    (checkout / SCORES / "ours.py").write_text("ours = 1\n")
    (checkout / SCORES / "new.py").write_text("new = 1\n")
    done = project.make("--repo", checkout)
    assert done.returncode == 0, done.stderr
    return project, checkout


def test_rewards_have_their_sources_in_the_project(rewarded: tuple[Project, Path], source: Path) -> None:
    project, checkout = rewarded
    ours, theirs = project.place / "rewards", checkout / SCORES
    assert sorted(path.name for path in ours.iterdir()) == ["new.py", "ours.py"]
    for name in ("ours.py", "new.py"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert check(project, source).returncode == 0
    (ours / "ours.py").write_text("ours = 2\n")
    (ours / "README.md").write_text("What is here.\n")
    (theirs / "new.py").write_text("new = 2\n")
    refused(check(project, source), 1, f"{SCORES}/ours.py differ")
    assert project.make("--repo", checkout).returncode == 0
    for side in (ours, theirs):
        assert (side / "ours.py").read_text() == "ours = 2\n" and (side / "new.py").read_text() == "new = 2\n"
    assert not (theirs / "README.md").exists() and (theirs / "__init__.py").read_text().endswith("# a hook\n")
    assert check(project, source).returncode == 0
    assert project.apply("--repo", source).returncode == 0
    assert (source / SCORES / "ours.py").read_text() == "ours = 2\n"


def test_a_reward_changed_on_both_sides(rewarded: tuple[Project, Path]) -> None:
    project, checkout = rewarded
    (project.place / "rewards/ours.py").write_text("ours = 2\n")
    (checkout / SCORES / "ours.py").write_text("ours = 3\n")
    (checkout / NEW).write_text("x = 2\n")
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, "changed both in rewards/", "ours.py")
    assert state(project, checkout) == before


def test_a_checkout_whose_hooks_are_gone(rewarded: tuple[Project, Path]) -> None:
    """As after `git checkout .`, which leaves the package's new files."""
    project, checkout = rewarded
    trees.git(checkout, "checkout", "-q", "--", ".")
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, "edits of verl's own files are gone", "--force")
    assert state(project, checkout) == before
    refused(project.make("--repo", checkout, "--fixes"), 3, "edits of verl's own files are gone", "--force")
    assert project.make("--repo", checkout, "--force").returncode == 0
    assert project.hooks.read_bytes() == b"" != project.package.read_bytes()


def test_what_rewards_may_not_hold(rewarded: tuple[Project, Path], source: Path) -> None:
    project, checkout = rewarded
    for place, words in (
        (project.place / "rewards/__init__.py", "verl's own"),
        (project.place / "rewards/data.json", "Python files only"),
        (checkout / SCORES / "data.json", "Python files only"),
    ):
        place.write_text("{}\n")
        before = state(project, checkout)
        refused(project.make("--repo", checkout), 3, place.name, words)
        assert state(project, checkout) == before
        place.unlink() if place.name != "__init__.py" else shutil.move(place, project.place / "moved")
    shutil.rmtree(project.place / "rewards")
    refused(project.make("--repo", checkout), 3, "rewards/ is empty")
    refused(check(project, source), 1, "new.py")


def test_keys_have_their_sources_in_the_project(made: tuple[Project, Path], source: Path) -> None:
    """In a folder of their own, of which a package has .yaml files only."""
    project, checkout = made
    ours, theirs = project.place / "config/gradloc", (checkout / KEYS).parent
    theirs.mkdir(parents=True)
    (checkout / KEYS).write_text("key: 1\n")
    assert project.make("--repo", checkout).returncode == 0
    assert (ours / "actor.yaml").read_text() == "key: 1\n"
    assert KEYS.encode() in project.package.read_bytes() and KEYS.encode() not in project.hooks.read_bytes()
    (ours / "actor.yaml").write_text("key: 2\n")
    refused(check(project, source), 1, f"{KEYS} differ")
    assert project.make("--sources").returncode == 0
    assert check(project, source).returncode == 0
    (checkout / KEYS).write_text("key: 3\n")
    refused(project.make("--repo", checkout), 3, "changed both in config/gradloc/", "actor.yaml")
    (checkout / KEYS).write_text("key: 2\n")
    for place in (ours / "keys.py", theirs / "keys.py"):
        place.write_text("")
        refused(project.make("--repo", checkout), 3, "keys.py", ".yaml files only")
        place.unlink()
    assert project.make("--repo", checkout).returncode == 0
    assert project.apply("--repo", source).returncode == 0
    assert (source / KEYS).read_text() == "key: 2\n"
    assert project.apply("--repo", source, "--reverse").returncode == 0
    assert not (source / KEYS).parent.exists()


# Files of a web page: a module in verl

PAGES = {"page.css": "p { }\n", "page.html": "<p title='\\n'>\n", "page.js": '"use strict";\n'}


@pytest.fixture
def paged(made: tuple[Project, Path]) -> tuple[Project, Path]:
    """As made, with the files of a page in a folder of the package."""
    project, checkout = made
    (project.place / "gradloc/report").mkdir()
    for name, text in PAGES.items():
        (project.place / "gradloc/report" / name).write_text(text)
    (project.place / "gradloc/report/__init__.py").write_text("")
    done = project.make("--repo", checkout)
    assert done.returncode == 0, done.stderr
    return project, checkout


def pages(module: Path) -> dict[str, str]:
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['FILES']))"
    return json.loads(trees.run(sys.executable, "-c", code, module).stdout)


def test_page_files_are_a_module_in_verl(paged: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = paged
    ours, theirs = project.place / "gradloc/report", checkout / PACKAGE / "report"
    assert sorted(path.name for path in theirs.iterdir()) == ["__init__.py", "page_files.py"]
    assert sorted(path.name for path in ours.iterdir()) == ["__init__.py", *sorted(PAGES)]
    assert pages(theirs / "page_files.py") == PAGES
    assert check(project, source).returncode == 0
    assert project.make("--init", tmp_path / "second", "--base", source).returncode == 0
    assert (tmp_path / "second" / PACKAGE / "report/page_files.py").read_bytes() == (
        theirs / "page_files.py"
    ).read_bytes()
    before = state(project, checkout)
    assert project.make("--repo", checkout).returncode == 0
    assert state(project, checkout) == before
    (ours / "page.css").write_text("p { x }\n")
    refused(check(project, source), 1, "report/page_files.py differ")


def test_edits_of_both_forms_of_a_page_come_together(paged: tuple[Project, Path], source: Path) -> None:
    project, checkout = paged
    ours, module = project.place / "gradloc/report", checkout / PACKAGE / "report/page_files.py"
    module.write_text(module.read_text().replace("p { }\n", "p { color: red }"))
    refused(project.make("--repo", checkout), 3, f"{module}: page.css lacks the newline")
    module.write_text(module.read_text().replace("red }", "red }\n"))
    (ours / "page.js").write_text("// τ\n")
    (ours / "new.js").write_text("new\n")
    (ours / "page.html").unlink()
    done = project.make("--repo", checkout)
    assert done.returncode == 0, done.stderr
    wanted = {"new.js": "new\n", "page.css": "p { color: red }\n", "page.js": "// τ\n"}
    assert {path.name: path.read_text() for path in ours.iterdir() if path.suffix != ".py"} == wanted
    assert pages(module) == wanted
    assert check(project, source).returncode == 0
    (ours / "page.css").write_text("p { color: blue }\n")
    module.write_text(module.read_text().replace("red", "green"))
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, "changed both", "report/page.css")
    assert state(project, checkout) == before
    # The files go with the module, and the folder with the last of them.
    (ours / "page.css").write_text("p { color: red }\n")
    shutil.rmtree(module.parent)
    assert project.make("--repo", checkout).returncode == 0
    assert not ours.exists() and b"page_files" not in project.text()


@pytest.mark.parametrize(
    ("place", "content", "words"),
    [
        ("gradloc/report/page.js", b"a = '''b'''\n", "gradloc/report/page.js contains '''"),
        ("gradloc/report/page.js", b"a", "gradloc/report/page.js lacks the newline"),
        ("gradloc/report/page.js", b"a\r\n", "gradloc/report/page.js has carriage returns"),
        ("gradloc/report/page.js", b"a  \n", "whitespace error"),
        ("gradloc/report/page_files.py", b"", "gradloc/report/page_files.py is a name for"),
        ("gradloc/report/page.png", b"a\n", "Python files only"),
    ],
)
def test_page_files_that_are_refused(
    paged: tuple[Project, Path], source: Path, place: str, content: bytes, words: str
) -> None:
    project, checkout = paged
    (project.place / place).write_bytes(content)
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, words)
    assert state(project, checkout) == before
    assert check(project, source).returncode in (1, 3)


def test_page_modules_that_are_refused(paged: tuple[Project, Path]) -> None:
    project, checkout = paged
    module = checkout / PACKAGE / "report/page_files.py"
    module.write_text(module.read_text() + "FILES.clear()\n")
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, f"{module}: it holds other things than FILES")
    assert state(project, checkout) == before
    (module.parent / "page.css").write_text("p\n")
    refused(project.make("--repo", checkout), 3, "report/page.css", "edit it in page_files.py")


# Hooks and fixes


def test_hooks_are_a_patch_of_verls_own_files(rewarded: tuple[Project, Path], source: Path) -> None:
    project, checkout = rewarded
    text = project.hooks.read_text()
    assert text.startswith("diff --git ") and text.count("diff --git ") == 3
    for name in (ACTOR, DELETED, f"{SCORES}/__init__.py"):
        assert f"diff --git a/{name} b/{name}\n" in text
    assert "new file mode" not in text and project.package.read_text().count("new file mode") == 3
    project.hooks.write_text(text + "x\n")
    refused(check(project, source), 1, "hooks.patch")
    project.hooks.unlink()
    refused(check(project, source), 1, "hooks.patch is missing")
    assert project.make("--repo", checkout).returncode == 0
    assert project.hooks.read_text() == text
    assert check(project, source).returncode == 0


@pytest.fixture
def fixed(made: tuple[Project, Path]) -> tuple[Project, Path]:
    """As made, with a fix in a file that has a hook and one in a file that has none."""
    project, checkout = made
    before = project.hooks.read_bytes()
    change(checkout / ACTOR, "import os\n", "import os  # fixed\n")
    change(checkout / ALGOS, "import numpy", "# fixed\nimport numpy")
    done = project.make("--repo", checkout, "--fixes")
    assert done.returncode == 0, done.stderr
    assert project.hooks.read_bytes() == before
    return project, checkout


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_an_edit_is_a_hook_unless_it_is_said_to_be_a_fix(fixed: tuple[Project, Path], source: Path) -> None:
    project, checkout = fixed
    fixes = project.fixes.read_text()
    assert ACTOR in fixes and ALGOS in fixes and "+import os  # fixed" in fixes and "# last" not in fixes
    before = state(project, checkout)
    for _ in range(2):
        assert project.make("--repo", checkout).returncode == 0
        assert state(project, checkout) == before
    # Edits beside a fix are hooks, in whichever file; the fix is moved, but the same.
    (checkout / ACTOR).write_text("# first\n" + (checkout / ACTOR).read_text())
    (checkout / ALGOS).write_text((checkout / ALGOS).read_text() + "# a hook, too\n")
    done = project.make("--repo", checkout)
    assert done.returncode == 0, done.stderr
    hooks = project.hooks.read_text()
    assert "+# first" in hooks and "+# a hook, too" in hooks and "fixed" not in hooks
    lines = [line for line in fixes.splitlines() if line[:1] in "+-"]
    assert [line for line in project.fixes.read_text().splitlines() if line[:1] in "+-"] == lines
    assert check(project, source).returncode == 0
    # The fixes are made on the hooks.
    assert project.apply("--repo", source).returncode == 0
    shutil.rmtree(checkout / PACKAGE / "__pycache__")
    assert snapshot(source) == snapshot(checkout)


def test_an_edit_of_a_fix_has_to_be_said_to_be_one(fixed: tuple[Project, Path], source: Path) -> None:
    project, checkout = fixed
    hooks = project.hooks.read_bytes()
    change(checkout / ACTOR, "import os  # fixed\n", "import os  # fixed again\n")
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, ACTOR, "cannot be told from the fix", "--fixes")
    assert state(project, checkout) == before
    assert project.make("--repo", checkout, "--fixes").returncode == 0
    assert b"+import os  # fixed again" in project.fixes.read_bytes() and project.hooks.read_bytes() == hooks
    assert check(project, source).returncode == 0
    # A fix that is taken out as a whole leaves the patch either way.
    change(checkout / ACTOR, "import os  # fixed again\n", "import os\n")
    assert project.make("--repo", checkout).returncode == 0
    assert ACTOR.encode() not in project.fixes.read_bytes() and ALGOS.encode() in project.fixes.read_bytes()
    change(checkout / ALGOS, "# fixed\nimport numpy", "import numpy")
    assert project.make("--repo", checkout, "--fixes").returncode == 0
    assert project.fixes.read_bytes() == b"" and project.hooks.read_bytes() == hooks
    assert check(project, source).returncode == 0
    assert project.apply("--repo", source).returncode == 0


def test_fixes_of_another_base_are_not_guessed(fixed: tuple[Project, Path]) -> None:
    project, checkout = fixed
    shutil.rmtree(checkout / ".git/gradloc")
    trees.write_patch(project.fixes, project.fixes.read_bytes().replace(b"-import os\n", b"-import sys\n"))
    before = state(project, checkout)
    refused(project.make("--repo", checkout), 3, "do not apply to this base", "make them again")
    assert state(project, checkout) == before


def test_a_release_is_the_patch_in_one_file(fixed: tuple[Project, Path], source: Path, tmp_path: Path) -> None:
    project, checkout = fixed
    output = tmp_path / "one.patch"
    done = project.make("--release", "0.7.0", "--base-tree", source, "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().count(f"diff --git a/{ACTOR}".encode()) == 1
    shutil.copytree(source, project.place / "build/0.7.0/base")
    assert project.make("--release", "0.7.0").returncode == 0
    assert (project.place / "build/gradloc-0.7.0.patch").read_bytes() == output.read_bytes()
    before = snapshot(source)
    assert project.apply("--repo", source, "--patch-file", output).returncode == 0
    shutil.rmtree(checkout / PACKAGE / "__pycache__")
    assert snapshot(source) == snapshot(checkout)
    assert project.apply("--repo", source, "--check").returncode == 10
    assert project.apply("--repo", source, "--reverse").returncode == 0
    assert snapshot(source) == before
    refused(project.make("--release", "0.7.5"), 3, "no patch for verl 0.7.5")
    project.fixes.write_bytes(b"damaged\n")
    refused(project.make("--release", "0.7.0"), 3, "fixes.patch has SHA-256")


def test_the_package_needs_no_checkout(made: tuple[Project, Path], source: Path) -> None:
    project, checkout = made
    (project.place / "gradloc/__init__.py").write_text("x = 2\n")
    (project.place / "gradloc/deep").mkdir()
    (project.place / "gradloc/deep/a.py").write_text("a = 1\n")
    (checkout / PACKAGE / "b.py").write_text("b = 1\n")
    hooks = project.hooks.read_bytes()
    assert project.make("--sources").returncode == 0
    assert b"+x = 2" in project.package.read_bytes() and project.hooks.read_bytes() == hooks
    assert check(project, source).returncode == 0
    # A checkout that was made before takes what is new, and gives what is its own.
    assert project.make("--repo", checkout).returncode == 0
    for side in (project.place / "gradloc", checkout / PACKAGE):
        assert (side / "__init__.py").read_text() == "x = 2\n"
        assert (side / "deep/a.py").exists() and (side / "b.py").exists()
    assert check(project, source).returncode == 0
    (project.place / "gradloc/bad.py").write_text("x = (\n")
    before = state(project, checkout)
    refused(project.make("--sources"), 3, "Python cannot compile")
    assert state(project, checkout) == before


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
    assert ALGOS.encode() not in project.text()


def test_interrupted_regeneration_is_repeated(made: tuple[Project, Path]) -> None:
    """The state after a kill between the two files: a new patch beside an old checksum."""
    project, checkout = made
    (checkout / NEW).write_text("x = 2\n")
    (checkout / ACTOR).write_text((checkout / ACTOR).read_text() + "# more\n")
    checksum = Path(f"{project.hooks}.sha256")
    old = checksum.read_bytes()
    notes = checkout / ".git/gradloc"
    noted = {file: file.read_bytes() for file in notes.iterdir()}
    assert project.make("--repo", checkout).returncode == 0
    wanted = state(project, checkout)
    checksum.write_bytes(old)
    for file, content in noted.items():
        file.write_bytes(content)
    assert project.make("--repo", checkout).returncode == 0
    assert state(project, checkout) == wanted


def test_one_run_at_a_time(made: tuple[Project, Path], source: Path) -> None:
    project, checkout = made
    for file, place in ((project.place / "patches/0.7.0/PIN", project.place), (checkout / ".git/HEAD", checkout)):
        with open(file, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused(project.make("--repo", checkout), 3, f"another make_patch.sh is at work on {place}")
    (checkout / NEW).write_text("x = 2\n")
    command = ["bash", str(project.place / "make_patch.sh"), "--repo", str(checkout)]
    environment = os.environ | {"PYTHON": sys.executable}
    runs = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in runs:
        message = process.communicate()[1]
        assert process.returncode == 0 or process.returncode == 3 and "is at work on" in message, message
    assert check(project, source).returncode == 0


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
    sections = [f"diff --git {part}" for part in project.text().decode().split("diff --git ")[1:]]
    assert sorted(f"diff --git {part}" for part in output.read_text().split("diff --git ")[1:]) == sorted(sections)
    assert Path(f"{output}.sha256").read_text().split()[1] == "out.patch"
    assert state(project, checkout) == before
    assert project.make("--repo", checkout, "--head", "HEAD").returncode == 0
    (project.place / "gradloc/mine.py").write_text("m = 1\n")
    refused(project.make("--repo", checkout, "--head", "HEAD"), 3, "changes that")
    refused(project.make("--repo", checkout, "--base", "nothing"), 3, "not a revision")
    refused(project.make("--repo", checkout, "--head", "nothing"), 3, "nothing is not a revision")
    refused(project.make("--repo", checkout, "--output", tmp_path / "absent/x"), 3, "existing directory")


def test_a_patch_that_would_not_be_taken_is_not_written(made: tuple[Project, Path]) -> None:
    project, checkout = made
    before = project.text()
    (checkout / "verl/a#b.py").write_text("x = 1\n")
    refused(project.make("--repo", checkout), 3, "apply_patch.py would not take the patch", "verl/a#b.py")
    (checkout / "verl/a#b.py").unlink()
    (checkout / ALGOS).chmod(0o755)
    refused(project.make("--repo", checkout), 3, f"the mode of {ALGOS} changed", "undo that with chmod")
    (checkout / ALGOS).chmod(0o644)
    code = (checkout / ALGOS).read_text()
    (checkout / ALGOS).write_text(code + "  if True:\n")
    refused(project.make("--repo", checkout), 3, f"Python cannot compile {ALGOS}: unindent does not match")
    (checkout / ALGOS).write_text(code)
    assert project.text() == before


def test_what_editors_and_tools_leave_is_no_edit(made: tuple[Project, Path]) -> None:
    project, checkout = made
    before = project.text()
    for name in ("protocol.py.orig", "protocol.py.rej", ".protocol.py.swp", "protocol.py~"):
        (checkout / "verl" / name).write_text("left\n")
    assert project.make("--repo", checkout).returncode == 0
    assert project.text() == before


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
    conflict = trees.run("git", "-C", newer, "apply", "--3way", project.hooks)
    assert trees.run("git", "-C", newer, "apply", project.package).returncode == 0
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
    (fresh.place / "patches/0.7.0/PIN").write_text("COMMIT=abc\n")
    refused(fresh.make("--check"), 3, "PIN")


def test_usage(made: tuple[Project, Path]) -> None:
    project, checkout = made
    for arguments in (
        [],
        ["--repo"],
        ["--repo", ""],
        ["--check", "--repo", checkout],
        ["--check", "--output", "x"],
        ["--sources", "--target", "0.7.0"],
        ["--release"],
        ["--release", "0.7.0", "--fixes"],
        ["--repo", checkout, "--fixes", "--output", "x"],
        ["--repo", checkout, "--base-tree", checkout],
        ["--unknown"],
        ["extra"],
    ):
        refused(project.make(*arguments), 2)
    done = project.make("--help")
    assert done.returncode == 0 and "Exit codes" in done.stdout


def test_no_git(made: tuple[Project, Path], tmp_path: Path) -> None:
    project, checkout = made
    for tool in ("bash", "dirname", "readlink", "rm"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    refused(project.make("--repo", checkout, PATH=str(tmp_path)), 3, "git is not on PATH")


@pytest.mark.parametrize("action", ["--check", "--repo", "--init"])
def test_a_failure_of_the_tool_is_no_verdict(made: tuple[Project, Path], tmp_path: Path, action: str) -> None:
    project, checkout = made
    arguments = {"--check": [], "--repo": [checkout], "--init": [tmp_path / "new"]}[action]
    absent = str(tmp_path / "absent")
    done = project.make(action, *arguments, TMPDIR=absent)
    refused(done, 3, absent, "set TMPDIR to a folder that can be written")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A folder on a disk of so many KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if trees.run("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", place).returncode:
        pytest.skip("only root, and not in every container, may mount a small disk")

    def resized(kib: int) -> Path:
        assert trees.run("mount", "-o", f"remount,size={kib}k", place).returncode == 0
        return place

    yield resized
    trees.run("umount", place)


def test_a_full_disk_is_no_verdict(made: tuple[Project, Path], source: Path, small_disk: Callable[[int], Path]) -> None:
    project, _ = made
    codes = set()
    for kib in range(4, 200, 12):
        done = project.make("--check", "--base-tree", source, TMPDIR=str(small_disk(kib)))
        codes.add(done.returncode)
    assert codes == {0, 3}


# --check


def check(project: Project, source: Path):
    return project.make("--check", "--base-tree", source)


def test_check_notices(made: tuple[Project, Path], source: Path) -> None:
    project, _ = made
    data = project.hooks.read_bytes()
    module = project.place / "gradloc/__init__.py"
    module.write_text("x = 2\n")
    refused(check(project, source), 1, "__init__.py")
    module.write_text("x = 1\n")
    (project.place / "gradloc/new.py").write_text("n = 1\n")
    refused(check(project, source), 1, "new.py", "make_patch.sh --sources")
    (project.place / "gradloc/new.py").rename(project.place / "gradloc/notes.txt")
    refused(check(project, source), 3, "notes.txt")
    (project.place / "gradloc/notes.txt").unlink()
    for part in project.parts("0.7.0"):
        sums = Path(f"{part}.sha256")
        right = sums.read_text()
        sums.write_text(f"{'0' * 64}  {part.name}\n")
        refused(check(project, source), 1, str(sums), "checksum")
        sums.write_text(right)
    package = project.package.read_bytes()
    trees.write_patch(project.package, package.replace(b"100644", b"100755"))
    refused(check(project, source), 1, "__init__.py differ")
    trees.write_patch(project.package, package.replace(b"@@ -0,0 +1 @@", b"@@ -0,0 +1,1 @@"))
    refused(check(project, source), 1, "package.patch says the same", "other bytes")
    trees.write_patch(project.package, b"nonsense\n")
    refused(check(project, source), 1, "package.patch cannot be read")
    trees.write_patch(project.package, package)
    trees.write_patch(project.hooks, data.replace(b"+# last", b"+# last "))
    refused(check(project, source), 1, "whitespace")
    trees.write_patch(project.hooks, data.replace(b"@@ def", b"@@ class").replace(b"@@ class", b"@@ xclass"))
    refused(check(project, source), 1, "other bytes")
    trees.write_patch(project.hooks, b"text before\n" + data)
    refused(check(project, source), 1, "other bytes")
    trees.write_patch(project.hooks, b"nonsense\n")
    refused(check(project, source), 1, "does not apply")
    broken = data.replace(b"+# last", b"+  last")
    trees.write_patch(project.hooks, broken)
    refused(check(project, source), 1, "Python cannot compile")
    trees.write_patch(project.hooks, data)
    assert check(project, source).returncode == 0
    (source / ACTOR).write_text("other\n")
    refused(check(project, source), 1, "does not apply")
    refused(check(project, project.place), 3, "--base-tree")
    project.hooks.unlink()
    refused(check(project, source), 1, "missing")


def test_check_without_a_base(made: tuple[Project, Path], tmp_path: Path) -> None:
    """A Python whose pip fails, as without a network."""
    project, _ = made
    (tmp_path / "modules").mkdir()
    pip = tmp_path / "modules/pip.py"
    failing = {"PYTHONPATH": str(pip.parent)}
    pip.write_text("raise SystemExit(1)\n")
    refused(project.make("--check", **failing), 3, "cannot be checked", "(it says nothing)", "--base-tree")
    pip.write_text("raise SystemExit('ERROR: No matching distribution found')\n")
    done = project.make("--check", **failing)
    refused(done, 3, "cannot be checked", "downloaded", "(ERROR: No matching distribution found)", "--base-tree")
    (project.place / "gradloc/__init__.py").write_text("x = 2\n")
    refused(project.make("--check", **failing), 1, "__init__.py")
    (project.place / "gradloc/__init__.py").write_text("x = 1\n")
    project.fixes.write_bytes(b"damaged\n")
    refused(project.make("--check", **failing), 1, "fixes.patch.sha256 is not the checksum")


@pytest.mark.parametrize("python", ["false", "/no such python", "true"])
def test_no_python_is_no_verdict(made: tuple[Project, Path], python: str) -> None:
    project, _ = made
    done = trees.run("bash", project.place / "make_patch.sh", "--check", PYTHON=python)
    refused(done, 3, python, "Python 3.10")


@pytest.mark.every_target
def test_the_real_patch_is_in_sync(base_tree: Path) -> None:
    command = ("env", f"PYTHON={sys.executable}", "bash", trees.ROOT / "make_patch.sh")
    done = trees.run(*command, "--check", "--target", trees.TARGET, "--base-tree", base_tree)
    assert done.returncode == 0, done.stderr


@pytest.mark.every_target
def test_the_real_patch_comes_back_from_a_new_checkout(base_tree: Path, tmp_path: Path) -> None:
    command = ("env", f"PYTHON={sys.executable}", "bash", trees.ROOT / "make_patch.sh")
    done = trees.run(*command, "--init", tmp_path / "checkout", "--base", base_tree)
    assert done.returncode == 0, done.stderr
    for option, output in (["--repo", tmp_path / "checkout"], "a.patch"), (["--release", trees.TARGET], "b.patch"):
        done = trees.run(*command, *option, "--output", tmp_path / output)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.patch").read_bytes() == (tmp_path / "b.patch").read_bytes()
    tree = trees.copy_base(tmp_path / "tree", files=None)
    apply = [sys.executable, trees.ROOT / "apply_patch.py", "--repo", tree]
    assert trees.run(*apply, "--patch-file", tmp_path / "b.patch").returncode == 0
    assert trees.run(*apply, "--check").returncode == 10
