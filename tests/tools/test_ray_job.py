"""examples/ray_job.sh: what it refuses, and that a job of a real Ray has the patched verl; and examples/rayjob.yaml."""

import contextlib
import json
import os
import random
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
import yaml
from notation import cases
from process_ids import processes_naming

import trees

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Stands in for the trainer, which needs GPUs: tells which verl the driver and Ray's workers have.
PROBE = """import json, os, pathlib, subprocess, sys
import ray
from verl.utils import gradloc

@ray.remote
def package():
    from verl.utils import gradloc
    return gradloc.__file__

ray.init(log_to_driver=False)
check = [sys.executable, sys.argv.pop(1), "--check", "--repo", pathlib.Path(gradloc.__file__).parents[3]]
code = subprocess.run(check, stdout=subprocess.DEVNULL).returncode
print("PROBE", json.dumps([sys.argv[1:], code, gradloc.__file__, ray.get(package.remote())]), flush=True)
"""
TRAINER = "-m verl.trainer.main_ppo"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def submit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with an unpatched verl on this machine."""
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(trees.BASE_TREE)}
    return trees.run("bash", ROOT / "examples/ray_job.sh", *arguments, **settings | environment)


@cases(
    "arguments environment code sentence",
    (["OUTPUT_DIR=outputs"], {}, 2, "give OUTPUT_DIR=/..."),
    (["OUTPUT_DIR=/a"], {"PYTHON": "false"}, 2, "false does not run: set PYTHON"),
    (["OUTPUT_DIR=/a"], {"PYTHON": "true"}, 2, "true has no verl"),
    (["--no-such-option", "--", "OUTPUT_DIR=/a"], {}, 5, "job submit --no-such-option --runtime-env-json"),
)
def test_refusals(place: Path, arguments: list[str], environment: dict[str, str], code: int, sentence: str) -> None:
    """The last one is of Ray, here a stand-in: its exit code is the script's."""
    trees.write(place / "ray", '#!/bin/sh\necho "$*" >&2\nexit 5\n', 0o755)
    done = submit(*arguments, PATH=f"{place}:{os.environ['PATH']}", **environment)
    assert done.returncode == code and sentence in done.stderr
    assert not list(place.glob("tmp.*")), "temporary files are left"


def free_ports(count: int) -> list[int]:
    """Free ports that no program is given by chance: all are under 32768, where Linux begins to hand them out."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


@contextlib.contextmanager
def ray_head() -> Iterator[str | None]:
    """Starts Ray and ends it as in slurm.sh. Yields its address for jobs, or None if it has not come up in 300 s."""
    port, dashboard, agent, agent_grpc = free_ports(4)
    place = Path(tempfile.mkdtemp(prefix="job", dir="/tmp"))  # the paths of Ray's sockets must be short
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={place}/ray", "--include-dashboard=true"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--dashboard-agent-grpc-port={agent_grpc}", "--object-store-memory=100000000"]
    ray = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        waiting = [sys.executable, ROOT / "examples/wait_for_ray.py", f"127.0.0.1:{port}", "1"]
        address = None
        with contextlib.suppress(subprocess.SubprocessError):  # it says no, or nothing in time
            subprocess.run(waiting, timeout=300, check=True)
            address = f"http://127.0.0.1:{dashboard}"
        yield address
        ray.send_signal(signal.SIGTERM)
        psutil.wait_procs(processes_naming(str(place)), timeout=60)
    finally:
        for process in processes_naming(str(place)):
            process.kill()
        ray.wait()
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def real_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster of this test's own, which asks for a token. Ray is started again where a port was taken."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for _ in range(3):
        with ray_head() as address:
            if address:
                monkeypatch.setenv("RAY_ADDRESS", address)
                yield
                return
    pytest.fail("Ray did not start")


@pytest.mark.usefixtures("real_ray")
def test_a_job_of_a_real_ray_has_the_patched_verl(place: Path) -> None:
    (place / "probe.py").write_text(PROBE)
    probe = f'{place}/probe.py {ROOT}/apply_patch.py "${{@:3}}"'
    text = f'#!/bin/bash\n[[ "$*" != "{TRAINER} "* ]] || exec {sys.executable} {probe}\nexec {sys.executable} "$@"\n'
    python = trees.write(place / "python", text, 0o755)
    (place / "data.parquet").touch()
    files = [f"TRAIN_FILES={place}/data.parquet", f"VAL_FILES={place}/data.parquet"]
    settings = ["--python", str(python), "NNODES=2", f"OUTPUT_DIR={place}/a run's $HOME", "+x=[1,'2']", *files]
    before = trees.snapshot(trees.BASE_TREE / "verl/utils")
    done = submit("--submission-id", "run-1", "--", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'run-1' succeeded" in done.stdout
    assert trees.snapshot(trees.BASE_TREE / "verl/utils") == before
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    overrides, code, *packages = json.loads(line.removeprefix("PROBE "))
    assert {f"trainer.default_local_dir={place}/a run's $HOME", "trainer.nnodes=2", "+x=[1,'2']"} <= set(overrides)
    assert code == 10, "the job's verl is not patched"
    for package in packages:
        assert "/py_modules_files/" in package  # where Ray unpacks what a job brings along
    assert not list(place.glob("tmp.*")), "temporary files are left"


def test_the_entrypoint_trains_on_as_many_gpus_as_the_pods_have() -> None:
    """Its entrypoint is given to the real run_experiment.sh."""
    manifest = yaml.safe_load((ROOT / "examples/rayjob.yaml").read_text())
    entrypoint = manifest["spec"]["entrypoint"].replace("/opt/gradloc", str(ROOT))
    done = trees.run("bash", "-c", f"{entrypoint} --dry-run")
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["rayStartParams"]["num-gpus"]
    assert {f"trainer.nnodes={workers['replicas']}", f"trainer.n_gpus_per_node={gpus}"} <= set(command)
    assert container["resources"]["requests"]["nvidia.com/gpu"] == gpus
