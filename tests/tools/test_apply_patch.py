"""apply_patch.py on real trees: what it does, what it refuses, and what is left when it is interrupted."""

import fcntl
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from notation import cases

import apply_patch
import trees
from trees import ACTOR, ALGOS, DELETED, NEW, Patch, Project, at_call, refused, reply, snapshot, unchanged

NO_SPACE = "raise OSError(28, 'No space left on device')"


@pytest.fixture(scope="session")
def patched(base_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bytes]]:
    """What the patched tree must be, made without the tool under test."""
    tree = trees.copy_base(tmp_path_factory.mktemp("patched"))
    for edit in (trees.add_package, trees.hook, trees.fix):
        edit(tree)
    return snapshot(tree)


def refuses(project: Project, tree: Path, code: int, *words: str) -> None:
    """--check says with its code what is wrong, all else refuses it, and nothing changes."""
    with unchanged(tree.parent):
        refused(project.apply("--repo", tree, "--check"), code, *words)
        for argument in ([], ["--force"], ["--reverse"]):
            refused(project.apply("--repo", tree, *argument), 3, *words)


# Applying, reversing and saying how a tree stands


def test_apply_again_and_reverse(project: Project, tree: Path, patched: dict) -> None:
    before = snapshot(tree)
    project.said(f"--repo=~/{tree.name}", "--check", HOME=str(tree.parent))  # which no shell expands
    assert snapshot(tree) == before
    done = project.said("--repo", tree)
    last = f"verdicts in training, and the command `gradloc report DIR`, come with `pip install .` in {project.place}\n"
    assert "applied to" in done and done.endswith(last)
    assert snapshot(tree) == patched
    assert "already applied" in project.said("--repo", tree)
    project.said("--repo", tree, "--check", code=10)
    for again in (False, True):
        assert ("nothing to reverse" in project.said("--repo", tree, "--reverse")) == again
        assert snapshot(tree) == before


def test_owner_and_permissions_are_those_of_the_folder(project: Project, tree: Path) -> None:
    """Whatever the umask; only root may give files to another account."""
    mode, owner = 0o2770, (1234, 2345) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, *owner)
    (tree / "verl/utils").chmod(mode)
    (tree / ACTOR).chmod(mode & 0o777)
    command = [sys.executable, project.place / "apply_patch.py", "--repo", tree]
    for arguments in ([], ["--reverse"], []):
        trees.ran(trees.run("bash", "-c", 'umask 077; exec "$@"', "-", *command, *arguments))
    package = tree / "verl/utils/gradloc"
    for place, mask in ((package, 0o7777), (package / "__init__.py", 0o666), (package / "tool.py", 0o777)):
        assert place.stat().st_mode & 0o7777 == mode & mask
    assert (tree / ACTOR).stat().st_mode & 0o777 == mode & 0o777
    assert {(path.stat().st_uid, path.stat().st_gid) for path in [tree, *tree.rglob("*")]} == {owner}
    project.said("--repo", tree, "--reverse")
    assert (tree / DELETED).stat().st_mode & 0o7777 == mode & 0o666


def test_byte_code_of_changed_files_is_removed(project: Project, tree: Path) -> None:
    """Python runs byte code of this kind without a look at the source."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH

    def compiled(name: str) -> Path:
        return Path(py_compile.compile(str(tree / name), invalidation_mode=unchecked))

    unchanged = compiled("verl/__init__.py")
    for arguments in ([], ["--reverse"]):
        stale = [compiled(ACTOR), compiled(ALGOS)]
        project.said("--repo", tree, *arguments)
        assert not any(file.exists() for file in stale) and unchanged.exists()
    # So is what another process compiled from the patched file before a run failed.
    action = f"import py_compile; py_compile.compile({str(tree / ACTOR)!r}); {NO_SPACE}"
    refused(project.apply_with(at_call("replace", 7, action), "--repo", tree), 4, "put back")
    assert not list((tree / ACTOR).parent.glob("__pycache__/*"))


def test_the_package_goes_with_its_byte_code_alone(project: Project, tree: Path) -> None:
    before = snapshot(tree)
    for name, stays in (("__pycache__/tool.cpython-311.pyc", False), ("mine.txt", True)):
        project.said("--repo", tree)
        file = trees.write((tree / NEW).parent / name, "mine")
        project.said("--repo", tree, "--reverse")
        assert file.exists() == stays and not (tree / NEW).exists() and (stays or snapshot(tree) == before)


@pytest.mark.parametrize("some", [False, True])
def test_files_left_behind_are_no_obstacle(project: Project, tree: Path, patched: dict, some: bool) -> None:
    """pip and git restore verl's own files, and leave those that only the patch makes, or some of them."""
    before = snapshot(tree)
    for again, state in ((["--reverse"], before), ([], patched)):
        project.said("--repo", tree)
        trees.copy_base(tree)
        if some:
            (tree / NEW).unlink()
        done = project.said("--repo", tree, "--check")
        assert "left there" in done and "tool.py" in done
        project.said("--repo", tree, *again)
        assert snapshot(tree) == state


