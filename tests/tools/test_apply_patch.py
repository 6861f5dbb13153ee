"""apply_patch.py on real trees: what it does, what it refuses, and what is left when it is interrupted."""

import fcntl
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from notation import cases

import apply_patch
import trees
from trees import ACTOR, ALGOS, FIXED, KEYS, NEW, VENDORED, Patch, Project, at_call, refused, snapshot, unchanged

NO_SPACE = "raise OSError(28, 'No space left on device')"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="session")
def patched(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bytes]]:
    """What the patched tree must be, made without the tool under test."""
    tree = trees.copy_base(tmp_path_factory.mktemp("patched"))
    for edit in (trees.add_new, trees.hook, trees.fix):
        edit(tree)
    return snapshot(tree)


@pytest.fixture(scope="session")
def with_package(patched: dict, base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The same with the package in it."""
    tree = tmp_path_factory.mktemp("vendored")
    for name, text in trees.PACKAGE.items():
        trees.write(tree / VENDORED / name, text)
    (tree / apply_patch.MARKER).write_bytes(apply_patch.LICENCE)
    return {**snapshot(tree), **patched}


def refuses(project: Project, tree: Path, code: int, *words: str) -> None:
    """--check says with its code what is wrong, all else refuses it, and nothing changes."""
    with unchanged(tree.parent):
        refused(project.apply(tree, "--check"), code, *words)
        for argument in ([], ["--force"], ["--reverse"]):
            refused(project.apply(tree, *argument), 3, *words)


# Applying, reversing and saying how a tree stands


def test_apply_again_and_reverse(project: Project, tree: Path, patched: dict) -> None:
    before = snapshot(tree)
    assert "applicable" in project.said(tree, "--check")
    assert snapshot(tree) == before
    said = project.said(tree).splitlines()
    assert len(said) == 2 and "(verl 0.7.0, 5 files, all verified)" in said[0] and "no package gradloc" in said[1]
    assert snapshot(tree) == patched
    assert "already applied" in project.said(tree)
    project.said(tree, "--check", code=10)
    for again in (False, True):
        assert ("nothing to reverse" in project.said(tree, "--reverse")) == again
        assert snapshot(tree) == before


def test_owner_and_permissions_are_those_of_the_folder(project: Project, tree: Path) -> None:
    """Whatever the umask; only root may give files to another account."""
    mode, owner = 0o2770, (1234, 2345) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, *owner)
    for folder in ("verl", "verl/utils", "verl/trainer"):
        (tree / folder).chmod(mode)
    (tree / ACTOR).chmod(mode & 0o777)
    command = [sys.executable, project.place / "apply_patch.py", tree]
    for arguments in (["--vendor"], ["--reverse"], ["--vendor"]):
        environment = {"PYTHONPATH": ""}
        trees.ran(trees.run("bash", "-c", 'umask 077; exec "$@"', "-", *command, *arguments, **environment))
    for name in (KEYS, f"{VENDORED}/deep/page.css", apply_patch.MARKER):
        assert (tree / name).parent.stat().st_mode & 0o7777 == mode, name
        assert (tree / name).stat().st_mode & 0o7777 == mode & 0o666, name
    assert (tree / NEW).stat().st_mode & 0o7777 == mode & 0o666
    assert (tree / ACTOR).stat().st_mode & 0o777 == mode & 0o777
    assert {(path.stat().st_uid, path.stat().st_gid) for path in [tree, *tree.rglob("*")]} == {owner}


def test_byte_code_of_changed_files_is_removed(project: Project, tree: Path) -> None:
    """Python runs byte code of this kind without a look at the source."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH

    def compiled(name: str) -> Path:
        return Path(py_compile.compile(str(tree / name), invalidation_mode=unchecked))

    unchanged = compiled("verl/__init__.py")
    for arguments in ([], ["--reverse"]):
        stale = [compiled(ACTOR), compiled(ALGOS)]
        project.said(tree, *arguments)
        assert not any(file.exists() for file in stale) and unchanged.exists()
    # So is what another process compiled from the patched file before a run failed.
    action = f"import py_compile; py_compile.compile({str(tree / ACTOR)!r}); {NO_SPACE}"
    refused(project.apply_with(at_call("replace", 5, action), tree), 4, "put back")
    assert not list((tree / ACTOR).parent.glob("__pycache__/*"))
    # And that of a file right after which one was killed.
    stale = compiled(ALGOS)
    assert project.apply_with(at_call("replace", 3, f"real(*arguments); {KILL}"), tree).returncode == -9
    project.said(tree)
    assert not stale.exists()


def test_new_files_go_with_their_byte_code_alone(project: Project, tree: Path) -> None:
    before = snapshot(tree)
    for name, stays in (("__pycache__/tool.cpython-311.pyc", False), ("mine.txt", True)):
        project.said(tree, "--vendor")
        file = trees.write(tree / VENDORED / name, "mine")
        if stays:  # beside what is ours
            file = trees.write((tree / KEYS).parent / name, "mine")
        project.said(tree, "--reverse")
        assert file.exists() == stays and not (tree / NEW).exists() and (stays or snapshot(tree) == before)


@pytest.mark.parametrize("some", [False, True])
def test_files_left_behind_are_no_obstacle(project: Project, tree: Path, patched: dict, some: bool) -> None:
    """pip and git restore verl's own files, and leave those that only the patch makes, or some of them."""
    before = snapshot(tree)
    for again, state in ((["--reverse"], before), ([], patched)):
        project.said(tree)
        trees.copy_base(tree)
        if some:
            (tree / NEW).unlink()
        done = project.said(tree, "--check")
        assert "left there" in done and KEYS in done
        project.said(tree, *again)
        assert snapshot(tree) == state


def test_a_patch_with_the_package_among_verls_own_files(project: Project, tree: Path, patched: dict) -> None:
    """As older ones had it: its checkout takes it out, or a new verl and the command that is printed do."""
    package = trees.write(tree / "verl/utils/gradloc/__init__.py", "x = 0\n").parent
    (tree / ACTOR).write_text("# older\n")
    (tree / ALGOS).write_text("# older\n")
    trees.write(tree / KEYS, "older: 1\n")
    advice = ("older version of this patch", "checkout that applied it", f"reinstall verl and delete {package}")
    refuses(project, tree, 11, *advice)
    trees.copy_base(tree)
    refuses(project, tree, 11, "left", KEYS, "run again: rm -r ", str(package))
    (tree / KEYS).unlink()
    project.said(tree)
    shutil.rmtree(package)
    assert snapshot(tree) == patched


def link_actor(tree: Path) -> None:
    (tree / ACTOR).parent.rename(tree.parent / "outside")
    (tree / ACTOR).parent.symlink_to(tree.parent / "outside")


def patch_otherwise(tree: Path) -> None:
    trees.write(tree / ACTOR, "# of another patch\n")
    trees.write(tree / NEW, trees.NEW_FILES[NEW])


def put_pipe(name: str):
    def put(tree: Path) -> None:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).unlink(missing_ok=True)
        os.mkfifo(tree / name)

    return put


