"""The evidence that the trainer writes, its metrics, and what rank 0 logs of an update with many spikes."""

import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl
from notation import Caplog
from verl import DataProto

PROMPT, RESPONSE, ROWS = 3, 5, 4


def test_columns_of_any_type_are_written(tmp_path: Path) -> None:
    """As rank 0 of verl 0.7's worker writes an event with one culprit."""
    from verl.utils.gradloc.adapters.dp_actor import write_evidence

    ids = torch.arange(ROWS * (PROMPT + RESPONSE)).reshape(ROWS, -1)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, PROMPT:]}
    # Reward functions of one's own may take anything.
    columns = {"data_source": 3, "uid": uuid.UUID(int=7), "reward_model": "no mapping"}
    arrays = {name: np.array([value] * ROWS, dtype=object) for name, value in columns.items()}
    data = DataProto.from_dict(tensors, arrays, meta_info={"global_steps": 1})
    event = {"global_step": 1, "mini_batch": 1, "culprits": [{"rank": 0, "row": 1, "position": 2}], "world_size": 1}
    watch = {"sequence_parallel_size": 1, "watches_passes": True, "lines": lambda: [event], "warnings": lambda: []}
    config = SimpleNamespace(bisect_dump_dir=str(tmp_path), ppo_mini_batch_size=ROWS // 2)
    actor: Any = SimpleNamespace(config=config, watch=SimpleNamespace(**watch))
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    write_evidence(actor, data, tokenizer, {})
    (culprit,) = json.loads((tmp_path / "spikes.jsonl").read_text())["culprits"]
    assert (culprit["data_source"], culprit["uid"]) == ("3", str(uuid.UUID(int=7)))
    assert culprit["prompt"] == "24 25 26"  # of the second row of the second mini-batch


def test_a_step_whose_answers_are_all_rejected_has_metrics() -> None:
    from verl.trainer.ppo.metric_utils import compute_data_metrics
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    rejection = "geometric" if verl.__version__.startswith("0.7.0") else "seq_mean_k1"

    def metrics(rollout_log_prob: float) -> dict[str, Any]:
        ids, per_token = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.long), torch.zeros(ROWS, RESPONSE)
        rewards = torch.arange(ROWS).float().unsqueeze(1) * torch.eye(RESPONSE)[-1]
        tensors = {"attention_mask": ids, "responses": ids[:, PROMPT:], "response_mask": torch.ones_like(per_token)}
        tensors |= {"old_log_probs": per_token - 1, "rollout_log_probs": per_token + rollout_log_prob}
        tensors |= {"token_level_scores": rewards, "token_level_rewards": rewards}
        batch = DataProto.from_dict(tensors, {"uid": np.array(["a"] * ROWS, dtype=object)})
        batch, _ = compute_rollout_correction_and_add_to_batch(
            batch, {"rollout_rs": rejection, "rollout_rs_threshold": 1.2}
        )
        return compute_data_metrics(compute_advantage(batch, adv_estimator="grpo"), use_critic=False)

    accepted, rejected = metrics(-1.0), metrics(-9.0)
    assert accepted["critic/advantages/max"] > 0 > accepted["critic/advantages/min"]
    assert rejected.keys() == accepted.keys()
    for name, value in accepted.items():
        trained_on = name.startswith(("critic/advantages", "critic/returns"))
        assert rejected[name] == (0.0 if trained_on else value)


def write(directory: Path, lines: list[dict[str, Any]]) -> None:
    from verl.utils.gradloc.adapters.update_evidence import UpdateEvidence

    evidence = UpdateEvidence(str(directory), None, 1)
    evidence._events = lines
    evidence.write(3, {}, list)


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 1), (3, 3), (4, 4), (40, 4)])
def test_few_lines_are_logged_of_an_update(count: int, lines: int, tmp_path: Path, caplog: Caplog) -> None:
    events: list[dict[str, Any]] = [
        {"global_step": 3, "summary": f"sum {index}.", "drill": {} if index == 0 else None} for index in range(count)
    ]
    write(tmp_path, events)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == lines
    assert said[:2] == ["Spike drill in step 3: sum 0.", "Gradient spike in step 3: sum 1."][:count]
    if count > 3:
        assert said[3] == f"{count - 3} more gradient spikes in step 3: see the report on {tmp_path}"


def test_clips_and_verdicts_are_logged_with_the_spikes(tmp_path: Path, caplog: Caplog) -> None:
    clips = [{"global_step": 3, "summary": "cut.", "token_clip": {"tokens": []}}] * 5
    verdict = {"cause": None, "sentence": "No known cause: that is so.", "check": "`look` shows it."}
    spikes = [{"global_step": 3, "summary": "sum.", "drill": None, "verdict": each} for each in (None, verdict)]
    write(tmp_path, [*clips, *spikes])
    assert [record.getMessage() for record in caplog.records] == [
        "Gradient spike in step 3: sum.",
        "Gradient spike in step 3: No known cause: that is so. `look` shows it. sum.",
        *["Outlying tokens in step 3: cut."] * 3,
        f"2 more mini-batches with outlying tokens in step 3: see the report on {tmp_path}",
    ]
