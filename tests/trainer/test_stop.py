"""`spike_action=stop` in the real `python -m verl.trainer.main_ppo`: the run ends early, with a checkpoint."""

import json
from pathlib import Path

import pytest
from runs import IS_0_9, REWARDS, events_in, started

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm"), pytest.mark.target(version="0.9.1")]

ASYNC = ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.custom_sampler.path=null"]
TRAINERS = {"V1": [], "V1_async": ASYNC, "V0": ["trainer.use_v1=False"]} if IS_0_9 else {"Ray": []}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_repeated_spikes_end_a_run_with_a_checkpoint(trainer: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    actor = "actor_rollout_ref.actor"
    arguments = ["GRAD_NORM_THRESHOLD=0.1", "TOTAL_STEPS=3", "SPIKE_DRILL_STEP=null", "SPIKE_ACTION=stop"]
    arguments += [f"{actor}.bisect_budget_steps=8", f"{actor}.spike_stop_after=1", *TRAINERS[trainer]]
    with started(output, *arguments, *REWARDS) as script:
        printed, _ = script.communicate()
    assert script.returncode == 76, printed
    events = events_in(output)
    assert {(event["global_step"], event["action"]) for event in events} == {(1, "stop")}
    culprits = [culprit for event in events for culprit in event["culprits"]]
    assert culprits and {culprit["reward"] for culprit in culprits} <= {0.0, 1.0}
    assert all(culprit[name] for culprit in culprits for name in ("uid", "prompt", "data_source", "ground_truth"))
    said, last = printed.splitlines()[-2:]
    assert "Training was stopped after repeated spikes (exit code 76)" in said and last.startswith(
        "Training ends after step 1, "
    )
    assert last.endswith(f"the evidence is in {output}/bisect_dump, the checkpoint in {output}/global_step_1.")
    assert (output / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert any((output / "global_step_1/actor").glob("model_world_size_2_rank_*.pt"))
    (line,) = (output / "bisect_dump/steps.jsonl").read_text().splitlines()
    assert json.loads(line)["triggered"] == len(events)
    log = (output / "train.log").read_text()
    assert "step:1 - " in log and "step:2 - " not in log