PIPES = (ACTOR, NEW, "verl/version/version", f"{VENDORED}/__init__.py", f"{VENDORED}/deep/page.css")
SPOILT = {
    "missing": (lambda tree: (tree / ALGOS).unlink(), 12, [ALGOS]),
    "changed": (lambda tree: (tree / ALGOS).write_bytes(b"mine\n"), 12, [ALGOS]),
    "another patch": (patch_otherwise, 11, [ACTOR, "another version", "--reverse", "restore all of verl"]),
    "link": (link_actor, 3, ["symbolic link"]),
    "directory": (lambda tree: (tree / NEW).mkdir(parents=True), 3, ["exists and is not a file"]),
    "file": (lambda tree: trees.write((tree / KEYS).parent, "mine"), 3, ["gradloc exists and is not a folder"]),
    "no verl": (lambda tree: shutil.rmtree(tree / "verl"), 3, ["verl/__init__.py"]),
    "nothing": (shutil.rmtree, 3, ["verl/__init__.py"]),
    **{f"pipe {name}": (put_pipe(name), 3, ["move it away"]) for name in PIPES},
}


@cases("spoil code words", *SPOILT.values(), ids=SPOILT)
def test_a_tree_that_does_not_fit_is_named_and_stays(project: Project, tree: Path, spoil, code: int, words) -> None:
    spoil(tree)
    refuses(project, tree, code, *words)


