"""The plugin's parts that need no verl: its groups of the configuration, and its wheel."""

import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import trees
from gradloc.version import __version__

CONF = trees.ROOT / "gradloc/plugin/conf"


@pytest.mark.parametrize("group", sorted(CONF.glob("*/gradloc_*.yaml")), ids=lambda file: file.stem)
def test_a_config_group_writes_no_key_of_its_own(group: Path) -> None:
    """They are in the groups that it names: all that is left is which classes have them."""
    ours = yaml.safe_load(group.read_text())
    assert ours.pop("defaults")[0] == group.stem.removeprefix("gradloc_")
    for section in (ours, *(ours.pop(name) for name in ("layer_clip", "token_clip") if name in ours)):
        assert section.pop("_target_").startswith("gradloc.plugin.config.") and not section


def test_the_wheel_has_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", tmp_path, trees.ROOT]
    trees.ran(trees.run(*command))
    (wheel,) = tmp_path.glob("gradloc_verl-*.whl")
    assert wheel.name.split("-")[1] == __version__
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith("entry_points.txt"))
        points = archive.read(info).decode()
    assert "[verl.plugins]\ngradloc = gradloc.plugin" in points
    assert "[console_scripts]\ngradloc = gradloc.__main__:run" in points
    listed = trees.git(trees.ROOT, "ls-files", "gradloc", "hydra_plugins").splitlines()
    keys = {f"gradloc/plugin/conf/gradloc/{name}.yaml" for name in ("actor", "critic")}
    assert {name for name in names if ".dist-info/" not in name} == {*listed, *keys}
