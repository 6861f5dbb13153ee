"""The evidence that the trainer writes, its metrics, and what rank 0 judges and logs of an update with many spikes."""

import json
import subprocess
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import runs
import torch
import verl
from evidence import answer, clip, clipped_token, drill, spike, warning
from notation import Caplog, Patch, cases
from valid_events import lines_in
from verl import DataProto

import gradloc.judge
from gradloc.tools.schema import CLIP, EVENT, conforms

PROMPT, RESPONSE, ROWS = 3, 5, 4
STALE = warning("stale_weights", "rollout_log_probs")


def test_columns_of_any_type_are_written(tmp_path: Path, caplog: Caplog) -> None:
    """As rank 0 of verl 0.7's worker writes an event with one culprit."""
    from gradloc.adapters.dp_actor import write_evidence

    ids = torch.arange(ROWS * (PROMPT + RESPONSE)).reshape(ROWS, -1)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, PROMPT:]}
    # Reward functions of one's own may take anything.
    columns = {"data_source": 3, "uid": uuid.UUID(int=7), "reward_model": "no mapping"}
    arrays = {name: np.array([value] * ROWS, dtype=object) for name, value in columns.items()}
    data = DataProto.from_dict(tensors, arrays, meta_info={"global_steps": 1})
    event: dict[str, Any] = {"global_step": 1, "mini_batch": 1, "drill": None, "warnings": []}
    event["culprits"] = [{"rank": 0, "row": 1, "position": 2}]
    no_judgement = RuntimeError("no judgement")
    watch = Mock(sequence_parallel_size=1, lines=lambda: [event], answer=Mock(side_effect=[None, no_judgement]))
    config = SimpleNamespace(bisect_dump_dir=str(tmp_path), ppo_mini_batch_size=ROWS // 2)
    actor: Any = SimpleNamespace(config=config, watch=watch)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    for _ in range(2):  # training goes on
        write_evidence(actor, data, tokenizer, {"actor/gradloc/triggered": 1})
    assert "the evidence of a step is not written: RuntimeError('no judgement')" in caplog.text
    (culprit,) = json.loads((tmp_path / "spikes.jsonl").read_text())["culprits"]
    assert (culprit["data_source"], culprit["uid"]) == ("3", str(uuid.UUID(int=7)))
    assert culprit["prompt"] == "24 25 26"  # of the second row of the second mini-batch


@pytest.mark.parametrize("how", ["exits", "hangs"])
def test_a_tokenizer_costs_its_texts_alone(how: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    from gradloc import guarded
    from gradloc.adapters import update_evidence

    answers = threading.Event()
    decode = Mock(side_effect=SystemExit(3) if how == "exits" else lambda *_, **__: answers.wait())
    monkeypatch.setattr(update_evidence, "_said", set())
    monkeypatch.setattr(update_evidence, "_tokenizing", guarded.PatientThread("the tokenizer"))
    monkeypatch.setattr(guarded, "PATIENCE", 0.05 if how == "hangs" else 1e9)
    ids = torch.arange(ROWS * (PROMPT + RESPONSE)).reshape(ROWS, -1)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, PROMPT:]}
    evidence = update_evidence.UpdateEvidence(str(tmp_path), SimpleNamespace(decode=decode), 1)
    token = {"rank": 0, "row": 0, "position": 1}
    evidence.add([drill(1, True) | {"culprits": [token, dict(token)]}], update_evidence.TrainedData(columns))
    assert token == {"rank": 0, "row": 0, "position": 1}
    (said,) = caplog.messages
    assert "without its text" in said and ("SystemExit(3)" if how == "exits" else "the tokenizer does not res") in said
    answers.set()


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
        rule = {"rollout_rs": rejection, "rollout_rs_threshold": 1.2}
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, rule)
        return compute_data_metrics(compute_advantage(batch, adv_estimator="grpo"), use_critic=False)

    accepted, rejected = metrics(-1.0), metrics(-9.0)
    assert accepted["critic/advantages/max"] > 0 > accepted["critic/advantages/min"]
    assert rejected.keys() == accepted.keys()
    for name, value in accepted.items():
        trained_on = name.startswith(("critic/advantages", "critic/returns"))
        assert rejected[name] == (0.0 if trained_on else value)


def write(
    directory: Path, events: list[dict[str, Any]], said: Any = None, figures: Mapping[str, float] = {"triggered": 1}
) -> None:
    from gradloc.adapters.update_evidence import UpdateEvidence

    evidence = UpdateEvidence(str(directory), None, 1)
    evidence._events = [{name: event[name] for name in event if name not in ("verdict", "summary")} for event in events]
    evidence.write(3, {f"actor/gradloc/{name}": figures[name] for name in figures}, lambda rows: said)


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (3, 3), (4, 4)])
def test_few_lines_are_logged_of_an_update(count: int, lines: int, tmp_path: Path, caplog: Caplog) -> None:
    write(tmp_path, [drill(3, True), *[spike(3)] * 3][:count])
    said = [record.getMessage() for record in caplog.records]
    last = f"{count - 3} more gradient spikes in step 3: see the report on {tmp_path}"
    starts = [
        "Spike drill in step 3: A drill: the planted",
        *["Gradient spike in step 3: No identity could be checked. "] * 2,
        last,
    ]
    assert len(said) == lines and all(map(str.startswith, said, starts))


