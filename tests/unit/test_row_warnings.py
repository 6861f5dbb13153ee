"""Whether an update's rows fit together: advantages and rewards, uids and prompts, and responses of one prompt."""

import math
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import evidence as samples
import numpy
import pytest
import torch
from notation import Caplog, Patch, cases
from verl import DataProto
from verl.trainer.ppo import core_algos

from gradloc.adapters import update_evidence
from gradloc.adapters.update_evidence import TrainedData, UpdateEvidence
from gradloc.judge.judgement import judged
from gradloc.judge.rows import ADVANTAGE_MASK, ADVANTAGE_ORDER, MIXED_GROUPS, REPEATED, count_pairs, row_warnings
from gradloc.sums import TrainedRow

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


def warned(data: dict[str, Any]) -> dict[str, Any] | None:
    found = row_warnings(TrainedData(data).rows)
    return found[0] if found else None


@pytest.mark.parametrize("graded", [False, True])
@cases("estimator", "grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
def test_advantages_follow_rewards_unless_moved_or_negated(estimator: str, graded: bool) -> None:
    told = 0
    for seed in range(10):
        data = columns(estimator, graded, seed)
        pairs, contradicting = count_pairs(TrainedData(data).rows)
        assert pairs > 16 and not contradicting and warned(data) is None
        negated = warned(data | {"advantages": -data["advantages"]})
        assert negated and "sign is turned" in negated["sentence"]
        moved = warned(columns(estimator, graded, seed, moved=True))
        told += moved is not None and "rows that are moved" in moved["sentence"]
    assert told >= 8  # by chance, few pairs contradict each other in an update


def test_pairs_are_those_that_a_comparison_of_each_gives() -> None:
    """With numbers of many sizes, near the limits from which on two of them differ."""
    draw = random.Random(0)

    def number(size: float) -> float:
        near = draw.choice([-1, 0, 1]) * size * (1 + draw.uniform(-3e-4, 3e-4)) + draw.uniform(-2e-6, 2e-6)
        return draw.choice([float(draw.randint(-1, 1)), near, near, draw.gauss(0.0, size)])

    for size in (1e-6, 1e-3, 1.0, 1e3) * 50:
        rows = [TrainedRow(draw.choice("ab"), reward=number(size), advantage=number(size)) for _ in range(40)]
        expected = [0, 0]
        for one, other in combinations(rows, 2):
            signs = 1.0 if one.uid == other.uid else 0.0
            for a, b in ((one.reward, other.reward), (one.advantage, other.advantage)):
                signs *= 0.0 if math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) else math.copysign(1.0, a - b)
            expected = [expected[0] + (signs != 0), expected[1] + (signs < 0)]
        broken = [TrainedRow("a", reward=reward, advantage=-1.0) for reward in (math.nan, math.inf)]
        assert [*count_pairs([*broken, *rows])] == expected and expected[1] > 0


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


def test_without_prompts_or_rewards_nothing_is_compared(monkeypatch: Patch) -> None:
    of_tokens = TrainedData(columns("gae", graded=True)).rows  # they differ within a response
    assert count_pairs(of_tokens) == (0, 0) and not row_warnings(of_tokens)
    data = columns("grpo", moved=True)
    (told,) = row_warnings(TrainedData({name: data[name] for name in data if name != "token_level_rewards"}).rows)
    assert told["name"] == ADVANTAGE_MASK, "rows of other lengths are seen without rewards"
    assert warned({name: data[name] for name in data if name != "uid"}) is None
    # What cannot be counted leaves the rest: here there is no attention mask.
    monkeypatch.setattr(update_evidence, "_said", set())
    found = warned(data | {"input_ids": torch.ones_like(data["response_mask"]), "responses": data["response_mask"]})
    assert found is not None and found["name"] == ADVANTAGE_ORDER


def test_advantages_beside_their_tokens_are_told() -> None:
    data = sampled(0)
    data["advantages"] = torch.randn(len(UIDS), 1) * data["response_mask"]
    assert not row_warnings(TrainedData(data).rows)
    (told,) = row_warnings(TrainedData(data | {"advantages": data["advantages"].flip(1)}).rows)
    assert told["name"] == ADVANTAGE_MASK and told["share"] > 0.5


