"""examples/rayjob.yaml: its entrypoint, given to the real run_experiment.sh."""

import shlex
from pathlib import Path

import yaml

import trees

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples/rayjob.yaml").read_text())


def test_the_entrypoint_trains_on_as_many_gpus_as_the_pods_have() -> None:
    entrypoint = MANIFEST["spec"]["entrypoint"].replace("/opt/gradloc", str(ROOT))
    done = trees.run("bash", "-c", f"{entrypoint} --dry-run")
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    (workers,) = MANIFEST["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["rayStartParams"]["num-gpus"]
    assert {f"trainer.nnodes={workers['replicas']}", f"trainer.n_gpus_per_node={gpus}"} <= set(command)
    assert container["resources"]["requests"]["nvidia.com/gpu"] == gpus
