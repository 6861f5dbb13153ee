"""examples/rayjob.yaml against a schema of the fields that it uses, and against run_experiment.sh."""

import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tools.launcher import settings

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples/rayjob.yaml").read_text())


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no others: Kubernetes drops a misspelled field, or refuses it."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


# The types of ray.io/v1 (KubeRay's API reference) and of core/v1 (Kubernetes' API reference), as far as used.
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
# Kubernetes takes numbers, too; as texts they are the same in every reader of YAML.
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"}
RESOURCES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = closed(
    {"name": NAME, "image": {"type": "string", "pattern": r"^\S+$"}},
    {
        "resources": closed({}, {"requests": RESOURCES, "limits": RESOURCES}),
        "volumeMounts": listed(closed({"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}})),
    },
)
VOLUME = closed(
    {"name": NAME},
    {
        "persistentVolumeClaim": closed({"claimName": NAME}),
        "emptyDir": closed({}, {"medium": {"enum": ["", "Memory"]}, "sizeLimit": QUANTITY}),
    },
)
POD = closed({"spec": closed({"containers": listed(CONTAINER)}, {"volumes": listed(VOLUME)})})
# Options of `ray start`: names without dashes in front, values always texts.
START = {"type": "object", "propertyNames": {"pattern": "^[a-z]"}, "additionalProperties": {"type": "string"}}
WORKERS = closed(
    {
        "groupName": NAME,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "rayStartParams": START,
        "template": POD,
    }
)
RAYJOB = closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": closed({"name": NAME | {"maxLength": 47}}),  # KubeRay appends to it
        "spec": closed(
            {
                "entrypoint": {"type": "string"},
                "rayClusterSpec": closed(
                    {
                        "headGroupSpec": closed({"rayStartParams": START, "template": POD}),
                        "workerGroupSpecs": listed(WORKERS),
                    }
                ),
            },
            {"shutdownAfterJobFinishes": {"type": "boolean"}, "backoffLimit": COUNT},
        ),
    }
)


def test_the_manifest_fits_the_schema() -> None:
    jsonschema.validate(MANIFEST, RAYJOB)


def cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda manifest: manifest.update(apiVersion="ray.io/v1alpha1"),
        lambda manifest: manifest["spec"].update(shutdownAfterJobFinish=True),
        lambda manifest: cluster(manifest)["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
        lambda manifest: cluster(manifest)["headGroupSpec"]["rayStartParams"].update({"--block": "true"}),
        lambda manifest: cluster(manifest)["workerGroupSpecs"][0].pop("template"),
        lambda manifest: cluster(manifest)["workerGroupSpecs"][0].update(replicas="2"),
        lambda manifest: cluster(manifest).update(workerGroupSpecs={}),
    ],
)
def test_the_schema_finds_what_is_wrong(break_it: Callable[[dict[str, Any]], object]) -> None:
    broken = copy.deepcopy(MANIFEST)
    break_it(broken)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, RAYJOB)


def test_the_entrypoint_and_the_pods_agree() -> None:
    program, *arguments = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert (program, arguments[:2]) == ("bash", ["/opt/gradloc/run_experiment.sh", "--cluster"])
    given = dict(argument.split("=", 1) for argument in arguments[2:])
    assert given.keys() <= settings.BY_NAME.keys()
    (workers,) = cluster(MANIFEST)["workerGroupSpecs"]
    assert int(given["NNODES"]) == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    for place in ("requests", "limits"):
        assert container["resources"][place]["nvidia.com/gpu"] == given["GPUS_PER_NODE"]
    assert workers["rayStartParams"]["num-gpus"] == given["GPUS_PER_NODE"]
    # What training reads and writes is on the volume, which every pod has.
    for spec in (cluster(MANIFEST)["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        for name in ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES", "OUTPUT_DIR"):
            assert given[name].startswith(mounts["shared"] + "/")


def test_all_pods_have_one_image() -> None:
    text = (ROOT / "examples/rayjob.yaml").read_text()
    (image,) = set(re.findall(r"image: (\S+)", text))
    versions = {pin.parent.name for pin in ROOT.glob("patches/*/PIN")}
    assert image.rpartition(":")[2] in versions