# Git checkouts


@pytest.fixture
def checkout(project: Project, tree: Path) -> Path:
    project.pin(trees.commit_all(tree))
    return tree


OTHER = "verl/__init__.py"  # a file of verl that the small patch does not change


def change_other(checkout: Path) -> None:
    (checkout / OTHER).write_text("# mine\n")


@cases(
    "kind code words",
    ("commit", 12, ["HEAD"]),
    *((kind, 3, ["local changes", OTHER]) for kind in ("edit", "worktree")),
)
def test_a_checkout_with_changes_takes_force(
    project: Project, checkout: Path, tmp_path: Path, kind: str, code: int, words: list[str]
) -> None:
    place = tmp_path / "second" if kind == "worktree" else checkout
    if kind == "worktree":
        trees.git(checkout, "worktree", "add", "-q", "--detach", str(place))
    change_other(place)
    if kind == "commit":
        trees.commit_all(checkout)
    before = snapshot(place)
    refused(project.apply(place, "--check"), code, *words)
    refused(project.apply(place), 3, *words)
    assert snapshot(place) == before
    project.said(place, "--force")


def test_files_that_git_does_not_track_are_no_matter(project: Project, checkout: Path, patched: dict) -> None:
    """Neither others' nor those that a patched verl left behind, unless they are in the patch's place."""
    for name in ("notes.txt", "verl/notes.py"):
        (checkout / name).write_text("mine")
    project.said(checkout)
    project.said(checkout, "--reverse")
    assert trees.git(checkout, "status", "--porcelain", "--untracked-files=no") == ""
    trees.write(checkout / NEW, "mine")
    refused(project.apply(checkout), 3, NEW)
    assert (checkout / NEW).read_text() == "mine"
    trees.git(checkout, "clean", "-qfd")
    project.said(checkout)
    trees.git(checkout, "checkout", "-q", ".")
    project.said(checkout)
    assert snapshot(checkout) == patched


@pytest.mark.parametrize("installed", [False, True])
def test_a_tree_in_a_repository(project: Project, tree: Path, tmp_path: Path, patched: dict, installed: bool) -> None:
    """git apply would skip every file here and exit 0. Of an installed verl, nothing is said."""
    trees.commit_all(tmp_path)
    (tree / ".git").mkdir()
    refused(project.apply(tree), 3, "not a repository of its own")
    (tree / ".git").rmdir()
    done = project.said(*(["--installed"] if installed else [tree]), PYTHONPATH=str(tree))
    assert done.count("content alone") == (not installed)
    assert snapshot(tree) == patched


def test_git_variables_do_not_mislead(project: Project, checkout: Path, tmp_path: Path) -> None:
    other = trees.copy_base(tmp_path / "other")
    change_other(other)
    trees.commit_all(other)
    project.said(checkout, "--check", GIT_DIR=f"{other}/.git")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another account")
def test_a_checkout_of_another_account_may_be_said_to_be_safe(project: Project, checkout: Path) -> None:
    """Also where variables say so, as in a container without a home."""
    for path in [checkout, *checkout.rglob("*")]:
        os.chown(path, 1234, 2345)
    refused(project.apply(checkout), 3, "dubious ownership")
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": str(checkout)}
    project.said(checkout, **safe)


