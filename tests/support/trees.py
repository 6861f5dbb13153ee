"""Real verl trees, copies of the project and misbehaving web servers for the tests of the tools."""

import contextlib
import dataclasses
import hashlib
import http.server
import itertools
import os
import shutil
import socketserver
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE_TREE = Path(os.environ.get("GRADLOC_BASE_TREE") or ROOT / "build" / "base").resolve()
VERSION_FILE = BASE_TREE / "verl/version/version"
TARGET = VERSION_FILE.read_text().strip() if VERSION_FILE.is_file() else ""  # the verl that the tests run against
HAS_PLUGINS = not TARGET.startswith("0.7.")  # whether GradLoc can be a plugin of it
# A few real files are enough for most tests, and keep them fast.
ACTOR = "verl/workers/actor/dp_actor.py"
ALGOS = "verl/trainer/ppo/core_algos.py"
DELETED = "verl/utils/import_utils.py"
NEW = "verl/utils/gradloc/__init__.py"
KEYS = "verl/trainer/config/gradloc/actor.yaml"
SOME_FILES = ["verl/__init__.py", "verl/version/version", ACTOR, ALGOS, DELETED, "verl/utils/__init__.py"]


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=os.environ | environment, **options)


def ran(done: subprocess.CompletedProcess[str]) -> str:
    """What a command has printed, which must have succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgSign=false"]
    return ran(run("git", "-C", repo, *identity, *arguments)).strip()


def commit_all(repo: Path) -> str:
    if not (repo / ".git").exists():
        git(repo, "init", "-q")
    git(repo, "add", "-A", "-f")
    git(repo, "commit", "-q", "-m", "state")
    return git(repo, "rev-parse", "HEAD")


def copy_base(target: Path, files: list[str] | None = SOME_FILES) -> Path:
    """A release tree (without git) in target; files=None copies all of verl."""
    if files is None:
        shutil.copytree(BASE_TREE / "verl", target / "verl", ignore=shutil.ignore_patterns("__pycache__"))
        return target
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(BASE_TREE / name, target / name)
    if "verl/version/version" in files:  # small trees and their patches are of one release, whatever is tested
        (target / "verl/version/version").write_text("0.7.0\n")
    return target


def hook(tree: Path) -> None:
    actor = tree / ACTOR
    actor.write_text("# first\n" + actor.read_text().replace("import os\n", "import os  # kept\n"))
    algos = tree / ALGOS
    algos.write_bytes(algos.read_bytes().rstrip(b"\n"))
    (tree / DELETED).unlink()


def fix(tree: Path) -> None:
    """A change of a file that has a hook, too."""
    actor = tree / ACTOR
    actor.write_text(actor.read_text() + "# last\n")


def add_package(tree: Path) -> None:
    package = tree / "verl/utils/gradloc"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    (package / "no_newline.py").write_text("y = 2")
    (package / "tool.py").write_text("z = 3\n")
    (package / "tool.py").chmod(0o755)
    (tree / KEYS).parent.mkdir(parents=True)
    (tree / KEYS).write_text("")


def write(file: Path, text: str, mode: int = 0o644) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def write_patch(path: Path, data: bytes) -> Path:
    """Writes a patch with a right checksum beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.with_name(path.name + ".sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
    return path


def make_next_release(tree: Path, version: str = "0.7.1") -> Path:
    """Turns a tree of verl into one of a later release, in which a file of the small patch differs."""
    (tree / "verl/version/version").write_text(f"{version}\n")
    algos = tree / ALGOS
    algos.write_text(f"# as in {version}\n{algos.read_text()}")
    return tree


@dataclasses.dataclass(frozen=True)
class Patch:
    """A patch in its three parts, and in one file."""

    package: bytes
    hooks: bytes
    fixes: bytes
    whole: bytes


def diff(repo: Path, old: str, new: str) -> bytes:
    return (git(repo, "diff", "--full-index", "--no-renames", "--no-color", old, new) + "\n").encode()


def small_patch(scratch: Path, version: str = "0.7.0") -> Patch:
    copy_base(scratch)
    if version != "0.7.0":
        make_next_release(scratch, version)
    commits = [commit_all(scratch)]
    for step in (add_package, hook, fix):
        step(scratch)
        commits.append(commit_all(scratch))
    parts = (diff(scratch, *pair) for pair in itertools.pairwise(commits))
    return Patch(*parts, diff(scratch, commits[0], commits[-1]))


class Project:
    """A copy of the project's tools with a target of its own, 0.7.0."""

    def __init__(self, place: Path, patch: Patch | None, commit: str = "0" * 40):
        self.place = place
        self.package, self.hooks, self.fixes = self.parts("0.7.0")
        self.hooks.parent.mkdir(parents=True)
        for name in ("apply_patch.py", "make_patch.sh"):
            shutil.copy(ROOT / name, place / name)
        shutil.copytree(ROOT / "tools", place / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        if patch is not None:
            self.write(patch)
        self.pin(commit)

    def parts(self, version: str) -> list[Path]:
        patches = self.place / "patches"
        return [patches / "package.patch", patches / version / "hooks.patch", patches / version / "fixes.patch"]

    def write(self, patch: Patch, version: str = "0.7.0") -> None:
        for part, data in zip(self.parts(version), (patch.package, patch.hooks, patch.fixes), strict=True):
            write_patch(part, data)

    def text(self, version: str = "0.7.0") -> bytes:
        """The parts of a patch in a row."""
        return b"".join(part.read_bytes() for part in self.parts(version))

    def pin(self, commit: str | None, version: str = "0.7.0") -> None:
        of_commit = f"COMMIT={commit}\n" if commit else ""
        write(self.place / f"patches/{version}/PIN", f"VERSION={version}\n{of_commit}WHEEL_SHA256={'0' * 64}\n")

    def add_target(self, version: str, patch: Patch | None) -> None:
        """Another target, whose commit is not known; the first one stays the default."""
        self.pin(None, version)
        write(self.place / "patches/DEFAULT", "0.7.0\n")
        if patch is not None:
            self.write(patch, version)

    def apply(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, self.place / "apply_patch.py", *arguments, **environment)

    def said(self, *arguments: str | Path, code: int = 0, **environment: str) -> str:
        """What a run that ends with this code prints."""
        done = self.apply(*arguments, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def apply_with(self, fault: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs apply_patch after executing some code that makes it fail."""
        code = f"import os, signal, sys; import apply_patch\n{fault}\nsys.exit(apply_patch.main())"
        return run(sys.executable, "-B", "-c", code, *arguments, cwd=self.place)

    def make(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return run("bash", self.place / "make_patch.sh", *arguments, PYTHON=sys.executable, **environment)


def at_call(function: str, number: int, action: str) -> str:
    """Code that runs `action` instead of the number-th call of os.<function>."""
    return f"""
real, count = os.{function}, 0
def fault(*arguments):
    global count
    count += 1
    if count == {number}:
        {action}
    return real(*arguments)
os.{function} = fault
"""


def snapshot(tree: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a tree except .git: names, modes and contents."""
    found = {}
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree)
        if name.parts[0] != ".git":
            content = b"" if path.is_dir() else path.read_bytes()
            found[str(name)] = (stat.S_IMODE(path.stat().st_mode), content)
    return found


@contextlib.contextmanager
def unchanged(tree: Path) -> Iterator[None]:
    """The block must leave the tree as it is."""
    before = snapshot(tree)
    yield
    assert snapshot(tree) == before


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One clear sentence, the right exit code, no traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith(("apply_patch: ", "make_patch.sh: ")), done.stderr
    assert all(word in done.stderr for word in words), done.stderr


Answer = bytes | Callable[[socketserver.StreamRequestHandler], None]


@contextlib.contextmanager
def web_server(answers: dict[str, Answer]) -> Iterator[str]:
    """Serves raw replies by path on loopback, so that they can be as wrong as a test wants."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path, b"HTTP/1.0 404 Not Found\r\n\r\n")
            with contextlib.suppress(OSError):
                if callable(answer):
                    answer(self)
                else:
                    self.wfile.write(answer)

        do_POST = do_GET

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.0 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
