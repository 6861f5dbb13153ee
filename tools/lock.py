# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Pins all requirements: writes requirements-VERSION.txt in embedded/ and in tests/, for each verl in embedded/,
embedded/requirements-vllm.txt, embedded/requirements-common.txt, which has what these of embedded/ pin alike, and
tests/requirements-trackers.txt; and gives the versions in embedded/requirements-no-deps.txt, -no-deps-vllm.txt and
-uv.txt their hashes.

pip install uv
python tools/lock.py              # keeps the pinned versions wherever they fit
python tools/lock.py --upgrade    # takes the newest versions that fit
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED, TESTS = ROOT / "embedded", ROOT / "tests"
COMMON = EMBEDDED / "requirements-common.txt"
HEADER = "# Written by `python tools/lock.py`.\n"
# The tested environment. Each line's marker would repeat it, so it is left out there.
ENVIRONMENT = (
    "sys_platform == 'linux'",
    "platform_machine == 'x86_64'",
    "platform_python_implementation == 'CPython'",
    "implementation_name == 'cpython'",
    "python_full_version >= '3.10'",
    "python_full_version < '3.13'",
)
# Only torch's CUDA build needs these. Without pins for them pip can install any build of torch.
CUDA = ("cuda-", "nvidia-", "triton")
# The wheels that ENVIRONMENT can take.
WHEEL = re.compile(
    r"-(?:py2\.)?(?:py3|py31[012]|cp3\d|cp31[012])-(?:none|abi3|cp31[012])-(?:any|[\w.]*manylinux\w*_x86_64[\w.]*)\.whl$"
)
COMPILE = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.10", "--no-python-downloads"]


def simplified(line: str) -> str:
    """A pinned requirement, without the parts of its marker that hold everywhere."""
    requirement, _, marker = (part.strip() for part in line.partition(";"))
    parts = [part for part in marker.split(" and ") if part and part not in ENVIRONMENT]
    return f"{requirement} ; {' and '.join(parts)}" if parts else requirement


def resolve(inputs: list[Path], present: list[Path], *options: str) -> list[str]:
    """The requirements of the inputs and of all their dependencies, pinned; the versions in `present` are kept.

    Each has a hash for each file that ENVIRONMENT can take. Only torch has none: any build of it will do.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = " and ".join(ENVIRONMENT)
        Path(directory, "pyproject.toml").write_text(f'[tool.uv]\nenvironments = ["{environment}"]\n')
        output = Path(directory, "requirements.txt")
        there = [line for file in present if file.exists() for line in file.open() if not line.startswith("-r")]
        output.write_text("".join(there))

        def compile_into(name: str, *arguments: str) -> None:
            command = [*COMPILE, "--no-annotate", "--no-header", "--output-file", name, *arguments]
            subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True)

        compile_into(output.name, *options, *map(str, inputs))
        pins = [simplified(line) for line in output.read_text().splitlines() if not line.startswith(CUDA)]
        # Only a lock tells which file a hash is of.
        output.write_text("\n".join(pins))
        compile_into("pylock.toml", "--format", "pylock.toml", "--no-deps", output.name)
        hashes = hashes_in(Path(directory, "pylock.toml").read_text())
    return [" ".join([pin, *hashes[pin.partition(" ")[0]]]) for pin in pins]


def hashes_in(lock: str) -> dict[str, list[str]]:
    """The options --hash of each NAME==VERSION in a lock: of the wheels that fit, or of the source where none does."""
    found = {}
    for package in lock.split("[[packages]]")[1:]:
        name, version = re.findall(r'^(?:name|version) = "(.*)"$', package, re.M)
        files = re.findall(r'url = "[^"]*/([^/"]+)".*?sha256 = "([0-9a-f]{64})"', package)
        wheels = [sha256 for file, sha256 in files if WHEEL.search(file)]
        fitting = wheels or [sha256 for file, sha256 in files if not file.endswith(".whl")]
        found[f"{name}=={version}"] = [f"--hash=sha256:{sha256}" for sha256 in fitting if name != "torch"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    options = ["--upgrade"] if parser.parse_args().upgrade else []
    if shutil.which("uv") is None:
        sys.exit("lock.py: this needs uv: pip install uv")
    pinned = {}
    for direct in sorted(EMBEDDED.glob("requirements-*.in")):
        pins = direct.with_suffix(".txt")
        pinned[pins] = resolve([direct], [COMMON, pins], *options)
    common = [line for line in next(iter(pinned.values())) if all(line in lines for lines in pinned.values())]
    write(COMMON, common)
    for pins, lines in pinned.items():
        write(pins, lines, without=common, below=COMMON.name)
    for pins in EMBEDDED.glob("requirements-[0-9]*.txt"):
        tests, both = TESTS / pins.name, [pins.with_suffix(".in"), TESTS / "requirements.in"]
        needed = resolve(both, [tests], *options, "--constraint", str(pins))
        write(tests, needed, without=pinned[pins], below=f"../embedded/{pins.name}")
    trackers = TESTS / "requirements-trackers.txt"
    write(trackers, resolve([trackers.with_suffix(".in")], [trackers], *options))
    for name in ("no-deps", "no-deps-vllm", "uv"):
        file = EMBEDDED / f"requirements-{name}.txt"
        file.write_text("\n".join(resolve([file], [file], "--no-deps")) + "\n")


def write(file: Path, pins: list[str], without: Sequence[str] = (), below: str | None = None) -> None:
    """Writes pins, but for those of a file that it includes."""
    included = [] if below is None else [f"-r {below}"]
    file.write_text(HEADER + "\n".join([*included, *(line for line in pins if line not in without)]) + "\n")


if __name__ == "__main__":
    main()
