"""What the actor does about a spike, and about gradients that are not numbers."""

import json
from pathlib import Path

import action_cases
import pytest
from actors import LEARNING_RATE, Case
from test_actor import ONE, THREE, Launch, as_list, harmless, on_engine, on_ranks, same_events


@on_ranks(
    (2, Case("fsdp1", planted=ONE)),
    on_engine(2, Case(mini_batch=4, rows=4, planted=((1, 3, 6),))),
)
def test_skip_leaves_the_step_out(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, action_cases.skip, case)
    (event,), second = same_events([run for _, run in results])
    assert second == [] and event["action"] == "skip" and event["applied"]
    for same, run in results:
        assert all(same.values()), same
        assert sum(as_list(run.metrics[0]["actor/gradloc/skipped"])) == 1
        assert as_list(run.metrics[0]["actor/grad_norm"]) == [event["global_norm"]]


@on_ranks(
    (2, Case("fsdp1", planted=THREE)),
    (2, Case("fsdp1-orig", checkpointing=True, kl=True, entropy=True, planted=ONE)),
    (2, Case(checkpointing=True, kl=True, entropy=True, dynamic=True, planted=ONE)),
    on_engine(2, Case("fsdp1", nan=((0, 2, 7), (1, 3, 2)), loss_agg_mode="seq-mean-token-mean")),
    (1, Case("none", planted=((0, 5, 9),))),
    (2, Case("fsdp1", precision="float16", loss_scale=8.0, planted=ONE)),
    on_engine(2, Case(precision="float16", loss_scale=8.0, planted=ONE)),
)
def test_drop_takes_the_culprits_out(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, action_cases.drop, case)
    ((event,),) = [same_events([run for _, run in results])[0]]
    assert event["action"] == "drop" and event["applied"] and event["complete"]
    assert len(event["culprits"]) == len(case.planted) + len(case.nan)
    for distances, _ in results:
        assert len(distances) == 1 and distances[0] < case.tolerance


def test_drop_without_its_passes_leaves_the_gradient(launch: Launch) -> None:
    results = launch(2, action_cases.drop_without_budget, Case(planted=ONE), 4)
    assert all("spike_action=drop was not applied: it takes 4 passes" in warnings[0] for _, _, warnings in results)
    results = [(same, run) for same, run, _ in results]
    ((event,),) = [harmless(results)[0]]
    assert len(event["culprits"]) == 1 and not event["applied"]


@pytest.mark.parametrize("shift", [2.0, 0.0])
def test_log_probs_unlike_the_rollouts_are_called_misaligned(launch: Launch, shift: float) -> None:
    results = launch(2, action_cases.misaligned, Case(rollout=True, planted=ONE), shift)
    ((event,),) = same_events(results)
    assert [culprit["source"] == "misaligned" for culprit in event["culprits"]] == [bool(shift)]
    assert [run.metrics[0]["actor/gradloc/misaligned_share"] for run in results] == [float(bool(shift))] * 2


def test_a_spike_of_many_tokens_together_has_no_culprit(launch: Launch) -> None:
    results = launch(2, action_cases.diffuse, Case("fsdp1", loss_agg_mode="seq-mean-token-sum"))
    token, unit, _ = results[0]
    assert unit > 1.01 * token, "the batch has no unit whose tokens pull together"
    ((event,),) = same_events([run for *_, run in results])
    assert event["diagnosis"] == "diffuse" and event["culprits"] == []
    assert event["diffuse"] and event["complete"] == (not event["open_segments"])
    for part in event["diffuse"]:
        assert part["norm"] > part["threshold"] and part["tokens"] > 1
        assert all(largest["grad_norm"] <= event["threshold"] for largest in part["largest_tokens"])
    assert event["trigger"]["norm"] == pytest.approx(max(u["norm"] for u in event["units"]))


@pytest.mark.parametrize("scope", ["rank", "row"])
def test_a_diffuse_spike_is_narrowed_down_to_where_it_is(launch: Launch, scope: str) -> None:
    results = launch(2, action_cases.diffuse, Case(loss_agg_mode="seq-mean-token-sum"), scope)
    ((event,),) = same_events([run for *_, run in results])
    assert event["diagnosis"] == "diffuse" and event["diffuse"] and event["culprits"] == []
    assert event["complete"] == (not event["open_segments"])
    assert {part["rank"] for part in event["diffuse"]} == {1}
    assert scope == "rank" or {row for part in event["diffuse"] for row in part["rows"]} == {6}
    # A unit is left after 24 probes, two in a pass, that point at no token; its parts are a tree over its tokens.
    tokens = sum(unit["tokens"] for unit in event["units"])
    assert event["passes"] <= min(tokens, 16 * len(event["units"]))


def test_the_worker_advances_its_schedule_after_a_skipped_step(launch: Launch) -> None:
    """Also with parameters and optimizer offloaded between updates (verl cannot do that with FSDP1 on a CPU)."""
    results = launch(2, action_cases.update_of_the_worker, Case("fsdp2", optimizer="adamw", planted=ONE))
    for events, rates, steps, same in results:
        first, second = json.loads(events)
        assert (len(first), second) == (1, [])
        assert rates == [LEARNING_RATE / 2, LEARNING_RATE / 3]
        assert steps == [0, 1]
        assert same == [True, True]


@pytest.mark.every_target
def test_what_cannot_be_sent_to_other_ranks_is_written_as_text(launch: Launch, tmp_path: Path) -> None:
    """And only the largest culprits have long texts, which all ranks would get."""
    launch(2, action_cases.evidence_with_odd_truths, str(tmp_path), 20)
    (line,) = (tmp_path / "spikes.jsonl").read_text().splitlines()[:1]
    culprits = json.loads(line)["culprits"]
    assert all("lambda" in culprit["ground_truth"] and culprit["token"] == "3" for culprit in culprits)
    assert [culprit["prompt"] for culprit in culprits] == ["1 2"] * 16 + [None] * 4


@pytest.mark.target(version="0.9.1")
def test_one_rank_of_a_group_describes_its_culprits(launch: Launch, tmp_path: Path) -> None:
    results = launch(4, action_cases.evidence_of_shared_data, str(tmp_path))
    assert [described for described, _ in results] == [[10], [], [11], []]
    assert results[0][1] == [0.0, 2.0]  # rank 0 writes