def test_git_that_fails_or_is_missing_is_reported(project: Project, checkout: Path, tmp_path: Path) -> None:
    """Only a checkout needs it."""
    message = "fatal: detected dubious ownership in repository"
    fake = trees.write(tmp_path / "bin/git", f"#!/bin/sh\necho '{message}' >&2\nexit 128\n", 0o755)
    refused(project.apply(checkout, PATH=f"{fake.parent}:{os.environ['PATH']}"), 3, "HEAD", message)
    refused(project.apply(checkout, PATH=str(tmp_path)), 3, "git is not on PATH")
    shutil.rmtree(checkout / ".git")
    project.said(checkout, "--check", PATH=str(tmp_path))


# The installed verl


def test_an_installed_verl_is_not_imported(project: Project, tree: Path) -> None:
    """As in an editable installation of the commit, where only the wheel has the release's number."""
    (tree / "verl/__init__.py").write_text("raise SystemExit('imported')\n")
    (tree / "verl/version/version").write_text("0.7.0.dev\n")
    project.said("--installed", PYTHONPATH=str(tree))
    assert (tree / NEW).exists()


def test_what_an_upgrade_leaves_is_named_with_the_command(project: Project, tree: Path, tmp_path: Path) -> None:
    tree = tree.rename(tmp_path / "a tree")
    project.said(tree)
    trees.copy_base(tree)
    for name in trees.SOME_FILES:
        (tree / name).write_text("# newer\n")
    (tree / "verl/version/version").write_text("0.8.0\n")
    refused(project.apply(tree, "--check"), 12, "0.8.0")
    done = project.apply("--installed", PYTHONPATH=str(tree))
    refused(done, 3, "0.8.0")
    assert "a patched verl left files in" in done.stdout
    subprocess.run(done.stdout.partition("delete them: ")[2], shell=True, check=True)
    assert not (tree / NEW).exists() and not (tree / KEYS).exists() and (tree / "verl/utils/__init__.py").exists()


def test_where_there_is_no_verl_or_another_one(project: Project, tree: Path, tmp_path: Path) -> None:
    """Another: what `python -m verl.trainer.main_ppo` would import from the current directory."""
    elsewhere = trees.copy_base(tmp_path / "elsewhere")
    script = project.place / "apply_patch.py"
    done = trees.run(sys.executable, script, "--installed", cwd=elsewhere, PYTHONPATH=str(tree))
    refused(done, 3, str(elsewhere / "verl"), "CHECKOUT")
    # A folder that merely has the name is not the package.
    (tmp_path / "verl").mkdir()
    refused(trees.run(sys.executable, "-S", script, "--installed", PYTHONPATH=str(tmp_path)), 3, "no verl installed")


# The patch


@pytest.mark.parametrize("number", [0, 1])
def test_each_part_is_proven_by_its_checksum(project: Project, tree: Path, number: int) -> None:
    place = project.parts("0.7.0")[number]
    data, checksum = place.read_bytes(), place.with_name(f"{place.name}.sha256")
    with unchanged(tree):
        checksum.unlink()
        refused(project.apply(tree), 3, f"{checksum} cannot be read", "restore it")
        checksum.write_text("no checksum\n")
        refused(project.apply(tree), 3, f"{checksum} does not hold the SHA-256")
        trees.write_patch(place, data)
        project.said(tree, "--check")
        place.write_bytes(data + b"\n")
        refused(project.apply(tree), 3, f"{place} has SHA-256", "not the required")
        place.unlink()
        refused(project.apply(tree), 3, f"{place} cannot be read", "restore it")


def test_what_is_no_file_in_the_project(project: Project, tree: Path) -> None:
    for name in ("patches/files/" + NEW, "patches/0.7.0/hooks.patch", "gradloc/version.py"):
        content = (project.place / name).read_bytes()
        put_pipe(name)(project.place)
        with unchanged(tree):
            refused(project.apply(tree, "--vendor"), 3, name, "is not a regular file; move it away")
        (project.place / name).unlink()
        (project.place / name).write_bytes(content)


