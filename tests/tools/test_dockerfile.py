"""examples/Dockerfile: its RUN lines in a virtual environment, with what it copies and without a network."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import trees

pytestmark = pytest.mark.slow

DOCKERFILE = (trees.ROOT / "examples/Dockerfile").read_text()
INSTRUCTIONS = [
    line.split(maxsplit=1) for line in DOCKERFILE.replace("\\\n", " ").splitlines() if line and line[0] != "#"
]


def arguments_of(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


class Image:
    """A virtual environment and a directory in the place of the image's /opt."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for sources in arguments_of("COPY"):
            *files, target = sources.split()
            assert target.startswith("/opt/gradloc/")
            for source in (trees.ROOT / file for file in files):
                if source.is_dir():
                    shutil.copytree(source, self.inside(target), ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    assert target.endswith("/")
                    trees.write(self.inside(target) / source.relative_to(trees.ROOT), source.read_text())
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
        # verl's image has pip and all that verl needs, and no verl.
        packages = sysconfig.get_path("purelib", vars={"base": str(place / "venv")})
        Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def inside(self, path: str) -> Path:
        return self.place / path.lstrip("/")

    def run(self, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # pip must not take the verl that the tests run with for installed; "0" here: what builds the package is there.
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"}
        settings |= {"PIP_FIND_LINKS": str(self.place), "PIP_NO_BUILD_ISOLATION": "0"}
        settings["PATH"] = f"{self.place}/venv/bin:{os.environ['PATH']}"
        command = line.replace("/opt/gradloc", str(self.inside("/opt/gradloc")))
        env = {"HOME": str(self.place)} | settings | environment
        return subprocess.run(["/bin/sh", "-c", command], cwd=self.place, env=env, capture_output=True, text=True)


def make_wheel(place: Path) -> str:
    """The wheel that the tree was unpacked from; returns its SHA-256."""
    made = place / f"verl-{trees.TARGET}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        for top in ("verl", f"verl-{trees.TARGET}.dist-info"):
            for file in sorted((trees.BASE_TREE / top).rglob("*")):
                if file.is_file() and file.suffix != ".pyc":
                    wheel.write(file, file.relative_to(trees.BASE_TREE))
    return hashlib.sha256(made.read_bytes()).hexdigest()


def test_its_lines_make_a_verl_that_run_experiment_takes(tmp_path: Path) -> None:
    sha256 = make_wheel(tmp_path)
    image = Image(tmp_path)
    install, patch, check, load = arguments_of("RUN")
    refused = image.run(install)
    assert refused.returncode != 0 and "give --build-arg TARGET=VERSION" in refused.stderr
    other = image.run(install, TARGET=trees.TARGET)
    assert other.returncode != 0 and "DO NOT MATCH THE HASHES" in other.stderr
    pin = image.inside(f"/opt/gradloc/patches/{trees.TARGET}/PIN")
    pin.write_text(re.sub("(?<=WHEEL_SHA256=).*", sha256, pin.read_text()))
    trees.ran(image.run(install, TARGET=trees.TARGET))
    early = image.run(check, TARGET=trees.TARGET)
    assert early.returncode != 0, "an unpatched verl passes the check"
    for line in (patch, check, load):
        printed = trees.ran(image.run(line, TARGET=trees.TARGET))
    assert re.search(r"^GradLoc \d", printed, re.M)
    command = "bash /opt/gradloc/run_experiment.sh --dry-run"
    assert "verl.trainer.main_ppo" in trees.ran(image.run(command))


def test_its_table_has_each_target() -> None:
    rows = dict(re.findall(r"^# (\d+\.\d+\.\d+) +(verlai/verl:\S+) ", DOCKERFILE, re.M))
    assert rows.keys() == {pin.parent.name for pin in trees.ROOT.glob("patches/*/PIN")}
    target, image = re.findall(r"--build-arg TARGET=(\S+) --build-arg BASE_IMAGE=(\S+)", DOCKERFILE)[0]
    assert rows[target] == image