def test_clips_are_logged_after_the_spikes(tmp_path: Path, caplog: Caplog) -> None:
    clips = [clip(3, [clipped_token(0, ["a"], 9.0)])] * 5
    write(tmp_path, [*clips, spike(3, log_prob=-6.0)], answer())
    first, *others, last = [record.getMessage() for record in caplog.records]
    start = (
        "Gradient spike in step 3: All 11 identities that could be checked hold. A natural spike: the tokens are rare"
    )
    check, summary = "--remedies", "1 culprit"
    assert first.startswith(start) and first.index(check) < first.index(summary)
    assert len(others) == 3 and all(line.startswith("Outlying tokens in step 3: TokenClip found 1 ") for line in others)
    assert last == f"2 more mini-batches with outlying tokens in step 3: see the report on {tmp_path}"


def test_a_spike_is_judged_by_all_that_its_update_shows(tmp_path: Path, caplog: Caplog) -> None:
    """Not by what was known of it in its mini-batch."""
    scale = warning("loss_scale", "loss")
    said = answer([STALE]) | {"news": ["What has broken."]}
    write(tmp_path, [{**spike(3, log_prob=-6.0), "warnings": [scale]}], said)
    (line,) = lines_in(tmp_path)
    assert line["warnings"] == [STALE] and line["verdict"]["cause"] == "stale_weights"
    assert line["identities"] == said["identities"]
    (step,) = lines_in(tmp_path, "steps.jsonl")
    assert {name: step[name] for name in ("identities", "warnings", "changes")} == {
        name: said[name] for name in ("identities", "warnings", "changes")
    }
    assert caplog.messages[0] == "Step 3: What has broken."


def test_a_critic_has_no_identities(tmp_path: Path) -> None:
    from gradloc.adapters.update_evidence import UpdateEvidence

    asked = Mock()
    UpdateEvidence(str(tmp_path), None, 1).write(3, {"critic/gradloc/triggered": 0.0}, asked)
    assert not asked.called and not [*tmp_path.iterdir()]


def exits(*_: Any) -> None:
    raise SystemExit(3)


def answers(line: Any, *_: Any, **changes: Any) -> dict[str, Any]:
    return {"identities": {}, "warnings": [], "verdict": None, "summary": "It is judged.", **changes}


VERDICT = {"cause": "token", "facts": [], "claim": "", "evidence": "", "sentence": "It is far.", "check": "Look."}


@cases(
    "judge said",
    (exits, "tried to end the process: SystemExit(3)"),
    (lambda *_: None, "TypeError"),
    (lambda *_: {}, "KeyError"),
    (partial(answers, summary=7), "another form"),
    (partial(answers, summary={1, 2}), "not JSON serializable"),
    (partial(answers, verdict="token", summary=["text"]), "another form"),
    (partial(answers, verdict=VERDICT | {"facts": "all"}, summary=None), "another form"),
    (partial(answers, verdict={"cause": None}, summary=True), "another form"),
    (partial(answers, warnings=[{**STALE, "check": 7}], summary=0), "another form"),
    (partial(answers, identities={"loss": {"state": "unknown"}}, summary=0), "another form"),
    (None, "the judge, which is not asked again"),
)
def test_what_the_judge_does_costs_its_answer_alone(
    judge: Any, said: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog
) -> None:
    """Without one, it never answers."""
    from gradloc import guarded, judging

    ends = threading.Event()
    asked = Mock(side_effect=judge or (lambda *_: ends.wait()))
    monkeypatch.setattr(gradloc.judge, "judged", asked)
    monkeypatch.setattr(judging, "_thread", guarded.PatientThread(judging._thread._what))
    monkeypatch.setattr(guarded, "PATIENCE", 1e9 if judge else 0.05)
    write(tmp_path, [spike(3), clip(3, [clipped_token(0, ["a"], 9.0)])], answer(), {"token_norm_max": 1.0})
    found, clipped = lines_in(tmp_path)
    assert conforms(found, EVENT) and conforms(clipped, CLIP)
    assert (found["verdict"], found["summary"], clipped["summary"]) == (None, "", "") and said in caplog.text
    (step,) = lines_in(tmp_path, "steps.jsonl")
    assert step["token_norm_max"] == 1.0 and "warnings" in step
    assert asked.call_count == 2 if judge else asked.call_count <= 1
    ends.set()
    assert judging._thread.was_late == (judge is None)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_workers_of_the_tests_have_random_ids() -> None:
    """They are forked. With the same ids for their objects, a run in hundreds never starts, or reads wrong data."""
    command = [runs.warm_interpreter, "-X", "fork", "-c", "import ray; print(ray.ObjectRef.from_random())"]
    drawn = {subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout for _ in range(3)}
    assert len(drawn) == 3
