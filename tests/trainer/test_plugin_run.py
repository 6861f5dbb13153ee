"""The real `python -m verl.trainer.main_ppo` of a verl that is not patched, with the plugin from its wheel."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from runs import CRITIC, ROOT, finished

import trees

pytestmark = [
    pytest.mark.slow,
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(not trees.HAS_PLUGINS, reason="the plugin is for verl 0.9"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as if it were installed."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def environment(installed: Path) -> dict[str, str]:
    path = [os.environ["GRADLOC_BASE_TREE"], installed, ROOT / "tests/trainer"]
    return {"PYTHONPATH": os.pathsep.join(map(str, path))}


def test_a_planted_token_is_found_and_the_critic_is_watched(
    installed: Path, tmp_path: Path, warm_without_verl: Path
) -> None:
    planted = tmp_path / "planted.json"
    modules = {"VERL_USE_EXTERNAL_MODULES": "planted_spike,critic_on_cpu", "PLANTED_SPIKE_FILE": str(planted)}
    arguments = ["--plugin", "GRAD_NORM_THRESHOLD=80", "TOTAL_STEPS=2", "SPIKE_DRILL_STEP=1"]
    model = f"critic.model.path={ROOT}/.embedded/{trees.TARGET}-plugin/tiny/model"
    arguments += ["algorithm.adv_estimator=planted_spike", model, *CRITIC]
    options = {"interpreter": warm_without_verl, **modules, **environment(installed)}
    printed, events = finished(tmp_path / "out", *arguments, **options)
    drills = [event for event in events if event["drill"]]
    assert [event["drill"]["found"] for event in drills] == [True]
    (event,) = [event for event in events if not event["drill"]]
    token = json.loads(planted.read_text())
    assert event["global_step"] == token["global_step"] and event["diagnosis"] == "tokens"
    (culprit,) = event["culprits"]
    assert (culprit["uid"], culprit["position"]) == (token["uid"], token["position"])
    steps = [json.loads(line) for line in (tmp_path / "out/bisect_dump/steps.jsonl").read_text().splitlines()]
    assert [step["global_step"] for step in steps] == [1, 2]
    assert f"{culprit['grad_norm']:.4g}" in printed  # the token may stand on two lines
    found = [json.loads(line) for line in (tmp_path / "out/bisect_dump/critic.jsonl").read_text().splitlines()]
    for step in (1, 2):
        places = [(spike["epoch"], spike["mini_batch"]) for spike in found if spike["global_step"] == step]
        assert places and places == [(0, number) for number in range(len(places))]
