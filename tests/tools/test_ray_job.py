"""examples/ray_job.sh with a stand-in for Ray: what it refuses, and what a job gets; and examples/rayjob.yaml."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from notation import cases

import trees

# Runs the job here, as Ray does on the cluster: a shell has the command, Python the modules that the job brings along.
RAY = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
at = sys.argv.index("--runtime-env-json")
brings = json.loads(sys.argv[at + 1])
(verl,) = map(pathlib.Path, brings["py_modules"])
check = [sys.executable, "{trees.ROOT}/apply_patch.py", "--check", verl.parent]
print(*sys.argv[1:at], "check:", subprocess.run(check, stdout=subprocess.DEVNULL).returncode, flush=True)
environment = os.environ | {{"PYTHONPATH": str(verl.parent)}}
command = " ".join(sys.argv[sys.argv.index("--") + 1 :])
sys.exit(subprocess.run(command, shell=True, cwd=brings["working_dir"], env=environment).returncode)
"""
# Prints what the trainer, which needs GPUs, would get, if verl finds GradLoc; and ends with an exit code of its own.
PYTHON = f"""#!/bin/sh
[ "$1" = -m ] || exec {sys.executable} "$@"
{sys.executable} -c 'import json, sys
from verl.utils.spikes import why_off
assert why_off() is None
print(json.dumps(sys.argv[1:]))' "$@"
exit 7
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trees.write(tmp_path / "bin/ray", RAY, 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(trees.BASE_TREE))  # an unpatched verl on this machine
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@cases(
    "arguments python sentence",
    (["OUTPUT_DIR=outputs"], sys.executable, "give OUTPUT_DIR=/..."),
    (["OUTPUT_DIR=/a"], "true", "true has no verl"),
)
def test_refusals(place: Path, arguments: list[str], python: str, sentence: str) -> None:
    done = trees.run("bash", trees.ROOT / "examples/ray_job.sh", *arguments, PYTHON=python)
    assert done.returncode == 2 and sentence in done.stderr
    assert not list(place.glob("tmp.*")), "temporary files are left"


def test_a_job_has_the_patched_verl_and_its_arguments(place: Path) -> None:
    python = trees.write(place / "python", PYTHON, 0o755)
    settings = ["--python", str(python), "NNODES=2", f"OUTPUT_DIR={place}/a run's $HOME", "+x=[1,'2']"]
    before = trees.snapshot(trees.BASE_TREE / "verl/utils")
    done = trees.run("bash", trees.ROOT / "examples/ray_job.sh", "--submission-id", "run-1", "--", *settings)
    assert done.returncode == 7, done.stdout + done.stderr
    assert trees.snapshot(trees.BASE_TREE / "verl/utils") == before
    assert "job submit --submission-id run-1 check: 10" in done.stdout.splitlines()  # which is: patched
    overrides = json.loads(done.stdout.splitlines()[-1])
    assert {f"trainer.default_local_dir={place}/a run's $HOME", "trainer.nnodes=2", "+x=[1,'2']"} <= set(overrides)
    assert not list(place.glob("tmp.*")), "temporary files are left"


def test_the_entrypoint_trains_on_as_many_gpus_as_the_pods_have() -> None:
    """Its entrypoint is given to the real run_experiment.sh."""
    manifest = yaml.safe_load((trees.ROOT / "examples/rayjob.yaml").read_text())
    entrypoint = manifest["spec"]["entrypoint"].replace("/opt/gradloc", str(trees.ROOT))
    command = shlex.split(trees.ran(trees.run("bash", "-c", f"{entrypoint} --dry-run")))
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["rayStartParams"]["num-gpus"]
    assert {f"trainer.nnodes={workers['replicas']}", f"trainer.n_gpus_per_node={gpus}"} <= set(command)
    assert container["resources"]["requests"]["nvidia.com/gpu"] == gpus
