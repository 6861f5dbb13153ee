"""examples/slurm.sh, with stand-ins for srun, scontrol, hostname and Ray, and for training where it would start."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from notation import cases

import trees

pytestmark = pytest.mark.slow

SCRIPT = trees.ROOT / "examples/slurm.sh"
NODES = ["n1", "n2", "n3"]
ADDRESS = "10.0.0.7:6379"

# Notes the node and the command, and runs the command here: once for each node where no node is named.
SRUN = """#!/bin/bash
nodes=$NODES
while [[ $1 == --* ]]; do
    [[ $1 != --nodelist=* ]] || nodes=${1#*=}
    shift
done
for node in $nodes; do echo "srun $node ${RAY_ADDRESS-none} $*" >>"$STATE/notes"; done
echo "auth $RAY_AUTH_MODE ${RAY_AUTH_TOKEN-none}" >>"$STATE/notes"
if [[ $nodes != "$NODES" ]]; then NODE=$nodes exec "$@"; fi
worst=0
for node in $nodes; do
    code=0
    NODE=$node "$@" || code=$?
    ((code <= worst)) || worst=$code
done
exit "$worst"
"""
HOSTNAME = """#!/bin/bash
[[ $1 == --ip-address ]] && echo "${ADDRESSES-fe80::1 127.0.1.1 10.0.0.7}" || echo "$NODE"
"""
# `ray start` joins unless this node is to be lost, and runs until SIGTERM. One that is to fail does so when those
# before it have joined.
RAY = """#!/bin/bash
echo "ray $NODE $*" >>"$STATE/notes"
[[ $1 == start ]] || exit 0
if [[ " $FAILING " == *" $NODE "* ]]; then
    for node in ${NODES%%$NODE*}; do until [[ -e $STATE/joined/$node ]]; do sleep 0.1; done; done
    exit 3
fi
trap 'echo "ended $NODE" >>"$STATE/notes"; kill $!; exit 143' TERM
[[ " $LOST " == *" $NODE "* ]] || touch "$STATE/joined/$NODE"
sleep 1800 &
wait
"""
# The clock of those who wait stands still until all nodes that will join have been seen.
RAY_MODULE = """import os, pathlib, time
joined = pathlib.Path(os.environ["STATE"], "joined")
will_join = len(os.environ["NODES"].split()) - len(os.environ["LOST"].split())
started = False
seen = 0
time.monotonic = lambda: 0.0 if seen < will_join else 1e9
def is_initialized():
    return started
def init(address, **_):
    global started
    if not (joined / "n1").exists():
        raise ConnectionError
    started = True
def nodes():
    global seen
    alive = [{"Alive": True} for _ in joined.iterdir()]
    seen = len(alive)
    return alive + [{"Alive": False}]
"""
TRAINING = """trap 'echo "ended training" >>"$STATE/notes"; kill $!; exit 143' TERM
echo "training $NODE $RAY_ADDRESS $NNODES $GPUS_PER_NODE $*" >>"$STATE/notes"
[[ ${LONG-} ]] || exit 7
sleep 1800 &
wait
"""
# Exit code 10 means that the verl is patched, and finds the package.
CHECK = """import os, sys
print("said about", os.environ["NODE"])
sys.exit(0 if os.environ["NODE"] in os.environ["UNPATCHED"].split() else 10)
"""


class Cluster:
    """A stand-in for Slurm's job, and a project that takes notes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        programs = {"srun": SRUN, "hostname": HOSTNAME, "ray": RAY, "scontrol": "#!/bin/bash\nprintf '%s\\n' $NODES\n"}
        for name, text in programs.items():
            self.write(f"bin/{name}", text, 0o755)
        self.write("modules/ray.py", RAY_MODULE)
        self.write("project/run_experiment.sh", TRAINING)
        self.write("project/apply_patch.py", CHECK)
        self.write("project/examples/wait_for_ray.py", (trees.ROOT / "examples/wait_for_ray.py").read_text())
        (place / "joined").mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY", "NNODES"))},
            "PATH": f"{place}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{place}/modules:{os.environ.get('PYTHONPATH', '')}",
            "PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(place / "project"),
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_GPUS_PER_NODE": "h100:4",
            "SLURM_CPUS_PER_TASK": "16",
            "NODES": " ".join(NODES),
            "STATE": str(place),
            "RAY_ADDRESS": "of the shell that called sbatch",
            **dict.fromkeys(("FAILING", "LOST", "UNPATCHED"), ""),
        }

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        trees.write(self.place / name, text, mode)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        # As slurmd does: a copy of the script, from elsewhere.
        script = shutil.copy(SCRIPT, self.place / "slurm_script")
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(["bash", script, *arguments], env=self.environment | environment, text=True, **pipes)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """The exit code and what was said."""
        job = self.start(*arguments, **environment)
        out, err = job.communicate()
        return job.returncode, out + err

    def notes(self, start: str) -> list[str]:
        file = self.place / "notes"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{start} ") for line in lines if line.startswith(f"{start} ")]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_training_starts_when_all_nodes_have_joined(cluster: Cluster) -> None:
    """And a Ray on the same machine that somebody else has started goes on."""
    other_ray = subprocess.Popen([cluster.place / "bin/ray", "start"], env=cluster.environment | {"NODE": "other"})
    while not (cluster.place / "joined/other").exists():
        time.sleep(0.05)
    (cluster.place / "joined/other").unlink()
    code, said = cluster.run("MODEL_PATH=/m m", "data.x=[1,2]")
    goes_on = other_ray.poll() is None
    other_ray.terminate()
    other_ray.wait()
    assert code == 7 and goes_on, said  # training's own
    options = "start --block --num-gpus=4 --num-cpus=16"
    assert sorted(cluster.notes("ray")[1:]) == [
        f"n1 {options} --head --node-ip-address=10.0.0.7 --port=6379",
        f"n2 {options} --address={ADDRESS}",
        f"n3 {options} --address={ADDRESS}",
    ]
    assert cluster.notes("training") == [f"n1 {ADDRESS} 3 4 --python {sys.executable} MODEL_PATH=/m m data.x=[1,2]"]
    assert {line.split()[1] for line in cluster.notes("srun") if " ray start " in line} == {"none"}
    assert sorted(cluster.notes("ended")) == [*NODES, "other"]