def test_tree_of_an_older_patch(project: Project, tree: Path, tmp_path: Path, patched: dict) -> None:
    """--reverse with the old project leads to the new patch, as restoring all of verl does from a part of it."""
    scratch = trees.copy_base(tmp_path / "scratch")
    base = trees.commit_all(scratch)
    trees.write(scratch / ACTOR, "# older\n")
    trees.write(scratch / NEW, "x = 0\n")
    older = Project(tmp_path / "older", Patch(b"", trees.diff(scratch, base, trees.commit_all(scratch)), b"", b""))
    older.said("--repo", tree)
    refuses(project, tree, 11, ACTOR, "older version", "--reverse")
    older.said("--repo", tree, "--reverse")
    project.said("--repo", tree)
    assert snapshot(tree) == patched
    trees.copy_base(tree, [ALGOS])
    refuses(project, tree, 11, "partly", ALGOS, "restore all of verl")


def link_actor(tree: Path) -> None:
    (tree / ACTOR).parent.rename(tree.parent / "outside")
    (tree / ACTOR).parent.symlink_to(tree.parent / "outside")


SPOILT = {
    "missing": (lambda tree: (tree / ALGOS).unlink(), 12, [ALGOS]),
    "changed": (lambda tree: (tree / ALGOS).write_bytes(b"mine\n"), 12, [ALGOS]),
    "CRLF": (lambda tree: (tree / ACTOR).write_text((tree / ACTOR).read_text(), newline="\r\n"), 12, ["CRLF", ACTOR]),
    "link": (link_actor, 3, ["symbolic link"]),
    "directory": (lambda tree: (tree / NEW).mkdir(parents=True), 3, ["exists and is not a file"]),
    "file": (lambda tree: (tree / NEW).parent.write_text("mine"), 3, ["gradloc exists and is not a folder"]),
    "no verl": (lambda tree: shutil.rmtree(tree / "verl"), 3, ["verl/__init__.py"]),
    "nothing": (shutil.rmtree, 3, ["not a directory"]),
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
    refused(project.apply("--repo", place, "--check"), code, *words)
    refused(project.apply("--repo", place), 3, *words)
    assert snapshot(place) == before
    project.said("--repo", place, "--force")


def test_files_that_git_does_not_track_are_no_matter(project: Project, checkout: Path, patched: dict) -> None:
    """Neither others' nor those that a patched verl left behind, unless they are in the patch's place."""
    for name in ("notes.txt", "verl/notes.py"):
        (checkout / name).write_text("mine")
    project.said("--repo", checkout)
    project.said("--repo", checkout, "--reverse")
    assert trees.git(checkout, "status", "--porcelain", "--untracked-files=no") == ""
    trees.write(checkout / NEW, "mine")
    refused(project.apply("--repo", checkout), 3, NEW)
    assert (checkout / NEW).read_text() == "mine"
    trees.git(checkout, "clean", "-qfd")
    project.said("--repo", checkout)
    trees.git(checkout, "checkout", "-q", ".")
    project.said("--repo", checkout)
    assert snapshot(checkout) == patched


@pytest.mark.parametrize("installed", [False, True])
def test_a_tree_in_a_repository(project: Project, tree: Path, tmp_path: Path, patched: dict, installed: bool) -> None:
    """git apply would skip every file here and exit 0. Of an installed verl, nothing is said."""
    trees.commit_all(tmp_path)
    (tree / ".git").mkdir()
    refused(project.apply("--repo", tree), 3, "not a repository of its own")
    (tree / ".git").rmdir()
    done = project.said(*(["--installed"] if installed else ["--repo", tree]), PYTHONPATH=str(tree))
    assert done.count("content alone") == (not installed)
    assert snapshot(tree) == patched


def test_git_variables_do_not_mislead(project: Project, checkout: Path, tmp_path: Path) -> None:
    other = trees.copy_base(tmp_path / "other")
    change_other(other)
    trees.commit_all(other)
    project.said("--repo", checkout, "--check", GIT_DIR=f"{other}/.git")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another account")
def test_a_checkout_of_another_account_may_be_said_to_be_safe(project: Project, checkout: Path) -> None:
    """Also where variables say so, as in a container without a home."""
    for path in [checkout, *checkout.rglob("*")]:
        os.chown(path, 1234, 2345)
    refused(project.apply("--repo", checkout), 3, "dubious ownership")
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": str(checkout)}
    project.said("--repo", checkout, **safe)


def test_git_that_fails_or_is_missing_is_reported(project: Project, checkout: Path, tmp_path: Path) -> None:
    """Only a checkout needs it."""
    message = "fatal: detected dubious ownership in repository"
    fake = trees.write(tmp_path / "bin/git", f"#!/bin/sh\necho '{message}' >&2\nexit 128\n", 0o755)
    refused(project.apply("--repo", checkout, PATH=f"{fake.parent}:{os.environ['PATH']}"), 3, "HEAD", message)
    refused(project.apply("--repo", checkout, PATH=str(tmp_path)), 3, "git is not on PATH")
    shutil.rmtree(checkout / ".git")
    project.said("--repo", checkout, "--check", PATH=str(tmp_path))


# The installed verl


def test_an_installed_verl_is_not_imported(project: Project, tree: Path) -> None:
    """As in an editable installation of the commit, where only the wheel has the release's number."""
    (tree / "verl/__init__.py").write_text("raise SystemExit('imported')\n")
    (tree / "verl/version/version").write_text("0.7.0.dev\n")
    project.said("--installed", PYTHONPATH=str(tree))
    assert (tree / NEW).exists()


def test_what_an_upgrade_leaves_is_named_with_the_command(project: Project, tree: Path, tmp_path: Path) -> None:
    """As are files of an older patch in a verl that is as released."""
    tree = tree.rename(tmp_path / "a tree")
    project.said("--repo", tree)
    trees.copy_base(tree)
    (tree / NEW).write_text("x = 0  # of an older patch\n")
    refuses(project, tree, 11, "left", NEW, "run again: rm -r ")
    for name in trees.SOME_FILES:
        (tree / name).write_text("# newer\n")
    (tree / "verl/version/version").write_text("0.8.0\n")
    refused(project.apply("--repo", tree, "--check"), 12, "0.8.0")
    done = project.apply("--installed", PYTHONPATH=str(tree))
    refused(done, 3, "0.8.0")
    assert "a patched verl left files in" in done.stdout
    subprocess.run(done.stdout.partition("delete them: ")[2], shell=True, check=True)
    assert not (tree / NEW).parent.exists() and (tree / "verl/utils/__init__.py").exists()


def test_where_there_is_no_verl_or_another_one(project: Project, tree: Path, tmp_path: Path) -> None:
    """Another: what `python -m verl.trainer.main_ppo` would import from the current directory."""
    elsewhere = trees.copy_base(tmp_path / "elsewhere")
    script = project.place / "apply_patch.py"
    done = trees.run(sys.executable, script, "--installed", cwd=elsewhere, PYTHONPATH=str(tree))
    refused(done, 3, str(elsewhere / "verl"), "--repo")
    # A folder that merely has the name is not the package.
    (tmp_path / "verl").mkdir()
    refused(trees.run(sys.executable, "-S", script, "--installed", PYTHONPATH=str(tmp_path)), 3, "no verl installed")


# The patch


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_part_is_proven_by_its_checksum(project: Project, tree: Path, number: int) -> None:
    place = project.parts("0.7.0")[number]
    data, checksum = place.read_bytes(), place.with_name(f"{place.name}.sha256")
    with unchanged(tree):
        checksum.unlink()
        refused(project.apply("--repo", tree), 3, f"{checksum} cannot be read", "restore it")
        checksum.write_text("no checksum\n")
        refused(project.apply("--repo", tree), 3, f"{checksum} does not hold one SHA-256")
        checksum.write_text(f"{'1' * 64}  other\n{hashlib.sha256(data).hexdigest()}  {place.name}\n")
        project.said("--repo", tree, "--check")
        place.write_bytes(data + b"\n")
        refused(project.apply("--repo", tree), 3, f"{place} has SHA-256", "not the required")
        place.unlink()
        refused(project.apply("--repo", tree), 3, f"{place} cannot be read", "restore it")


def test_parts_that_do_not_belong_together(project: Project, tree: Path, small_patch: Patch) -> None:
    """A fix that was made for other hooks; and hooks with other content than their own hashes say."""
    actor = small_patch.fixes.partition(b"index ")[2][:40]
    for hooks, fixes, words in (
        (small_patch.hooks, small_patch.fixes.replace(actor, b"1" * 40), ["do not belong together", ACTOR]),
        (small_patch.hooks.replace(b"# first", b"# other"), small_patch.fixes, ["is inconsistent", ACTOR]),
    ):
        trees.write_patch(project.hooks, hooks)
        trees.write_patch(project.fixes, fixes)
        with unchanged(tree):
            refused(project.apply("--repo", tree), 3, *words)


def test_a_patch_in_one_file(project: Project, tree: Path, small_patch: Patch, tmp_path: Path, patched: dict) -> None:
    given = trees.write_patch(tmp_path / "my.patch", small_patch.whole)
    sha256 = hashlib.sha256(small_patch.whole).hexdigest()
    command = ["--repo", tree, "--patch-file", given]
    for part in project.parts("0.7.0"):
        part.unlink()
    refused(project.apply("--repo", tree, "--patch-file", tmp_path), 3, "cannot be read")
    refused(project.apply(*command, "--patch-sha256", "0" * 64), 3, "not the required")
    project.said(*command, "--check", "--patch-sha256", sha256.upper())
    Path(f"{given}.sha256").write_text(f"{'1' * 64}  other\n{sha256}  my.patch\n")
    project.said(*command)
    assert snapshot(tree) == patched
    Path(f"{given}.sha256").unlink()
    refused(project.apply(*command), 3, "SHA-256 is required")


def test_usage(project: Project, tree: Path) -> None:
    for arguments in (
        [],
        ["--repo", tree, "--patch-sha256", "0" * 64],
        ["--repo", tree, "--patch-url", "https://example.org/x"],
        ["--repo", tree, "--check", "--reverse"],
    ):
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
    **{f"path {path}": (replaced(NEW, path, -1), "below verl/") for path in OUTSIDE},
    "empty": (lambda data: b"", "empty"),
    "CRLF": (replaced("\n", "\r\n", -1), "CRLF"),
    "cut in a line": (lambda data: data[:-20], "cut off"),
    "cut at a line": (lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "damaged"),
    "doubled": (lambda data: data + data, "twice"),
    "index line": (replaced("index ", "index 1"), "damaged"),
    "huge number": (replaced("@@ -1,", "@@ -" + "9" * 5000 + ","), "damaged"),
    "moved hunk": (replaced("@@ -1,", "@@ -2,"), "is inconsistent"),
    "more lines": (replaced("+# first", "+# first\n+# more"), "damaged"),
    "symbolic link": (replaced("new file mode 100644", "new file mode 120000"), "damaged"),
    "rename": (lambda data: data + b"diff --git a/verl/a b/verl/c\n", "renames"),
    "binary": (lambda data: data + b"diff --git a/verl/a b/verl/a\nGIT binary patch\n", "binary"),
    "no hashes": (lambda data: data + b"diff --git a/verl/a b/verl/a\n", "full blob hashes"),
}