def test_parts_that_do_not_belong_together(project: Project, tree: Path, small_patch: Patch) -> None:
    """A fix that was made for other hooks; and hooks with other content than their own hashes say."""
    actor = small_patch.fixes.partition(b"dp_actor.py\nindex ")[2][:40]
    for hooks, fixes, words in (
        (small_patch.hooks, small_patch.fixes.replace(actor, b"1" * 40), ["do not belong together", ACTOR]),
        (small_patch.hooks.replace(b"# first", b"# other"), small_patch.fixes, ["is inconsistent", ACTOR]),
        (small_patch.hooks.replace(b"@@ -1,", b"@@ -2,"), small_patch.fixes, ["does not fit", ACTOR]),
    ):
        trees.write_patch(project.hooks, hooks)
        trees.write_patch(project.fixes, fixes)
        with unchanged(tree):
            refused(project.apply(tree), 3, *words)


def test_usage(project: Project, tree: Path) -> None:
    wrong = ("--check --reverse", "--vendor --no-install", "--check --vendor", "--repo x")
    for arguments in ([], [""], [tree, "--installed"], *([tree, *options.split()] for options in wrong)):
        done = project.apply(*arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr, arguments
    assert "11  --check: partly applied" in project.said("--help")


def replaced(old: str, new: str, count: int = 1):
    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), count)

    return change


OUTSIDE = ("setup.py", "verl/../../evil.py", "verl/.git/hooks/evil", "/verl/a.py", "verl/a\\b.py")
BAD = {
    **{f"path {path}": (replaced(ACTOR, path, -1), "below verl/") for path in OUTSIDE},
    "CRLF": (replaced("\n", "\r\n", -1), "damaged at line 1 "),
    "cut in a line": (lambda data: data[:-20], "damaged"),
    "cut at a line": (lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "damaged"),
    "doubled": (lambda data: data + data, "twice"),
    "index line": (replaced("index ", "index 1"), "damaged"),
    "huge number": (replaced("@@ -1,", "@@ -1," + "9" * 5000), "damaged"),
    "more lines": (replaced("+# first", "+# first\n+# more"), "number of lines"),
    "new file": (replaced("index ", "new file mode 100644\nindex "), "damaged"),
    "rename": (lambda data: data + b"diff --git a/verl/a b/verl/c\n", "damaged"),
    "no hashes": (lambda data: data + b"diff --git a/verl/a b/verl/a\n", "full blob hashes"),
}


@cases("change words", *BAD.values(), ids=BAD)
def test_bad_patch(project: Project, tree: Path, small_patch: Patch, change, words: str) -> None:
    trees.write_patch(project.hooks, change(small_patch.hooks))
    with unchanged(tree):
        refused(project.apply(tree, "--force"), 3, str(project.hooks), words)


GOOD_PIN = f"VERSION=0.7.0\nWHEEL_SHA256={'0' * 64}\n"
BAD_PINS = ("VERSION=0.7.0\n", GOOD_PIN.replace("0.7.0", "0.7.1"), f"{GOOD_PIN}COMMIT=abc\n", "\udcff")


def test_malformed_pin(project: Project, tree: Path) -> None:
    for text in BAD_PINS:
        (project.place / "patches/0.7.0/PIN").write_text(text, errors="surrogateescape")
        refused(project.apply(tree), 3, "PIN", "restore it")


# The package


