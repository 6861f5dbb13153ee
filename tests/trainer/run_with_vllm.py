"""Four steps with verl's own vLLM rollout, and a drill, as a user starts them. The set-up installs what they need.

pytest does not find this file by itself: CONTRIBUTING.md says why, and how to run it.
"""

import os
import subprocess
from pathlib import Path

import pytest
from runs import ROOT
from valid_events import lines_in


@pytest.mark.timeout(3600)  # two engines start, after the set-up
@pytest.mark.parametrize("options", [[], ["--plugin"]])
def test_the_engine_and_training_agree_in_each_step(options: list[str], tmp_path: Path) -> None:
    command = ["bash", ROOT / "run_experiment.sh", "--embedded", "--tiny", "--rollout", "vllm", *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command += [f"OUTPUT_DIR={tmp_path}/out", "TOTAL_STEPS=4", "LR=1e-3"]
    command.append(f"reward.custom_reward_function.path={ROOT}/tests/trainer/varied_rewards.py")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "Drill in step 2: the planted token was found" in done.stdout, done.stdout
    steps = lines_in(tmp_path / "out/bisect_dump", "steps.jsonl")
    assert len(steps) == 4
    for step in steps:
        assert step["identities"]["rollout_log_probs"]["state"] == "held" and step["warnings"] == []
