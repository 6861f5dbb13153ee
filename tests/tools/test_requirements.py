"""The pinned requirements: that they hold what is asked for, and nothing of the machine that wrote them."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts import launch

from tools import lock

ROOT = Path(__file__).parents[2]
RELEASES = sorted(file.stem.removeprefix("requirements-") for file in ROOT.glob("embedded/requirements-[0-9]*.in"))
# Requirements and their pins.
FILES = [("embedded", release, f"requirements-{release}.in") for release in RELEASES]
FILES += [("tests", release, "requirements.in") for release in RELEASES]
FILES += [("tests", "trackers", "requirements-trackers.in"), ("embedded", "vllm", "requirements-vllm.in")]


def requirements(file: Path) -> list[Requirement]:
    """The requirements of a file and of those that it includes."""
    found = []
    for line in file.read_text().splitlines():
        text = re.split("#| --hash=", line)[0].strip()
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
            assert pins["verl"] == (launch.VLLM_TARGET if release == "vllm" else release) and "torch" in pins
            assert not [name for name in pins if name.startswith(lock.CUDA)]
    # Nothing of the machine that wrote them, and hashes for all but torch.
    others = (lock.HEADER.strip(), f"-r ../embedded/requirements-{release}.txt", f"-r {lock.COMMON.name}", "torch==")
    for line in (*file.read_text().splitlines(), *lock.COMMON.read_text().splitlines()):
        pinned = r"[a-z0-9][a-z0-9_.-]*==[a-z0-9.+]+( ; [^/@]+)?( --hash=sha256:[0-9a-f]{64})+"
        assert line.startswith(others) or re.fullmatch(pinned, line), line


@pytest.mark.parametrize("release", RELEASES)
def test_the_pinned_verl_is_the_one_that_is_patched(release: str) -> None:
    (pin,) = re.findall("^verl==.*", (ROOT / f"embedded/requirements-{release}.txt").read_text(), re.M)
    (sha256,) = re.findall("^WHEEL_SHA256=(.*)", (ROOT / f"patches/{release}/PIN").read_text(), re.M)
    assert pin == f"verl=={release} --hash=sha256:{sha256}"


def test_hashes_are_those_of_the_files_that_fit() -> None:
    """Of the source only where there is no such wheel."""
    files = [
        ("a-1.tar.gz", False),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_28_x86_64.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp39-cp39-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
    ]
    sha256 = {name: f"{number:064}" for number, (name, _) in enumerate(files)}

    def hashes(*names: str) -> list[str]:
        rows = [f'{{ url = "https://h/{name}", hashes = {{ sha256 = "{sha256[name]}" }} }}' for name in names]
        return lock.hashes_in('[[packages]]\nname = "a"\nversion = "1"\n' + "\n".join(rows))["a==1"]

    fitting = [f"--hash=sha256:{sha256[name]}" for name, fits in files if fits]
    assert hashes(*sha256) == fitting
    assert hashes("a-1.tar.gz", "a-1-cp311-cp311-win_amd64.whl") == [f"--hash=sha256:{sha256['a-1.tar.gz']}"]
