# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded profile's own virtual environment, model and data.

Each stage leaves a note of what it was made from, and is done again only when that changes.
"""

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import Refused
from .installer import Installer
from .log import say
from .processes import run, step
from .targets import one_of, released, requirements_of, supported


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits for other runs: two side by side must not set up the same files."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_embedded(target: str, root: Path) -> None:
    """Raises Refused if the embedded profile cannot install this verl."""
    if not released(target, root):
        versions = [version for version in supported(root) if released(version, root)]
        raise Refused(
            f"--embedded installs verl {one_of(versions)} only: give one of them with --target, "
            f"or a Python that has verl {target} with --python"
        )


def _requirements(target: str, root: Path) -> Path:
    return root / "embedded" / f"requirements-{requirements_of(target, root)}.txt"


def set_up_venv(venv: Path, target: str, root: Path, environment: Mapping[str, str], *, plugin: bool = False) -> None:
    """Installs the requirements of verl `target` into `venv`, and patches the verl in it or installs the plugin."""
    environment = _for_set_up(environment)
    embedded = root / "embedded"
    python = venv / "bin/python"
    base = _find_python(embedded / "find_python.sh", environment)
    version = subprocess.run([base, "-VV"], env=environment, stdout=subprocess.PIPE, check=True).stdout
    requirements = _requirements(target, root)
    others = [embedded / f"requirements-{name}.txt" for name in ("no-deps", "uv")]
    wanted = _hash(version, *_contents(requirements, *others))
    installer = Installer(python, (embedded / "requirements-uv.txt").read_text().strip(), environment)
    if not _is(venv / "ready", wanted):
        say(f"Installing verl {target} and what it needs into .embedded/{venv.parent.name}/venv (1 to 3 minutes, once)")
        shutil.rmtree(venv, ignore_errors=True)
        run([base, "-m", "venv", str(venv)], environment)
        # PyPI's torch may bring CUDA along. PIP_EXTRA_INDEX_URL can name an index with torch's CPU builds instead.
        installer.install("-r", str(requirements))
        installer.install("--no-deps", "-r", str(embedded / "requirements-no-deps.txt"))
        _note(venv / "ready", wanted)
    if plugin:
        _install_plugin(venv, root, installer)
        return
    parts = [root / "patches" / part for part in ("package.patch", f"{target}/hooks.patch", f"{target}/fixes.patch")]
    wanted = _hash(target.encode(), *_contents(*parts, venv / "ready"))
    if not _is(venv / "patched", wanted):
        say("Patching verl")
        (venv / "patched").unlink(missing_ok=True)
        _restore_verl(python, f"verl=={target}", installer, environment)
        run([str(python), str(root / "apply_patch.py"), "--installed"], environment)
        _note(venv / "patched", wanted)


def _install_plugin(venv: Path, root: Path, installer: Installer) -> None:
    folders = [root / name for name in ("gradloc", "plugin", "rewards", "config")]
    files = [root / "pyproject.toml", *(file for folder in folders for file in sorted(folder.rglob("*.*")))]
    wanted = _hash(*_contents(*(file for file in files if file.is_file() and file.suffix != ".pyc"), venv / "ready"))
    if not _is(venv / "patched", wanted):
        say("Installing GradLoc's plugin")
        (venv / "patched").unlink(missing_ok=True)
        installer.install_again(str(root))
        _note(venv / "patched", wanted)


@contextlib.contextmanager
def compiling(venv: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Compiles, beside the block, what training imports.

    Otherwise all processes of Ray would compile it at once, each for itself.
    """
    patched = (venv / "patched").read_text().strip()
    if _is(venv / "compiled", patched):
        yield
        return
    command = [str(venv / "bin/python"), "-c", "import verl.trainer.main_ppo"]
    try:
        with step(command, _for_set_up(environment), subprocess.DEVNULL, subprocess.DEVNULL):
            yield
    except subprocess.CalledProcessError as error:
        if error.cmd is not command:
            raise
        return  # training will say what is wrong with it
    _note(venv / "compiled", patched)


def prepare(directory: Path, tiny: bool, python: str, root: Path, environment: Mapping[str, str]) -> None:
    """Writes model and data into the directory."""
    program = root / "embedded/prepare.py"
    wanted = _hash(*_contents(program, root / "embedded/requirements-no-deps.txt"))
    if not _is(directory / "ready", wanted):
        say("Preparing model and data (15 to 60 seconds, once)")
        shutil.rmtree(directory, ignore_errors=True)
        run([python, str(program), str(directory), *(["--tiny"] if tiny else [])], environment)
        _note(directory / "ready", wanted)


def _for_set_up(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Python sees no other packages than those installed here, and keeps what it compiles."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}


def _find_python(script: Path, environment: Mapping[str, str]) -> str:
    found = subprocess.run(
        ["bash", "-p", "-c", 'source "$1" && find_python', "bash", str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if found.returncode:
        raise Refused(
            "no Python 3.10, 3.11 or 3.12 with the venv module was found: install one, or give one with --python"
        )
    return found.stdout.rstrip("\n")


def _restore_verl(python: Path, pin: str, installer: Installer, environment: Mapping[str, str]) -> None:
    """Installs verl as released: an earlier patch may be in it, and may have left files of its own."""
    code = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    command = [str(python), "-c", code]
    site = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    shutil.rmtree(Path(site.rstrip("\n")) / "verl", ignore_errors=True)
    installer.install_again(pin)


def _contents(*files: Path) -> list[bytes]:
    return [file.read_bytes() for file in files]


def _hash(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _is(note: Path, text: str) -> bool:
    return note.is_file() and note.read_text().strip() == text


def _note(note: Path, text: str) -> None:
    note.write_text(f"{text}\n")