@cases("change words", *BAD.values(), ids=BAD)
def test_bad_patch(project: Project, tree: Path, small_patch: Patch, tmp_path: Path, change, words: str) -> None:
    given = trees.write_patch(tmp_path / "bad.patch", change(small_patch.whole))
    with unchanged(tree):
        refused(project.apply("--repo", tree, "--patch-file", given, "--force"), 3, words)


GOOD_PIN = f"VERSION=0.7.0\nWHEEL_SHA256={'0' * 64}\n"
BAD_PINS = ("VERSION=0.7.0\n", GOOD_PIN.replace("0.7.0", "0.7.1"), f"{GOOD_PIN}COMMIT=abc\n", "\udcff")


def test_malformed_pin(project: Project, tree: Path) -> None:
    for text in BAD_PINS:
        (project.place / "patches/0.7.0/PIN").write_text(text, errors="surrogateescape")
        refused(project.apply("--repo", tree), 3, "PIN", "restore it")


# Downloads


def test_patch_url(project: Project, tree: Path, small_patch: Patch) -> None:
    data = small_patch.whole
    sha256 = hashlib.sha256(data).hexdigest()
    answers = {"/g.patch": reply(data), "/g.patch.sha256": reply(f"{sha256}  g.patch\n".encode())}
    moved = reply(b"", "302 Found", "Location: /g.patch")
    with trees.web_server({**answers, "/moved": moved}) as url:
        check = ["--repo", tree, "--check", "--patch-url"]
        project.said(*check, f"{url}/moved", "--patch-sha256", sha256)
        # A proxy must not see requests to this machine.
        given = [f"{url}/g.patch", "--sha256-file", f"{url}/g.patch.sha256"]
        project.said(*check, *given, http_proxy="http://127.0.0.1:9")
        refused(project.apply(*check, f"{url}/g.patch", "--sha256-file", f"{url}/absent"), 3, "404")


