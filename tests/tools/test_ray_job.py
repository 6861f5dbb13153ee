"""examples/ray_job.sh: what it gives to `ray job submit`, and that a job of a real Ray has the patched verl."""

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import trees

pytestmark = pytest.mark.slow

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

# Stands in for the trainer, which needs GPUs: tells which verl the driver and Ray's workers have.
PROBE = """import json, sys
import ray
from verl.utils import gradloc

@ray.remote
def package():
    from verl.utils import gradloc
    return gradloc.__file__

ray.init(log_to_driver=False)
print("PROBE", json.dumps([sys.argv[1:], gradloc.__file__, ray.get(package.remote())]), flush=True)
"""
TRAINER = "-m verl.trainer.main_ppo"


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


def test_the_job_carries_the_patched_verl_and_the_script(kept: Path) -> None:
    settings = ["OUTPUT_DIR=/shared/a run's $HOME", "NNODES=2", "MODEL_PATH=Qwen/Qwen3-4B", "+x=[1,'2']"]
    before = trees.snapshot(trees.BASE_TREE / "verl/utils")
    done = submit("--no-wait", "--submission-id", "run 1", "--", "--dry-run", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trees.snapshot(trees.BASE_TREE / "verl/utils") == before
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
    assert "trainer.default_local_dir=/shared/a run's $HOME" in overrides


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["OUTPUT_DIR=outputs"], {}, "give OUTPUT_DIR=/..."),
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


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def processes_of(place: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if str(place) in " ".join(each.info["cmdline"] or [])]


@pytest.fixture
def real_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster of this test's own, which asks for a token; started and ended as in slurm.sh."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    port, dashboard, agent, agent_grpc = free_ports(4)
    bin_directory = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_directory}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    place = Path(tempfile.mkdtemp(prefix="job", dir="/tmp"))  # the paths of Ray's sockets must be short
    command = [bin_directory / "ray", "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={place}/ray", "--include-dashboard=true"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--dashboard-agent-grpc-port={agent_grpc}", "--object-store-memory=100000000"]
    with (place / "log").open("wb") as log:
        ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        waited = trees.run(
            sys.executable, ROOT / "examples/wait_for_ray.py", f"127.0.0.1:{port}", "1", "--seconds=1500"
        )
        assert waited.returncode == 0, waited.stderr + (place / "log").read_text()
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{dashboard}")
        yield
        ray.send_signal(signal.SIGTERM)
        ray.wait()
        psutil.wait_procs(processes_of(place))
    finally:
        for process in processes_of(place):
            process.kill()
        ray.wait()
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.usefixtures("real_ray")
def test_a_job_of_a_real_ray_has_the_patched_verl(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ "$*" != "{TRAINER} "* ]] || exec {sys.executable} {tmp_path}/probe.py "${{@:3}}"\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "data.parquet").touch()
    files = [f"TRAIN_FILES={tmp_path}/data.parquet", f"VAL_FILES={tmp_path}/data.parquet"]
    done = submit("--python", str(python), "NNODES=1", f"OUTPUT_DIR={tmp_path}/run 1", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    overrides, *packages = json.loads(line.removeprefix("PROBE "))
    assert f"trainer.default_local_dir={tmp_path}/run 1" in overrides
    for package in packages:
        assert "/py_modules_files/" in package  # where Ray unpacks what a job brings along
    assert not list(tmp_path.glob("tmp.*"))