def test_each_job_has_a_token_of_its_own(cluster: Cluster) -> None:
    def auth(**given: str) -> str:
        (cluster.place / "notes").unlink(missing_ok=True)
        cluster.run(FAILING="n1", **given)
        (found,) = set(cluster.notes("auth"))
        return found

    first, second = auth(), auth()
    assert re.fullmatch("token [0-9a-f]{64}", first) and re.fullmatch("token [0-9a-f]{64}", second) and first != second
    assert auth(RAY_AUTH_TOKEN="mine") == "token mine"


def test_what_starts_a_container_comes_before_each_command(cluster: Cluster) -> None:
    cluster.write("project/run_experiment.sh", f'exec bash {trees.ROOT}/run_experiment.sh "$@"\n')
    code, said = cluster.run("--dry-run", CONTAINER="env IN_CONTAINER=1")
    assert code == 0 and "trainer.nnodes=3 " in said and "trainer.n_gpus_per_node=4 " in said, said
    commands = [line.split(maxsplit=2)[2] for line in cluster.notes("srun")]
    assert [command for command in commands if not command.startswith("env IN_CONTAINER=1 ")] == [
        "hostname --ip-address"
    ]


@cases(
    "environment code sentence ended",
    ({"UNPATCHED": "n2"}, 1, "the verl of n2 is not ready: said about n2", []),
    ({"FAILING": "n3"}, 1, "Ray on n3 has ended", ["n1", "n2"]),
    ({"LOST": "n2", "RAY_WAIT": "1"}, 1, f"after 1 s, 2 of 3 nodes have joined {ADDRESS}", NODES),
    ({"SLURM_GPUS_PER_NODE": ""}, 2, "ask for them with --gpus-per-node", []),
    ({"ADDRESSES": "127.0.1.1"}, 2, "n1 has only the addresses '127.0.1.1': set HEAD_ADDRESS", []),
)
def test_a_job_that_cannot_start_ends_without_training(
    cluster: Cluster, environment: dict[str, str], code: int, sentence: str, ended: list[str]
) -> None:
    found, said = cluster.run(**environment)
    assert found == code and sentence in said
    assert sorted(cluster.notes("ended")) == ended and not cluster.notes("training")
    assert code == 1 or not cluster.notes("ray")


def test_a_signal_ends_training_and_ray(cluster: Cluster) -> None:
    job = cluster.start(LONG="1")
    while not cluster.notes("training"):
        assert job.poll() is None
        time.sleep(0.1)
    job.terminate()
    said = "".join(job.communicate())
    assert job.returncode == 143, said
    ended = cluster.notes("ended")
    assert ended[0] == "training" and sorted(ended[1:]) == NODES
