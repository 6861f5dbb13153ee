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
from .log import say
from .processes import run, step


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits for other runs: two side by side must not set up the same files."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up_venv(venv: Path, root: Path, environment: Mapping[str, str]) -> None:
    """Installs the requirements into `venv` and patches the verl in it."""
    # pip and apply_patch.py must see this environment only.
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    embedded = root / "embedded"
    python = str(venv / "bin/python")
    base = _find_python(embedded / "find_python.sh", environment)
    version = subprocess.run([base, "-VV"], env=environment, stdout=subprocess.PIPE, check=True).stdout
    wanted = _hash(version, *_contents(*sorted(embedded.glob("requirements*.txt"))))
    if not _is(venv / "ready", wanted):
        say("Installing the requirements into .embedded/venv (some minutes, once)")
        shutil.rmtree(venv, ignore_errors=True)
        run([base, "-m", "venv", str(venv)], environment)
        # PyPI's torch may bring CUDA along. PIP_EXTRA_INDEX_URL can name an index with torch's CPU builds instead.
        _pip_install(python, embedded / "requirements.txt", environment)
        no_deps = str(embedded / "requirements-no-deps.txt")
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", no_deps], environment)
        _note(venv / "ready", wanted)
    pin = _pinned_verl(embedded / "requirements.txt")
    patch = root / "patches" / pin.removeprefix("verl==") / "gradloc.patch"
    wanted = _hash(*_contents(patch, venv / "ready"))
    if not _is(venv / "patched", wanted):
        say("Patching verl")
        (venv / "patched").unlink(missing_ok=True)
        _restore_verl(python, pin, environment)
        run([python, str(root / "apply_patch.py"), "--installed"], environment)
        _note(venv / "patched", wanted)


def prepare(directory: Path, tiny: bool, python: str, root: Path, environment: Mapping[str, str]) -> None:
    """Writes model and data into the directory."""
    program = root / "embedded/prepare.py"
    wanted = _hash(*_contents(program, root / "embedded/requirements-no-deps.txt"))
    if not _is(directory / "ready", wanted):
        say("Preparing model and data (about a minute, once)")
        shutil.rmtree(directory, ignore_errors=True)
        run([python, str(program), str(directory), *(["--tiny"] if tiny else [])], environment)
        _note(directory / "ready", wanted)


def _find_python(script: Path, environment: Mapping[str, str]) -> str:
    found = subprocess.run(
        ["bash", "-p", "-c", 'source "$1" && find_python', "bash", str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if found.returncode:
        raise Refused(
            "no Python 3.10, 3.11 or 3.12 with the venv module was found: install one, or name one with --python"
        )
    return found.stdout.rstrip("\n")


def _pip_install(python: str, requirements: Path, environment: Mapping[str, str]) -> None:
    command = [python, "-m", "pip", "install", "--progress-bar", "off", "-r", str(requirements)]
    packages = 0
    with step(command, environment, stdout=subprocess.PIPE) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if line.startswith("Collecting"):
                packages += 1
                if packages % 20 == 0:
                    print(f"  {packages} packages", flush=True)
            elif line.startswith("Installing collected"):
                print("  writing them to disk", flush=True)


def _pinned_verl(requirements: Path) -> str:
    (pin,) = [line for line in requirements.read_text().splitlines() if line.startswith("verl==")]
    return pin


def _restore_verl(python: str, pin: str, environment: Mapping[str, str]) -> None:
    """Installs verl as released: an earlier patch may be in it, and may have left files of its own."""
    code = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    site = subprocess.run([python, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    shutil.rmtree(Path(site.rstrip("\n")) / "verl", ignore_errors=True)
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", pin], environment)


def _contents(*files: Path) -> list[bytes]:
    return [file.read_bytes() for file in files]


def _hash(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _is(note: Path, text: str) -> bool:
    return note.is_file() and note.read_text().strip() == text


def _note(note: Path, text: str) -> None:
    note.write_text(f"{text}\n")