def sampled(seed: int, wrong: str = "", certainty: float = 1.0) -> dict[str, Any]:
    """An update's columns of prompts that are repeated and of sampled responses; `wrong` is done wrongly."""
    generator = torch.Generator().manual_seed(seed)
    prompts = DataProto.from_single_dict({"prompts": torch.randint(1, 50, (PROMPTS, 4), generator=generator)})
    batch = prompts.repeat(ANSWERS, interleave=wrong != "interleaved")
    # Requests of one prompt have one policy; with one seed, the same noise.
    logits = certainty * torch.randn(PROMPTS, 16, 50, generator=generator)
    policy = logits.log_softmax(-1).repeat_interleave(ANSWERS, 0)
    noise = torch.rand(policy.shape, generator=generator)
    ends = torch.randint(13, 17, (len(batch), 1), generator=generator)
    if wrong == "seeded":
        noise, ends = (each[::ANSWERS].repeat_interleave(ANSWERS, 0) for each in (noise, ends))
    responses = (policy - noise.log().neg().log()).argmax(-1)
    mask = (torch.arange(16) < ends).long()
    columns = {
        "uid": UIDS,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([batch.batch["prompts"], responses], 1),
        "attention_mask": torch.cat([torch.ones_like(batch.batch["prompts"]), mask], 1),
        "old_log_probs": policy.gather(-1, responses.unsqueeze(-1)).squeeze(-1),
    }
    batch = DataProto.from_single_dict(columns)
    if wrong == "doubled":  # where a gather takes the rows of one rank twice
        batch = DataProto.concat([batch[: len(batch) // 2]] * 2)
    return {**batch.batch, **batch.non_tensor_batch}


RESPONSES = ("responses", "response_mask", "old_log_probs")


def without_padding(columns: dict[str, Any], *names: str) -> dict[str, Any]:
    """As verl's engine has them: the older trainer nests the inputs alone."""
    nested = {}
    for name in names:
        masks = columns["response_mask" if name in RESPONSES else "attention_mask"].bool()
        rows = [*map(torch.masked_select, columns[name], masks)]
        nested[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return columns | nested


@pytest.mark.parametrize("nested", [(), ("input_ids",), ("input_ids", *RESPONSES)])
@cases(
    "wrong told",
    *(("interleaved", [(MIXED_GROUPS, 1.0)]), ("seeded", [(REPEATED, 5 / 6)]), ("doubled", [(REPEATED, 0.5)])),
    ("", []),
)
def test_prompts_of_one_uid_and_copies_are_told(wrong: str, told: list[Any], nested: tuple[str, ...]) -> None:
    found = row_warnings(TrainedData(without_padding(sampled(0, wrong), *nested)).rows)
    assert [(each["name"], each["share"]) for each in found] == told


def test_what_a_policy_is_sure_of_is_no_copy() -> None:
    data = sampled(1, certainty=20.0)
    assert data["old_log_probs"].sum(1).mean() > -5
    data["old_log_probs"][data["response_mask"] == 0] = -99.0  # tool output, or padding
    assert len(rows := TrainedData(data).rows) == len(UIDS) and not row_warnings(rows)


@pytest.mark.parametrize("states", ["of one", "own", "common", "as many as uids"])
def test_a_trajectory_in_several_rows_is_not_mixed(states: str) -> None:
    """Its later rows have other prompts under the same uid: what it has said, or the state of an environment."""
    data = sampled(2)
    prompts = data["input_ids"][:, :4]
    prompts[: 2 * ANSWERS] = prompts[0]  # a prompt is there twice
    if states == "of one":
        prompts[-1] = 0
    elif states == "own":
        prompts[1::2, 3] += 50 * torch.arange(len(prompts) // 2)
    else:
        count = PROMPTS if states == "as many as uids" else PROMPTS // 2
        prompts[:] = torch.arange(len(prompts))[:, None] % count
        if states == "as many as uids":  # then verl's trainer says which rows are one trajectory's
            data["session_id"] = numpy.arange(len(prompts)) // 2 % (ANSWERS // 2)
    assert len(rows := TrainedData(data).rows) == len(UIDS) and not row_warnings(rows)


@pytest.mark.parametrize("name", [ADVANTAGE_ORDER, MIXED_GROUPS, REPEATED])
def test_order_and_groups_outrank_a_natural_spike_and_no_other_cause(name: str) -> None:
    found = {"name": name, "sentence": "Rows are wrong.", "check": "Look."}
    for figures, cause in (({}, "unlikely"), ({"rollout_log_prob": 0.0}, "unsampled")):
        spike = samples.spike(log_prob=-6.0, **figures)
        assert spike["verdict"]["cause"] == cause
        told = judged({**spike, "warnings": [found]})["verdict"]["cause"]
        assert told == (name if cause == "unlikely" and name != REPEATED else cause)


@pytest.mark.parametrize("of", ["actor", "critic"])
def test_warnings_without_a_spike_are_written_and_logged_once(
    of: str, tmp_path: Path, caplog: Caplog, monkeypatch: Patch
) -> None:
    """Not those of a critic's rows, which are the same."""
    monkeypatch.setattr(update_evidence, "_said", set())
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    scaled: Any = {"name": "loss_scale", "sentence": "It is scaled.", "check": "Look."}
    for step in range(1, 4):
        evidence.take_in_rows(TrainedData(columns("grpo", moved=step == 2, seed=step)))
        evidence.write(step, {f"{of}/gradloc/token_norm_max": 1.0}, lambda: [scaled])
    assert caplog.messages[0] == "Step 1: It is scaled. Look."
    if of == "critic":
        assert len(caplog.messages) == 1 and not (tmp_path / "steps.jsonl").exists()
        return
    (order,) = caplog.messages[1:]
    assert order.startswith("Step 2: Advantages do not follow the rewards")
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [ADVANTAGE_ORDER in line for line in lines] == [False, True, False]
    assert all("It is scaled." in line for line in lines)


def test_mini_batches_of_an_update_are_counted_together_and_once(tmp_path: Path) -> None:
    data = columns("grpo", graded=True)
    negated = {**data, "advantages": -data["advantages"]}
    parts = [TrainedData({name: column[i : i + ANSWERS] for name, column in negated.items()}) for i in (0, ANSWERS)]
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    for step, counted in ((1, parts[:1]), (2, parts)):
        for part in counted:
            evidence.add([], part)
            evidence.take_in_rows(part)
        evidence.write(step, {"actor/gradloc/token_norm_max": 1.0}, tuple)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [ADVANTAGE_ORDER in line for line in lines] == [False, True]
