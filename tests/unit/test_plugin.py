"""The plugin's parts that need no verl: its groups of the configuration, and its wheel."""

import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import trees
from gradloc.version import __version__

CONF = trees.ROOT / "plugin/gradloc_verl/conf"


@pytest.mark.parametrize("group", sorted(CONF.glob("*/gradloc_*.yaml")), ids=lambda file: file.stem)
def test_a_config_group_writes_no_key_of_its_own(group: Path) -> None:
    """They are in the groups that it names: all that is left is which classes have them."""
    ours = yaml.safe_load(group.read_text())
    assert ours.pop("defaults")[0] == group.stem.removeprefix("gradloc_")
    for section in (ours, *(ours.pop(name) for name in ("layer_clip", "token_clip") if name in ours)):
        assert section.pop("_target_").startswith("gradloc_verl.config.") and not section


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
    assert "[verl.plugins]\ngradloc = gradloc_verl" in points
    assert "[console_scripts]\ngradloc = gradloc_tools.__main__:run" in points
    listed = trees.git(trees.ROOT, "ls-files", "gradloc", "gradloc_tools", "plugin").splitlines()
    assert {name.removeprefix("plugin/") for name in listed} - {"py.typed"} <= names
    assert {"gradloc/py.typed", "gradloc_verl/scorers/ps_grpo.py", "gradloc_tools/report/page.js"} <= names
    assert {f"gradloc_verl/conf/gradloc/{keys}.yaml" for keys in ("actor", "recorded_actor", "critic")} <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "build", "embedded"))]
