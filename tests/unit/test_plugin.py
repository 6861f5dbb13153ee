"""The plugin's parts that need no verl: acting after imports, and its wheel."""

import importlib
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import yaml
from notation import Patch

import trees
from gradloc.version import __version__

sys.path.insert(0, str(trees.ROOT / "plugin"))
from gradloc_verl.loading import AfterImport  # noqa: E402


def test_a_module_is_changed_before_its_importer_takes_names(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "late_one.py").write_text("VALUE = 1")
    (tmp_path / "late_two.py").write_text("from late_one import VALUE")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    seen = []

    def act(module: types.ModuleType) -> None:
        seen.append(module.__name__)
        module.VALUE += 1  # type: ignore[attr-defined]

    AfterImport({"late_one": act}).install()
    assert seen == []
    assert importlib.import_module("late_two").VALUE == 2
    assert seen == ["late_one"]
    importlib.import_module("late_one")
    assert seen == ["late_one"]
    AfterImport({"late_one": act}).install()  # which is there already
    assert seen == ["late_one"] * 2


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
    subprocess.run(command, check=True)
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
