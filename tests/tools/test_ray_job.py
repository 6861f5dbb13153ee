"""examples/ray_job.sh: what it gives to `ray job submit`, and that a job of a real Ray has the patched verl."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import trees

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/ray_job.sh"
# Keeps what it is given, because the script removes it.
RAY = """import json, os, pathlib, shutil, sys
place = pathlib.Path(os.environ["KEPT"])
arguments = sys.argv[1:]
given = json.loads(arguments[arguments.index("--runtime-env-json") + 1])
(module,) = given.pop("py_modules")
shutil.copytree(module, place / "modules" / pathlib.Path(module).name)
shutil.copytree(given.pop("working_dir"), place / "work")
(place / "call.json").write_text(json.dumps([arguments, given]))
"""


def submit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with an unpatched verl on this machine."""
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(trees.BASE_TREE)}
    return trees.run("bash", SCRIPT, *arguments, **settings | environment)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "bin/ray").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/ray.py "$@"\n')
    (tmp_path / "bin/ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("KEPT", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.every_target
def test_the_job_carries_the_patched_verl_and_the_launcher(kept: Path) -> None:
    settings = ["OUTPUT_DIR=/shared/a run's $HOME", "NNODES=2", "MODEL_PATH=Qwen/Qwen3-4B", "+x=[1,'2']"]
    done = submit("--no-wait", "--submission-id", "run 1", "--", "--dry-run", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    arguments, other = json.loads((kept / "call.json").read_text())
    assert other == {}
    assert arguments[:5] == ["job", "submit", "--no-wait", "--submission-id", "run 1"]
    assert arguments[5] == "--runtime-env-json" and arguments[7:] == ["--", "bash", "job.sh"]
    assert trees.run(sys.executable, ROOT / "apply_patch.py", "--check", "--repo", kept / "modules").returncode == 10
    assert not list(kept.glob("tmp.*")), "temporary files are left"
    # The job: Ray puts the module on PYTHONPATH.
    job = trees.run("bash", "job.sh", cwd=kept / "work", PYTHONPATH=str(kept / "modules"))
    assert job.returncode == 0, job.stderr
    overrides = shlex.split(job.stdout)
    assert "trainer.nnodes=2" in overrides and "+x=[1,'2']" in overrides
    assert r"trainer.default_local_dir='/shared/a run\'s $HOME'" in overrides


def test_nothing_is_changed_here(kept: Path) -> None:
    before = trees.snapshot(trees.BASE_TREE / "verl/utils")
    assert submit("OUTPUT_DIR=/shared/1").returncode == 0
    assert trees.snapshot(trees.BASE_TREE / "verl/utils") == before


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["OUTPUT_DIR=outputs"], {}, "give OUTPUT_DIR=/..."),
        (["--no-wait", "OUTPUT_DIR=/a", "--"], {}, "give OUTPUT_DIR=/..."),
        (["OUTPUT_DIR=/a"], {"PYTHON": "false"}, "false does not run: set PYTHON"),
        (["OUTPUT_DIR=/a"], {"PYTHON": "true"}, "true has no verl"),
    ],
)
def test_refusals(kept: Path, arguments: list[str], environment: dict[str, str], sentence: str) -> None:
    done = submit(*arguments, **environment)
    assert done.returncode == 2 and sentence in done.stderr and not (kept / "call.json").exists()


def test_a_failed_submission_is_the_exit_code(kept: Path) -> None:
    (kept / "bin/ray").write_text("#!/bin/sh\nexit 5\n")
    assert submit("OUTPUT_DIR=/a").returncode == 5
    assert not list(kept.glob("tmp.*"))
