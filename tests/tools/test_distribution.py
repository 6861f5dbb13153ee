"""What is published: the source distribution, the wheel that is built from it, and the command that patches verl."""

import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import trees
from gradloc.version import __version__


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that are published, by their ending."""
    place = tmp_path_factory.mktemp("dist")
    trees.ran(trees.run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, trees.ROOT))
    trees.ran(trees.run(sys.executable, "-m", "twine", "check", "--strict", *place.iterdir()))
    assert {file.name.split("-")[:2] == ["gradloc_verl", __version__] for file in place.glob("*.whl")} == {True}
    return {file.suffix: file for file in place.iterdir()}


def listed(*paths: str) -> list[str]:
    return trees.git(trees.ROOT, "ls-files", *paths).splitlines()


def test_the_wheel_has_the_package_the_keys_and_the_patches(made: dict[str, Path]) -> None:
    with zipfile.ZipFile(made[".whl"]) as archive:
        names = set(archive.namelist())
        points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        command = archive.read("gradloc/patch/command.py")
    assert "[verl.plugins]\ngradloc = gradloc.plugin" in points
    assert "[console_scripts]\ngradloc = gradloc.__main__:run" in points
    keys = {f"gradloc/plugin/conf/gradloc/{name}.yaml" for name in ("actor", "critic")}
    patches = {f"gradloc/patch/{name}" for name in ["command.py", *listed("patches")]}
    files = {name for name in names if ".dist-info/" not in name}
    assert files == {*listed("gradloc", "hydra_plugins"), *keys, *patches}
    assert command == (trees.ROOT / "apply_patch.py").read_bytes()


def test_the_source_has_what_the_wheel_is_made_of_and_nothing_else(made: dict[str, Path]) -> None:
    with tarfile.open(made[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = ("apply_patch.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore")
    assert names == {"PKG-INFO", *listed("gradloc", "hydra_plugins", "patches", *files)}


def test_gradloc_patch_does_what_apply_patch_does(made: dict[str, Path], tmp_path: Path) -> None:
    """With the wheel alone, in a Python that has nothing else."""
    trees.ran(trees.run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    with zipfile.ZipFile(made[".whl"]) as archive:
        archive.extractall(site)
    trees.copy_base(site, files=None)
    expected = trees.copy_base(tmp_path / "expected", files=None)
    before = trees.snapshot(expected / "verl")
    trees.ran(trees.run(sys.executable, trees.ROOT / "apply_patch.py", "--no-install", expected))
    bare = {"cwd": tmp_path, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [tmp_path / "venv/bin/python", "-m", "gradloc", "patch", "--installed"]
    said = trees.ran(trees.run(*command, **bare))
    assert said.startswith(f"gradloc patch: applied to {site}") and f"already in {site}/gradloc" in said
    assert trees.snapshot(site / "verl") == trees.snapshot(expected / "verl")
    assert trees.run(*command, "--check", **bare).returncode == 10
    trees.ran(trees.run(*command, "--vendor", **bare))
    trees.ran(trees.run(sys.executable, trees.ROOT / "apply_patch.py", "--vendor", expected))
    assert trees.snapshot(site / "verl") == trees.snapshot(expected / "verl")
    trees.ran(trees.run(*command, "--reverse", **bare))
    assert trees.snapshot(site / "verl") == before
