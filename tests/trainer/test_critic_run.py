"""The real trainer with a critic (GAE), which is watched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import verl
from runs import ROOT, finished

from gradloc.evidence.schema import CRITIC, conforms

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm"), pytest.mark.target(version="0.9.1")]

ENGINE = verl.__version__ == "0.9.1"


def test_a_critic_is_watched_where_the_actor_is(tmp_path: Path) -> None:
    """Its τ is so small that every mini-batch is a spike."""
    model = ROOT / ".embedded" / verl.__version__ / "tiny/model"
    own = ["critic.fsdp.dtype=float32"] if ENGINE else ["critic.model.fsdp_config.model_dtype=float32"]
    finished(
        tmp_path,
        "TOTAL_STEPS=1",
        "LOGGER=console",
        "algorithm.adv_estimator=gae",
        "critic.strategy=fsdp2",
        f"critic.model.path={model}",
        "critic.model.use_remove_padding=False",
        "critic.model.enable_gradient_checkpointing=False",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.grad_norm_threshold=1e-4",
        *own,
        VERL_USE_EXTERNAL_MODULES="critic_on_cpu",
    )
    spikes = [json.loads(line) for line in (tmp_path / "bisect_dump/critic.jsonl").read_text().splitlines()]
    assert all(conforms(spike, CRITIC) for spike in spikes)
    assert {spike["global_step"] for spike in spikes} == {1}
    assert {unit["rank"] for spike in spikes for unit in spike["micro_batches"]} == {0, 1}
    value = spikes[0]["values"][0]
    assert value["context"] and value["uid"] and value["data_source"] == "math_verify" and value["reward"] is not None
    log = (tmp_path / "train.log").read_text()
    triggered = re.search(r"critic/gradloc/triggered:(?:np\.float64\()?([\d.]+)", log)
    assert float(triggered[1]) == len(spikes)
