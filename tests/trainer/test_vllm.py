"""Four steps with verl's own vLLM rollout, and a drill. The set-up of such a run installs what they need, once."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from runs import ROOT
from scripts import launch, set_up
from valid_events import lines_in

from warm_python import FOR_RAY, warm_python


@pytest.mark.slow
@pytest.mark.timeout(3600)  # with the set-up
@pytest.mark.parametrize("options", [[], ["--plugin"]], ids=["patch", "plugin"])
def test_the_engine_and_training_agree(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        launch.check_machine(True, Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text())
    except SystemExit:
        pytest.skip("vLLM needs a CPU with AVX2, and 10 GB of free memory")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # only what is installed there counts
    venv = ROOT / ".embedded" / f"0.9.1-vllm{'-plugin' * bool(options)}" / "venv"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with set_up.locked(venv.parent / "lock"):
        set_up.set_up_venv(venv, "0.9.1", ROOT, plugin=bool(options), rollout="vllm")
    environment = (
        os.environ | launch.added_environment(os.environ, 1, rollout="vllm") | {"EMBEDDED_METRICS": os.devnull}
    )
    command = ["bash", ROOT / "run_experiment.sh", "--embedded", "--tiny", "--rollout", "vllm", *options]
    command += [f"OUTPUT_DIR={tmp_path}/out", "GPUS_PER_NODE=1", "TOTAL_STEPS=4", "LR=5e-4", "data.train_batch_size=2"]
    command.append("actor_rollout_ref.rollout.temperature=0.05")  # all tokens of a random model are unlikely at 1
    command.append(f"reward.custom_reward_function.path={ROOT}/tests/trainer/varied_rewards.py")
    # The processes of verl are forked, those of vLLM are not.
    with (
        tempfile.TemporaryDirectory(prefix="warm-") as folder,
        warm_python(Path(folder), environment, verl=True, python=venv / "bin/python") as python,
    ):
        command += ["--python", python, f"+ray_kwargs.ray_init.runtime_env.py_executable={python}"]
        done = subprocess.run(
            command, env=os.environ | FOR_RAY | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
        )
    assert done.returncode == 0 and "Drill in step 2: the planted token was found" in done.stdout, done.stdout
    metrics = [json.loads(line)[1] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    # With the weights of the step before, they are 0.01 apart in the mean.
    assert len(metrics) == 4 and max(each["training/rollout_probs_diff_max"] for each in metrics) < 1e-3, metrics
    steps = lines_in(tmp_path / "out/bisect_dump", "steps.jsonl")
    assert len(steps) == 4
    for step in steps:
        assert step["identities"]["rollout_log_probs"]["state"] == "held" and step["warnings"] == []
