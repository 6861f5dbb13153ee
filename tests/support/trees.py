"""Real verl trees, and copies of the project that are killed or fail, for the tests of the tools."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
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
FIXED = "verl/utils/import_utils.py"
NEW = "verl/utils/spikes.py"
KEYS = "verl/trainer/config/gradloc/actor.yaml"
VENDORED = "verl/_vendored/gradloc"
SOME_FILES = ["verl/__init__.py", "verl/version/version", ACTOR, ALGOS, FIXED, "verl/utils/__init__.py"]
NEW_FILES = {NEW: "# A licence.\nHOOKS = 1\n", KEYS: ""}
PACKAGE = {
    "__init__.py": "x = 1\n",
    "version.py": '__version__ = "1"\nHOOKS = 1\n',
    "deep/page.css": "a {}",
    "py.typed": "",
}


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


def fix(tree: Path) -> None:
    """A change of a file that has a hook, too."""
    actor = tree / ACTOR
    actor.write_text(actor.read_text() + "# last\n")
    (tree / FIXED).write_text("# fixed\n" + (tree / FIXED).read_text())


def add_new(tree: Path) -> None:
    for name, text in NEW_FILES.items():
        write(tree / name, text)


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
    """What a patch has for one target."""

    hooks: bytes
    fixes: bytes


def diff(repo: Path, old: str, new: str) -> bytes:
    return (git(repo, "diff", "--full-index", "--no-renames", "--no-color", old, new) + "\n").encode()


def small_patch(scratch: Path, version: str = "0.7.0") -> Patch:
    copy_base(scratch)
    if version != "0.7.0":
        make_next_release(scratch, version)
    commits = [commit_all(scratch)]
    for step in (hook, fix):
        step(scratch)
        commits.append(commit_all(scratch))
    return Patch(*(diff(scratch, *pair) for pair in itertools.pairwise(commits)))


class Fails:
    """An audit hook that fails at the number-th step that changes something on the disk; with `on`, ever after, too."""

    STEPS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "open")

    def __init__(self, number: int, kill: bool, on: bool = False) -> None:
        self.left, self.kill, self.on = number, kill, on

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self.STEPS or event == "open" and not arguments[2] & os.O_CREAT:
            return
        self.left -= 1
        if self.left == 0 or self.on and self.left < 0:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")


class Project:
    """A copy of the project's tools with a target of its own, 0.7.0, new files and a package."""

    def __init__(self, place: Path, patch: Patch | None, commit: str = "0" * 40):
        self.place = place
        self.hooks, self.fixes = self.parts("0.7.0")
        for folder, files in (("patches/files", NEW_FILES), ("gradloc", {**PACKAGE, "README.md": "Not packaged."})):
            for name, text in files.items():
                write(place / folder / name, text)
        for name in ("apply_patch.py", "make_patch.sh"):
            shutil.copy(ROOT / name, place / name)
        shutil.copytree(ROOT / "tools", place / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        if patch is not None:
            self.write(patch)
        self.pin(commit)

    def parts(self, version: str) -> list[Path]:
        patches = self.place / "patches"
        return [patches / version / "hooks.patch", patches / version / "fixes.patch"]

    def write(self, patch: Patch, version: str = "0.7.0") -> None:
        for part, data in zip(self.parts(version), (patch.hooks, patch.fixes), strict=True):
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
        """Without the project that the tests run in; pip has nothing to do, unless --installing says that it has."""
        environment = {"PYTHONPATH": ""} | environment
        return run(sys.executable, self.place / "apply_patch.py", *self.options(arguments), **environment)

    def options(self, arguments: tuple[str | Path, ...]) -> list[str]:
        leaves = {"--vendor", "--reverse", "--installing", "--no-install"}.isdisjoint(arguments)
        return [str(word) for word in arguments if word != "--installing"] + ["--no-install"] * leaves

    def said(self, *arguments: str | Path, code: int = 0, **environment: str) -> str:
        """What a run that ends with this code prints."""
        done = self.apply(*arguments, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def apply_with(self, fault: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs apply_patch after executing some code that makes it fail."""
        code = f"import os, signal, sys; import apply_patch\n{fault}\nsys.exit(apply_patch.main())"
        return run(sys.executable, "-B", "-c", code, *self.options(arguments), cwd=self.place, PYTHONPATH="")

    def forked(self, *arguments: str | Path, fails: Fails | None = None) -> tuple[int, int]:
        """Runs it in a fork, which is fast: its exit code, or minus a signal; and whether the fault came."""
        spec = importlib.util.spec_from_file_location("apply_patch", self.place / "apply_patch.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        if not (child := os.fork()):
            code = 99
            try:
                sys.stdout = sys.stderr = open(os.devnull, "w")
                sys.modules["apply_patch"] = module
                spec.loader.exec_module(module)
                if fails:
                    sys.addaudithook(fails)
                code = module.main(self.options(arguments))
            finally:
                os._exit(100 + code if fails and fails.left <= 0 else code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code % 100 if code >= 0 else code, code < 0 or code >= 100

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
            content = path.read_bytes() if path.is_file() else b""
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
