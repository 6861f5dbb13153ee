# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Downloads what `bash tests/run.sh --gpu` needs on a machine without a network, as wheels.

python tools/wheels.py build/wheels                      # verl 0.9.1, for Python 3.12 on Linux (x86-64)
python tools/wheels.py build/wheels --also einops==0.8.1 # and what else that machine lacks

The names are in tests/gpu/wheels.in, their versions in tests/requirements-VERSION.txt. torch and Ray are not among
them.
Exit code: 0, or pip's.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# glibc 2.28, and each older one that packages are built for: pip takes no range.
PLATFORMS = [
    "any",
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]
WITHOUT_A_WHEEL = {"antlr4-python3-runtime"}


def pins(file: Path, python: str) -> dict[str, str]:
    """The versions that a file of pins and those that it includes have for a Python."""
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(file.parent / line.removeprefix("-r "), python)
        elif match := re.fullmatch(r"([\w.-]+)==(\S+)(?: ; (.*))?", line):
            name, version, marker = match.groups()
            if marker is None or holds(marker, python):
                found[name] = version
    return found


def holds(marker: str, python: str) -> bool:
    """Whether a marker holds for a Python: comparisons of `python_full_version` that are joined by `and`."""
    own = version_of(python)
    for part in marker.split(" and "):
        match = re.fullmatch(r"python_full_version (<|>=|==) '([\d.]+?)(\.\*)?'", part)
        if match is None:
            raise ValueError(f"this marker cannot be read: {marker}")
        operator, other = match[1], version_of(match[2])
        if not {"<": own < other, ">=": own >= other, "==": own == other}[operator]:
            return False
    return True


def version_of(text: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in text.split(".")[:2])


def wanted(target: str, python: str) -> list[str]:
    """The pinned requirements of tests/gpu/ with one verl."""
    found = pins(ROOT / f"tests/requirements-{target}.txt", python) | {"verl": target}
    lines = (line.partition("#")[0].strip() for line in (ROOT / "tests/gpu/wheels.in").read_text().splitlines())
    return [f"{name}=={found[name]}" for name in lines if name in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the wheels go")
    targets = sorted(file.stem.removeprefix("requirements-") for file in ROOT.glob("embedded/requirements-*.in"))
    parser.add_argument("--target", choices=targets, default="0.9.1", help="the verl (default: 0.9.1)")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="that machine's Python (default: 3.12)")
    parser.add_argument("--also", action="append", default=[], metavar="NAME==VERSION", help="may be repeated")
    options = parser.parse_args()
    requirements = [*wanted(options.target, options.python), *options.also]
    built = [line for line in requirements if line.partition("==")[0] in WITHOUT_A_WHEEL]
    pip = [sys.executable, "-m", "pip"]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    machine = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", options.python, *platforms]
    place = ["--quiet", "--no-deps"]
    download = [*pip, "download", *place, *machine, "--dest", str(options.folder)]
    commands = [[*download, *(line for line in requirements if line not in built)]]
    commands += [[*pip, "wheel", *place, "--wheel-dir", str(options.folder), line] for line in built]
    for command in commands:
        if code := subprocess.run(command).returncode:
            return code
    files = sorted(options.folder.glob("*.whl"))
    print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB, in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
