"""Whether advantages follow the rewards: verl's own estimators do, and rows that are moved or negated do not."""

from typing import Any

import evidence as samples
import numpy
import pytest
import torch
from notation import Caplog, Patch
from torch import Tensor
from verl.trainer.ppo import core_algos

from gradloc.adapters import update_evidence
from gradloc.adapters.update_evidence import TrainedData, UpdateEvidence
from gradloc.judge.advantages import ADVANTAGE_ORDER, order_warning
from gradloc.judge.judgement import judged

PROMPTS, ANSWERS, LENGTH = 24, 6, 5
UIDS = numpy.repeat([f"prompt {i}" for i in range(PROMPTS)], ANSWERS).astype(object)


def columns(estimator: str, graded: bool = False, seed: int = 0, moved: bool = False) -> dict[str, Any]:
    """An update's columns with advantages of verl's estimator, perhaps of `moved` rows."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(len(UIDS), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (len(UIDS), 1), generator=generator)).float()
    scores = torch.zeros_like(mask)
    scores[range(len(UIDS)), mask.sum(1).long() - 1] = rewards if graded else (rewards < 0.4).float()
    if estimator == "gae":
        advantages, _ = core_algos.compute_gae_advantage_return(scores, torch.rand_like(mask), mask, 1.0, 0.95)
    else:
        options: dict[str, Any] = {"index": UIDS}
        if estimator.startswith("reinforce_plus_plus") and not estimator.endswith("baseline"):
            options = {"config": type("Config", (), {"gamma": 1.0})}
        estimate = core_algos.get_adv_estimator_fn(estimator)
        advantages, _ = estimate(token_level_rewards=scores, response_mask=mask, **options)
    if moved:
        advantages = advantages[torch.randperm(len(UIDS), generator=generator)]
    return {"uid": UIDS, "token_level_rewards": scores, "advantages": advantages, "response_mask": mask}


def warned(data: dict[str, Tensor]) -> dict[str, Any] | None:
    counts = TrainedData(data).reward_pairs()
    return order_warning(counts["pairs"], counts["contradicting"])


ESTIMATORS = ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_follow_rewards_unless_moved_or_negated(estimator: str, graded: bool) -> None:
    told = 0
    for seed in range(10):
        data = columns(estimator, graded, seed)
        counts = TrainedData(data).reward_pairs()
        assert counts["pairs"] > 16 and not counts["contradicting"]
        negated = warned(data | {"advantages": -data["advantages"]})
        assert negated and "sign is turned" in negated["sentence"]
        moved = warned(columns(estimator, graded, seed, moved=True))
        told += moved is not None and "rows that are moved" in moved["sentence"]
    assert told >= 8  # by chance, few pairs contradict each other in an update


def test_rewards_normalized_one_by_one_are_no_contradiction() -> None:
    """As GDPO does, which only verl 0.9 has: here for a score that is one of two rewards, the other one against it."""
    for seed in range(10):
        data = columns("grpo", seed=seed)
        score = data["token_level_rewards"].sum(1)
        chance = torch.rand(len(score), generator=torch.Generator().manual_seed(seed))
        against = ((1 - score) * 0.6 + 0.2 > chance).float()
        of_groups = [each.view(PROMPTS, ANSWERS) for each in (score, against)]
        normed = [(each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-6) for each in of_groups]
        assert warned(data | {"advantages": sum(normed).view(-1, 1) * data["response_mask"]}) is None


def test_without_prompts_or_rewards_nothing_is_compared() -> None:
    assert not TrainedData(columns("gae", graded=True)).reward_pairs()  # they differ within a response
    for lacking in ("uid", "token_level_rewards"):
        data = columns("grpo", moved=True)
        del data[lacking]
        assert warned(data) is None


def test_order_outranks_a_natural_spike_and_no_other_cause() -> None:
    found = warned(columns("grpo", moved=True))
    assert found is not None
    for figures, cause in (({}, "unlikely"), ({"rollout_log_prob": 0.0}, "unsampled")):
        spike = samples.spike(log_prob=-6.0, **figures)
        assert spike["verdict"]["cause"] == cause
        told = judged({**spike, "warnings": [found]})["verdict"]["cause"]
        assert told == (ADVANTAGE_ORDER if cause == "unlikely" else cause)


def test_warnings_without_a_spike_are_written_and_logged_once(
    tmp_path: Any, caplog: Caplog, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(update_evidence, "_said", set())
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    scaled: Any = {"name": "loss_scale", "sentence": "It is scaled.", "check": "Look."}
    for step, moved in ((1, False), (2, True), (3, False)):
        evidence.take_in_rewards(TrainedData(columns("grpo", moved=moved, seed=step)))
        evidence.write(step, {"actor/gradloc/token_norm_max": 1.0}, lambda: [scaled])
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [(ADVANTAGE_ORDER in line, "scaled" in line) for line in lines] == [
        (False, True),
        (True, True),
        (False, True),
    ]
    first, second = caplog.messages
    assert first == "Step 1: It is scaled. Look." and second.startswith("Step 2: Advantages do not follow the rewards")


def test_mini_batches_of_an_update_are_counted_together_and_once(tmp_path: Any) -> None:
    data = columns("grpo", graded=True)
    negated = {**data, "advantages": -data["advantages"]}
    parts = [TrainedData({name: column[i : i + ANSWERS] for name, column in negated.items()}) for i in (0, ANSWERS)]
    assert [part.reward_pairs()["pairs"] for part in parts] == [15, 15]
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    for step, counted in ((1, parts[:1]), (2, parts)):
        for part in counted:
            evidence.add([], part)
            evidence.add([], part, own=True)
            evidence.take_in_rewards(part)
        evidence.write(step, {"actor/gradloc/token_norm_max": 1.0}, tuple)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [ADVANTAGE_ORDER in line for line in lines] == [False, True]


def test_a_critic_does_not_warn_of_the_same_rows(tmp_path: Any, caplog: Caplog, monkeypatch: Patch) -> None:
    monkeypatch.setattr(update_evidence, "_said", set())
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    evidence.take_in_rewards(TrainedData(columns("grpo", moved=True)))
    evidence.write(1, {"critic/gradloc/token_norm_max": 1.0}, tuple)
    assert not caplog.messages and not (tmp_path / "steps.jsonl").exists()
    evidence.take_in_rewards(TrainedData(columns("grpo", moved=True)))
    evidence.write(1, {"actor/gradloc/token_norm_max": 1.0}, tuple)
    assert len(caplog.messages) == 1
