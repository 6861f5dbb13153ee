"""The pinned requirements: that they hold what is asked for, and nothing of the machine that wrote them."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock

ROOT = Path(__file__).parents[2]
RELEASES = sorted(file.stem.removeprefix("requirements-") for file in ROOT.glob("embedded/requirements-*.in"))
# What is asked for, and the pins.
FILES = [("embedded", release, f"requirements-{release}.in") for release in RELEASES]
FILES += [("tests", release, "requirements.in") for release in RELEASES]
FILES.append(("tests", "trackers", "requirements-trackers.in"))


def requirements(file: Path) -> list[Requirement]:
    """The requirements of a file and of those that it includes."""
    found = []
    for line in file.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += requirements(file.parent / text.removeprefix("-r "))
        elif text:
            found.append(Requirement(text))
    return found


@pytest.mark.parametrize(("directory", "release", "asked"), FILES)
def test_each_direct_dependency_is_pinned_once_for_each_python(directory: str, release: str, asked: str) -> None:
    file = ROOT / directory / f"requirements-{release}.txt"
    for version in ("3.10", "3.11", "3.12"):
        environment = {"python_version": version, "python_full_version": f"{version}.9"}
        pins: dict[str, str] = {}
        for pin in requirements(file):
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            if pin.marker is None or pin.marker.evaluate(environment):
                assert canonicalize_name(pin.name) not in pins
                pins[canonicalize_name(pin.name)] = specifier.version
        for direct in requirements(ROOT / directory / asked):
            assert direct.specifier.contains(pins[canonicalize_name(direct.name)], prereleases=True), direct
        # The build of torch is left to pip: PyPI's needs CUDA's packages, which an index of CPU builds does not have.
        if directory == "embedded":
            assert pins["verl"] == release and "torch" in pins
            assert not [name for name in pins if name.startswith(lock.CUDA)]
    # Nothing of the machine that wrote them.
    text = file.read_text()
    included = f"-r ../embedded/requirements-{release}.txt"
    lines = [line for line in text.removeprefix(lock.HEADER).splitlines() if line != included]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9_.-]*==[a-z0-9.+]+( ; [^/@]+)?", line) for line in lines)