def test_vendor(project: Project, tree: Path, with_package: dict) -> None:
    before = snapshot(tree)
    said = project.said(tree, "--vendor").splitlines()
    assert len(said) == 2 and said[1].endswith(f"the package is written to {tree / VENDORED}")
    assert snapshot(tree) == with_package
    assert "already in" in project.said(tree, "--vendor")
    project.said(tree, "--check", "--installing", code=10)
    # Over an older copy, with a file that is gone since and byte code.
    trees.write(tree / VENDORED / "version.py", "HOOKS = 0\n")
    trees.write(tree / VENDORED / "gone.py", "")
    trees.write(tree / VENDORED / "__pycache__/gone.cpython-311.pyc", "")
    refused(project.apply(tree, "--check", "--installing"), 11, str(tree / VENDORED), "for hooks 0, not 1")
    assert "for hooks 0, not 1" in project.said(tree)
    assert "written to" in project.said(tree, "--vendor")
    assert snapshot(tree) == with_package
    # One that was about to be replaced when a run was killed is put back.
    (tree / VENDORED).rename(tree / apply_patch.REPLACED)
    project.said(tree)
    assert snapshot(tree) == with_package
    assert f"removed from {tree / VENDORED}" in project.said(tree, "--reverse")
    assert snapshot(tree) == before


def test_check_says_whether_there_is_a_package(project: Project, tree: Path) -> None:
    project.said(tree)
    refused(project.apply(tree, "--check", "--installing"), 11, "is patched, but", "no package gradloc")
    project.said(tree, "--check", "--installing", code=10, PYTHONPATH=str(project.place))
    # One that this Python finds wins over one in verl, and pip has nothing to do if it is this checkout.
    said = project.said(tree, "--installing", PYTHONPATH=str(project.place))
    assert f"the package is already in {project.place / 'gradloc'}" in said
    said = project.said(tree, "--vendor", PYTHONPATH=str(project.place))
    assert f"{tree / VENDORED} is not used while {sys.executable} has the package in" in said
    trees.write(project.place / "other/gradloc/__init__.py", "")
    done = project.apply(tree, "--vendor", PYTHONPATH=str(project.place / "other"))
    refused(done, 5, "verl is patched, but the package in", "other/gradloc is for hooks 0, not 1", "pip install")
    said = project.said(tree, "--reverse", PYTHONPATH=str(project.place))
    assert f"in {project.place / 'gradloc'} stays; to remove it: {sys.executable} -m pip uninstall" in said


def environment(place: Path, pip: bool) -> Path:
    """A Python of its own, with this one's packages, or none."""
    trees.ran(trees.run(sys.executable, "-m", "venv", "--without-pip", place))
    if pip:
        site = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin/python"


