"""The plugin's parts that need no verl: acting after imports, what does not fit, and its wheel."""

import importlib
import logging
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from notation import Caplog, Patch

import trees

sys.path.insert(0, str(trees.ROOT / "plugin"))
from gradloc_verl import status  # noqa: E402
from gradloc_verl.loading import AfterImport  # noqa: E402
from gradloc_verl.status import expect  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(monkeypatch: Patch) -> None:
    for name, value in {"failures": {}, "lost": {}, "installed": True, "left_to_patch": False}.items():
        monkeypatch.setattr(status, name, value)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


def write(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


def test_a_module_is_changed_before_its_importer_takes_names(tmp_path: Path, monkeypatch: Patch) -> None:
    write(tmp_path, late_one="VALUE = 1", late_two="from late_one import VALUE")
    monkeypatch.syspath_prepend(tmp_path)
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


def test_what_does_not_fit_is_named() -> None:
    class Engine:
        def train_batch(self, data: Any, loss_function: Any, more: int = 0) -> None: ...

    assert expect(Engine, "train_batch", "self", "data", "loss_function") is Engine.train_batch
    with pytest.raises(status.Unfit, match="^Engine has no optimizer_step$"):
        expect(Engine, "optimizer_step", "self")
    with pytest.raises(status.Unfit) as caught:
        expect(Engine, "train_batch", "self", "batch")
    assert str(caught.value) == "Engine.train_batch takes (self, data, loss_function, more), not (self, batch, …)"


def test_an_error_is_logged_and_refuses_the_runs_that_need_it(caplog: Caplog) -> None:
    fail = Mock(side_effect=status.Unfit("Engine has no optimizer_step"))
    status.guard("some repair", fail, needed=False)
    status.require()
    assert status.lost == {"some repair": "Engine has no optimizer_step"}
    status.guard("the search", fail)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "it cannot do the search: Engine has no optimizer_step" in caplog.text
    with pytest.raises(
        RuntimeError, match=r"it cannot do the search \(Engine has no optimizer_step\); without GradLoc"
    ):
        status.require()


CONF = trees.ROOT / "plugin/gradloc_verl/conf"
GROUPS = [str(file.relative_to(CONF)) for file in sorted(CONF.glob("*/gradloc_*.yaml"))]


@pytest.mark.parametrize("group", GROUPS)
def test_a_config_group_adds_what_the_patch_adds(group: str) -> None:
    ours = yaml.safe_load((CONF / group).read_text())
    own = Path(group).stem.removeprefix("gradloc_")
    hooks = (trees.ROOT / "patches/0.9.1/hooks.patch").read_text().split("diff --git ")
    (hook,) = [each for each in hooks if each.startswith(f"a/verl/trainer/config/{Path(group).with_stem(own)} ")]
    (keys,) = re.findall(r"^\+  - (.+)$", hook, re.M)
    assert ours.pop("defaults") == [own, keys, "_self_"]
    # No key is written twice: all that is left is which classes have them.
    for section in (ours, *(ours.pop(name) for name in ("layer_clip", "token_clip") if name in ours)):
        assert section.pop("_target_").startswith("gradloc_verl.config.") and not section


def test_the_wheel_has_what_it_needs(tmp_path: Path) -> None:
    import zipfile

    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", tmp_path, trees.ROOT]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("gradloc_verl-*.whl")
    from gradloc.version import __version__

    assert wheel.name.split("-")[1] == __version__
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
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