def drip(handler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:  # until the other end closes the connection
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.1)


ODD_ANSWERS = {
    "/cut": (b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nabc", "could not be downloaded"),
    "/loop": (reply(b"", "302 Found", "Location: /loop"), "could not be downloaded"),
    "/plain": (reply(b"", "302 Found", "Location: http://example.org/x"), "use an https URL"),
    "/file": (reply(b"", "302 Found", "Location: file:///etc/passwd"), "could not be downloaded"),
}
ODD_URLS = {
    "http://localhost.example.org/x": "use an https URL",
    "http://127.0.0.1@example.org/x": "use an https URL",
    "https://user:secret@example.org/x": "the URL names a user, which is not supported",
    "http://127.0.0.1:1/\u00e9": "could not be downloaded",
    "https://[::1/x": "could not be downloaded",
}


def test_odd_urls_and_answers(project: Project, tree: Path) -> None:
    arguments = ["--repo", tree, "--patch-sha256", "0" * 64, "--patch-url"]
    answers = {path: answer for path, (answer, _) in ODD_ANSWERS.items()}
    with unchanged(tree), trees.web_server({**answers, "/drip": drip, "/big": reply(b"x" * 2000)}) as url:
        for odd, words in ({url + path: words for path, (_, words) in ODD_ANSWERS.items()} | ODD_URLS).items():
            done = project.apply(*arguments, odd)
            refused(done, 3, words)
            assert "secret" not in done.stderr
        refused(project.apply_with("apply_patch.TIME_LIMIT = 1", *arguments, f"{url}/drip"), 3, "1 seconds")
        refused(project.apply_with("apply_patch.SIZE_LIMIT = 1000", *arguments, f"{url}/big"), 3, "larger than")


def test_redirect_from_https_is_not_downgraded() -> None:
    """Called directly: a TLS server would need a certificate that Python trusts."""
    request = urllib.request.Request("https://example.org/x")
    redirect = apply_patch.SafeRedirect().redirect_request
    for place, words in (("http://127.0.0.1/x", "from https to"), ("http://example.org/x", "use an https URL")):
        with pytest.raises(apply_patch.Stop, match=words):
            redirect(request, None, 302, "Found", {}, place)
    assert redirect(request, None, 302, "Found", {}, "https://example.org/y").full_url == "https://example.org/y"


# Interruption: the small patch makes seven steps, after the journal's own os.replace: four new files,
# then changes of two, then a removal


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
CALLS = [*(("replace", number) for number in (1, 2, 5, 6, 7)), ("fsync", 1), ("fsync", 9)]


@pytest.mark.parametrize("call", [*CALLS, ("unlink", 1)])
def test_killed(project: Project, tree: Path, patched: dict, call: tuple[str, int]) -> None:
    """While it is applied, and once more while it is put back; then while it is taken out."""
    before = snapshot(tree)
    for recovery, state in ((["--reverse"], before), ([], patched)):
        done = project.apply_with(at_call(*call, KILL), "--repo", tree)
        assert done.returncode == -9, done.stderr
        assert project.apply("--repo", tree, "--check").returncode in (0, 11)
        if call == ("replace", 7):
            assert project.apply_with(at_call("replace", 1, KILL), "--repo", tree).returncode == -9
        project.said("--repo", tree, *recovery)
        assert snapshot(tree) == state
    if project.apply_with(at_call(*call, KILL), "--repo", tree, "--reverse").returncode == -9:
        project.said("--repo", tree, "--reverse")
    assert snapshot(tree) == before


def test_a_disk_that_is_full_or_lies_is_rolled_back(project: Project, tree: Path, patched: dict) -> None:
    with unchanged(tree):
        for call in CALLS:
            done = project.apply_with(at_call(*call, NO_SPACE), "--repo", tree)
            refused(done, 4, "No space left on device", "put back")
        done = project.apply_with(at_call("replace", 3, "return"), "--repo", tree)
        refused(done, 4, "does not read back", "put back")
    # A roll-back that fails keeps the journal.
    fault = at_call("replace", 7, NO_SPACE).replace("count == 7", "count >= 7")
    refused(project.apply_with(fault, "--repo", tree), 4, "could not be put back")
    project.said("--repo", tree)
    assert snapshot(tree) == patched


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals(project: Project, tree: Path, patched: dict, name: str) -> None:
    before = snapshot(tree)
    action = f"os.kill(os.getpid(), signal.{name})"
    refused(project.apply_with(at_call("fsync", 2, action), "--repo", tree), 4, "interrupted")
    assert snapshot(tree) == before
    # Once files are being changed, the few moments that this takes are finished.
    assert project.apply_with(at_call("replace", 3, action), "--repo", tree).returncode == 0
    assert snapshot(tree) == patched


def test_one_run_at_a_time(project: Project, tree: Path, patched: dict) -> None:
    with open(state_of(tree) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(project.apply("--repo", tree), 3, "another run")
    command = [sys.executable, str(project.place / "apply_patch.py"), "--repo", str(tree)]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    for process in runs:
        message = process.communicate()[1]
        assert process.returncode in (0, 3) and "Traceback" not in message, message
    project.said("--repo", tree)
    assert snapshot(tree) == patched


def state_of(tree: Path, journal: str | None = None) -> Path:
    """The folder in which a run keeps its state, with this journal."""
    state = tree / apply_patch.STATE
    state.mkdir(exist_ok=True)
    if journal is not None:
        (state / "journal.json").write_text(journal, errors="surrogateescape")
    return state


def journal_entry(path: str, old: str | None, new: str | None) -> str:
    return json.dumps([{"path": path, "old": old, "new": new}])


VICTIM = apply_patch.blob_hash(b"precious\n")
BAD_JOURNALS = (
    "{",
    "[" * 100000,
    "\udcff",
    journal_entry("../victim", None, VICTIM),
    journal_entry("verl/__init__.py", "x", "y"),
)


def test_a_damaged_journal_does_no_harm_and_advice_helps(project: Project, tree: Path, patched: dict) -> None:
    victim = tree.parent / "victim"
    victim.write_text("precious\n")
    assert project.apply_with(at_call("replace", 7, KILL), "--repo", tree).returncode == -9
    code = snapshot(tree / "verl/utils")
    assert (tree / NEW).exists()
    for text in BAD_JOURNALS:
        state = state_of(tree, text)
        refused(project.apply("--repo", tree), 3, "journal", "damaged", "restore verl", f"delete {state}", "run again")
        assert victim.read_text() == "precious\n" and snapshot(tree / "verl/utils") == code
    trees.copy_base(tree)
    shutil.rmtree(state)
    project.said("--repo", tree)
    assert snapshot(tree) == patched


def test_journal_does_not_lead_outside_or_over_edits(project: Project, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    victim = tmp_path / "outside/victim"
    victim.write_text("precious\n")
    (tree / "verl/link").symlink_to(tmp_path / "outside")
    state_of(tree, journal_entry("verl/link/victim", None, VICTIM))
    refused(project.apply("--repo", tree), 4, "symbolic link")
    assert victim.read_text() == "precious\n"
    # A file that is neither as before nor as after was edited by someone: it stays.
    (tree / DELETED).write_text("mine\n")
    state = state_of(tree, journal_entry(DELETED, "0" * 40, VICTIM))
    refused(project.apply("--repo", tree), 4, DELETED)
    # A copy that is not what the journal promises is not put anywhere.
    (state / "0.old").write_text("wrong\n")
    state_of(tree, journal_entry(DELETED, "0" * 40, apply_patch.blob_hash(b"mine\n")))
    refused(project.apply("--repo", tree), 4, "damaged")
    assert (tree / DELETED).read_text() == "mine\n"


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
    return public.apply_with(drop, "--repo", tree, *arguments)


@pytest.mark.parametrize("locked", ["verl", "verl/workers/actor", ACTOR])
def test_unwritable(public: Project, locked: str) -> None:
    tree = public.place.parent / "tree"
    mode = (tree / locked).stat().st_mode
    (tree / locked).chmod(mode & ~0o222)
    with unchanged(tree):
        refused(without_rights(public), 3, locked.partition("/")[2] or locked, "cannot be written")
        assert without_rights(public, "--check").returncode == 0
    (tree / locked).chmod(mode)
    assert without_rights(public).returncode == 0
    (tree / locked).chmod(mode & ~0o222)
    assert "already applied" in without_rights(public).stdout
    (tree / locked).chmod(mode)


def test_byte_code_that_cannot_be_removed(public: Project) -> None:
    """It is in the way only if Python would run it without a look at the source."""
    actor = public.place.parent / "tree" / ACTOR
    for mode in (py_compile.PycInvalidationMode.UNCHECKED_HASH, None):
        cache = Path(py_compile.compile(str(actor), invalidation_mode=mode)).parent
        cache.chmod(0o555)
        done = without_rights(public)
        cache.chmod(0o755)
        if mode:
            refused(done, 3, f"{cache} cannot be written")
    assert done.returncode == 0, done.stderr


# The project's own patch


@pytest.mark.every_target
@pytest.mark.smoke
def test_the_real_patch(base_tree: Path, tmp_path: Path) -> None:
    tree = trees.copy_base(tmp_path / "tree", files=None)
    before = snapshot(tree)
    command = [sys.executable, trees.ROOT / "apply_patch.py", "--repo", tree]
    assert f"(verl {trees.TARGET}, " in trees.ran(trees.run(*command))
    (target,) = apply_patch.narrowed(apply_patch.read_targets(), trees.TARGET)
    for patch in apply_patch.load_target(target):
        path = tree / patch.path
        assert apply_patch.blob_hash(path.read_bytes() if path.exists() else None) == patch.new
    by_git = trees.copy_base(tmp_path / "by_git", files=None)
    trees.git(by_git, "init", "-q")
    parts = [str(part) for part in target.parts]
    trees.git(by_git, "apply", "--whitespace=error-all", *parts)
    assert snapshot(tree) == snapshot(by_git)
    assert trees.run(*command, "--check").returncode == 10
    assert trees.run(*command, "--reverse").returncode == 0
    assert snapshot(tree) == before
    trees.git(by_git, "apply", "-R", *reversed(parts))
    assert snapshot(by_git) == before