OFFLINE = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_pip_installs_the_checkout(project: Project, tree: Path, tmp_path: Path) -> None:
    """Into the Python that runs this; it is found, used and said to stay."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "hydra_plugins"):
        copy = shutil.copytree if (trees.ROOT / name).is_dir() else shutil.copy
        copy(trees.ROOT / name, project.place / name)
    python = environment(tmp_path / "venv", pip=True)
    given = {**OFFLINE, "PYTHONPATH": str(tree), "PIP_NO_BUILD_ISOLATION": "0", "PIP_IGNORE_INSTALLED": "1"}
    command = [python, project.place / "apply_patch.py", "--installed"]
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    for how in ("installed in", "already in"):
        assert trees.ran(trees.run(*command, **given)).endswith(f"the package is {how} {site}/gradloc\n")
    assert trees.run(*command, "--check", **given).returncode == 10
    assert "-m pip uninstall gradloc-verl" in trees.ran(trees.run(*command, "--reverse", **given))
    assert not (tree / NEW).exists() and Path(site, "gradloc/version.py").exists()
    # A later checkout replaces it.
    (project.place / "gradloc/more.py").write_text("")
    assert f"installed in {site}/gradloc" in trees.ran(trees.run(*command, **given))
    assert Path(site, "gradloc/more.py").exists()


@cases("pip why", (False, "No module named pip"), (True, "pip failed (ERROR: "))
def test_where_pip_fails_verl_is_patched_and_that_is_said(
    project: Project, tree: Path, tmp_path: Path, patched: dict, pip: bool, why: str
) -> None:
    shutil.copy(trees.ROOT / "pyproject.toml", project.place)  # whose build needs what there is no index for
    python = environment(tmp_path / "venv", pip)
    done = trees.run(python, project.place / "apply_patch.py", tree, **OFFLINE, PYTHONPATH="")
    refused(done, 5, "verl is patched, but", why, "verl trains as released: run", "or this with --vendor")
    assert snapshot(tree) == patched


def test_the_package_is_what_git_has(project: Project) -> None:
    """But for pages to read."""
    tracked = trees.git(trees.ROOT, "ls-files", "gradloc").splitlines()
    assert apply_patch.package_files().keys() == {
        name.removeprefix("gradloc/") for name in tracked if not name.endswith(".md")
    }
    version, calls = (trees.ROOT / name for name in ("gradloc/version.py", f"patches/files/{apply_patch.CALLS}"))
    assert apply_patch.hooks_number(version.read_bytes()) == apply_patch.hooks_number(calls.read_bytes()) > 0


# Interruption


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "fails", "fails from there on"])
@pytest.mark.parametrize("reverse", [False, True])
def test_interrupted_anywhere(project: Project, tree: Path, with_package: dict, reverse: bool, fault: str) -> None:
    """Before each step on the disk, where an older package is replaced: the next run finishes, or takes all out."""
    base, number, came = snapshot(tree), 0, True
    while came:
        number += 1
        for again, state in (("--vendor", with_package), ("--reverse", base)):
            shutil.rmtree(tree)
            trees.copy_base(tree)
            trees.write(tree / VENDORED / "gone.py", "")
            if reverse:
                project.forked(tree, "--vendor")
            before = snapshot(tree)
            fails = trees.Fails(number, kill=fault == "killed", on=fault == "fails from there on")
            code, came = project.forked(tree, "--reverse" if reverse else "--vendor", fails=fails)
            left = snapshot(tree)
            if fault == "fails":  # all is put back, or done, but for what was beside the files
                after = base if reverse else with_package
                assert left in (before, after) or {**left, **after} == left, number
            assert code == (-9 if came and fails.kill else 4 if came else 0), number
            assert project.forked(tree, again) == (0, False)
            assert snapshot(tree) == state, number
    assert number > 20


def test_a_disk_that_is_full_or_lies_is_told_of(project: Project, tree: Path, patched: dict) -> None:
    with unchanged(tree):
        refused(project.apply_with(at_call("fsync", 4, NO_SPACE), tree), 4, "No space left on device", "put back")
        refused(project.apply_with(at_call("replace", 3, "return"), tree), 4, "does not read back", "put back")
    # If putting back fails, too, it says so, and the next run finishes.
    fault = at_call("replace", 4, NO_SPACE).replace("count == 4", "count >= 4")
    refused(project.apply_with(fault, tree), 4, f"{ALGOS} could not be put back", "run again")
    refused(project.apply(tree, "--check"), 11, "partly patched", FIXED, "--reverse")
    project.said(tree)
    assert snapshot(tree) == patched
    # If only files beside the patched ones could not be removed, nothing was put back.
    trees.write(tree / VENDORED / "old.py", "")
    done = project.apply_with(f"import shutil\ndef rmtree(*_): {NO_SPACE}\nshutil.rmtree = rmtree", tree, "--vendor")
    refused(done, 4, "all files were changed, but what was beside them could not be removed", "run again")
    refused(project.apply(tree, "--check"), 11, "an interrupted run left verl/_vendored/.gradloc-old")


def test_what_stands_where_files_are_written_is_not_replaced(project: Project, tree: Path) -> None:
    beside = apply_patch.temporary(Path(ACTOR))
    put_pipe(str(beside))(tree)
    refused(project.apply(tree), 3, f"{tree / beside} exists and is not a file; move it away")
    (tree / beside).unlink()
    (tree / beside).symlink_to("/dev/null")
    refused(project.apply(tree), 3, f"{tree / beside} is a symbolic link")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals(project: Project, tree: Path, patched: dict, name: str) -> None:
    before = snapshot(tree)
    action = f"os.kill(os.getpid(), signal.{name})"
    refused(project.apply_with(at_call("fsync", 2, action), tree), 4, "interrupted; nothing was changed")
    assert snapshot(tree) == before
    # Once files are being changed, the few moments that this takes are finished.
    assert project.apply_with(at_call("replace", 3, action), tree).returncode == 0
    assert snapshot(tree) == patched
    # pip is interrupted, and what was changed before it is said.
    project.said(tree, "--reverse")
    fault = f"import subprocess\ndef run(*_, **__): {action}\nsubprocess.run = run"
    refused(project.apply_with(fault, tree, "--installing"), 5, "verl is patched, but pip was interrupted", "--vendor")


def test_one_run_at_a_time(project: Project, tree: Path, patched: dict) -> None:
    folder = os.open(tree / "verl", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with unchanged(tree):
        refused(project.apply(tree), 3, "another run")
    os.close(folder)
    command = [sys.executable, str(project.place / "apply_patch.py"), str(tree), "--no-install"]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    for process in runs:
        message = process.communicate()[1]
        assert process.returncode in (0, 3) and "Traceback" not in message, message
    # A file system may have no locks.
    fault = "import fcntl\ndef flock(*_): raise OSError(37, 'No locks available')\nfcntl.flock = flock"
    assert "verl cannot be locked (No locks available)" in trees.ran(project.apply_with(fault, tree))
    assert snapshot(tree) == patched


# Permissions. Root may write anywhere, so the run gives up its rights after Python has loaded everything.


@pytest.fixture
def public(small_patch: Patch) -> Iterator[Project]:
    """A project that another account can read, beside a tree."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        trees.copy_base(Path(place) / "tree")
        yield Project(Path(place) / "project", small_patch)


