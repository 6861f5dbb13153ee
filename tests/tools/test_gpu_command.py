"""`tests/run.sh --gpu`: nothing runs without a GPU, every part runs on a CPU. tools/wheels.py: what it asks for."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trees
from tools import wheels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PARTS = ["search", "precision", "layer_clip", "replay", "costs", "ranks"]


def gpu(*options: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return trees.run("bash", ROOT / "tests/run.sh", "--gpu", *options, **environment)


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    done = gpu("--python", sys.executable, "--build", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpu: no Python with a torch that sees a GPU was found: nothing was run")
    assert list(tmp_path.iterdir()) == []


def test_without_wheels_it_names_the_command(tmp_path: Path) -> None:
    done = gpu("--python", sys.executable, "--device", "cpu", "--build", tmp_path, "--wheels", tmp_path)
    assert done.returncode == 2
    assert f"python tools/wheels.py {tmp_path} --target 0.9.1" in done.stdout


def test_a_wrong_option(tmp_path: Path) -> None:
    done = gpu("--part", "everything")
    assert done.returncode == 2 and "invalid choice: 'everything'" in done.stderr


def load_run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests/gpu/run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


JUNIT = """<testsuites><testsuite name="pytest">
<testcase name="one"/>
<testcase name="two"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
<testcase name="three"><skipped message="not here"/></testcase>
</testsuite></testsuites>"""


def test_a_failed_part_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run()
    (tmp_path / "report.xml").write_text(JUNIT)
    tests = run.read_tests(tmp_path / "report.xml")
    assert tests == {"passed": 1, "failed": {"two": "assert 1 == 2"}, "skipped": {"three": "not here"}}

    def part(name: str, *_: Any) -> dict[str, Any]:
        passed = name != "replay"
        return {"passed": passed, "exit": int(not passed), "seconds": 1.0, "tests": tests}

    monkeypatch.setattr(run, "find_python", lambda *_: (sys.executable, {"gpu": "a GPU"}))
    monkeypatch.setattr(run, "install", lambda *_: None)
    monkeypatch.setattr(run, "environment", lambda *_: {})
    monkeypatch.setattr(run, "run_part", part)
    monkeypatch.setattr(sys, "argv", ["run.py", "--build", str(tmp_path)])
    assert run.main() == 1
    printed = capsys.readouterr().out
    assert "| replay | FAILED | 1.0 | 1 passed, 1 failed, 1 skipped |" in printed and "| costs | passed |" in printed
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["replay"]["exit"] == 1


@pytest.mark.target(version="0.9.1")
@pytest.mark.skipif(trees.TARGET != "0.9.1", reason="one release is enough, and its requirements are those of this one")
@pytest.mark.timeout(7200)  # it ran into 1800 seconds at a load of 30 on 4 cores
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """With the wheel of verl alone, since everything else is in the environment, and without Ray, which is hidden."""
    place = tmp_path / "wheels"
    place.mkdir()
    shutil.copy(ROOT / "build/wheel/verl-0.9.1-py3-none-any.whl", place)
    options = ["--python", sys.executable, "--device", "cpu", "--quick", "--wheels", place, "--build", tmp_path]
    done = gpu(*options, PYTHONPATH=str(ROOT / "tests/gpu/stand_ins"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["parts"]) == PARTS and all(part["passed"] for part in results["parts"].values())
    for name in PARTS[:-2]:
        assert results["parts"][name]["tests"]["passed"] > 0 and not results["parts"][name]["tests"]["failed"]
    record, other = results["parts"]["costs"]["records"]
    assert (record["wrap"], other["wrap"]) == ("fsdp2", "fsdp1")
    assert set(record["seconds"]) == {"unpatched", "off", "GradLoc", "LayerClip", "TokenClip", "all"}
    assert all(search["found"] and search["passes"] > 0 for search in record["search"]["searches"])
    assert "| tiny, fsdp2 | GradLoc |" in done.stdout
    (record,) = results["parts"]["ranks"]["records"]
    assert record["search"]["found"] and record["drill"]["found"] and record["offloaded"]["found"]
    tree = tmp_path / "0.9.1"
    assert (tree / "site/verl/utils/gradloc").is_dir() and not (tree / "base/verl/utils/gradloc").exists()


@pytest.mark.parametrize("target", ["0.7.0", "0.9.1"])
def test_the_wheels_are_the_pinned_ones(target: str) -> None:
    found = dict(line.split("==") for line in wheels.wanted(target, "3.12"))
    assert found["verl"] == target and found["tensordict"].startswith("0.10.")
    assert found["transformers"].startswith("5." if target == "0.9.1" else "4.")
    assert not {"torch", "ray", "numpy"} & set(found)


@pytest.mark.parametrize(
    ("marker", "python", "expected"),
    [
        ("python_full_version < '3.11'", "3.10", True),
        ("python_full_version < '3.11'", "3.12", False),
        ("python_full_version >= '3.11'", "3.11", True),
        ("python_full_version == '3.11.*'", "3.12", False),
        ("python_full_version >= '3.11' and python_full_version < '3.12'", "3.11", True),
    ],
)
def test_markers(marker: str, python: str, expected: bool) -> None:
    assert wheels.holds(marker, python) is expected


def test_an_unknown_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        wheels.holds("sys_platform == 'darwin'", "3.12")