def without_rights(public: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it as the owner of the tree, who is not root."""
    tree, drop = public.place.parent / "tree", ""
    if os.geteuid() == 0:
        drop = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
        for path in [tree, *tree.rglob("*")]:
            os.chown(path, 65534, 65534)
    return public.apply_with(drop, tree, *arguments)


def test_unwritable(public: Project) -> None:
    tree = public.place.parent / "tree"
    folder = (tree / ACTOR).parent
    for _ in range(2):
        folder.chmod(0o555)
        with unchanged(tree):
            refused(without_rights(public), 4, str(folder), "Permission denied", "every file was put back")
            assert without_rights(public, "--check").returncode == 0
        folder.chmod(0o755)
        folder = tree / "verl/utils"
    assert without_rights(public).returncode == 0
    folder.chmod(0o555)
    assert "already applied" in without_rights(public).stdout
    folder.chmod(0o755)


def test_byte_code_that_cannot_be_removed(public: Project) -> None:
    """It is in the way only if Python would run it without a look at the source."""
    tree = public.place.parent / "tree"
    for mode in (py_compile.PycInvalidationMode.UNCHECKED_HASH, None):
        cache = Path(py_compile.compile(str(tree / ACTOR), invalidation_mode=mode)).parent
        cache.chmod(0o555)
        before = snapshot(tree)
        done = without_rights(public)
        if mode:
            refused(done, 4, str(cache), "every file was put back")
            assert snapshot(tree) == before
        cache.chmod(0o755)
    assert done.returncode == 0, done.stderr


# The project's own patch


@pytest.mark.every_target
@pytest.mark.smoke
def test_the_real_patch(base_tree: Path, tmp_path: Path) -> None:
    """test_make_patch.py compares it, with the package, with what git makes of it."""
    tree = trees.copy_base(tmp_path / "tree", files=None)
    command = [sys.executable, trees.ROOT / "apply_patch.py", tree]
    with unchanged(tree):
        assert f"(verl {trees.TARGET}, " in trees.ran(trees.run(*command, "--no-install"))
        (target,) = apply_patch.narrowed(apply_patch.read_targets(), trees.TARGET)
        for patch in apply_patch.load_target(target):
            assert apply_patch.blob_hash((tree / patch.path).read_bytes()) == patch.new
        assert trees.run(*command, "--check", "--no-install").returncode == 10
        trees.ran(trees.run(*command, "--reverse"))
