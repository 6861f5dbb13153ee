"""What the actor does about a spike, and about gradients that are not numbers."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import action_cases
import pytest
import torch
import torch.distributed as dist
from action_cases import DETECTION, compared
from actor_cases import Operations, Run, train, warnings_of
from actors import LEARNING_RATE, Case, stock_dp_actor
from test_actor import ONE, THREE, Launch, as_list, harmless, on_engine, on_ranks, same_events

from gradloc.adapters.update_evidence import UpdateEvidence
from gradloc.evidence.ordinary import token_medians
from gradloc.fsdp import collectives
from gradloc.measure.micro_batch import MicroBatch


@on_ranks(
    (2, Case("fsdp1", planted=ONE)),
    on_engine(2, Case(mini_batch=4, rows=4, planted=((1, 3, 6),))),
)
def test_skip_leaves_the_step_out(launch: Launch, world: int, case: Case) -> None:
    def skip() -> tuple[dict[str, bool], Run]:
        """Two calls with a spike in the first, against an unpatched actor that sees only the second."""
        run = train(case, calls=2, spike_action="skip", **DETECTION)
        stock = train(case, stock_dp_actor(), calls=[1])
        return {
            "parameters": all(map(torch.equal, run.parameters, stock.parameters)),
            "grad_norm": stock.metrics[0]["actor/grad_norm"] == run.metrics[1]["actor/grad_norm"],
            "steps": len(run.gradients) == 1,
        }, run

    results = launch(world, skip)
    (event,), second = same_events([run for _, run in results])
    assert second == [] and event["action"] == "skip" and event["applied"]
    for same, run in results:
        assert all(same.values()), same
        assert sum(as_list(run.metrics[0]["actor/gradloc/skipped"])) == 1
        assert as_list(run.metrics[0]["actor/grad_norm"]) == [event["global_norm"]]


@on_ranks(
    (2, Case("fsdp1", planted=THREE)),
    (2, Case("fsdp1-orig", checkpointing=True, kl=True, entropy=True, planted=ONE)),
    on_engine(2, Case(checkpointing=True, kl=True, entropy=True, dynamic=True, planted=ONE)),
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
    """Its budget is enough to find the culprit, but not to recompute the mini-batch without it."""

    def without_budget() -> tuple[dict[str, bool], Run, list[str]]:
        with warnings_of("gradloc.actions") as warnings:
            return *compared(Case(planted=ONE), 1, spike_action="drop", bisect_budget_steps=4), warnings

    results = launch(2, without_budget)
    assert all("spike_action=drop was not applied: it takes 4 passes" in warnings[0] for _, _, warnings in results)
    ((event,),) = harmless(results)
    assert len(event["culprits"]) == 1 and not event["applied"]


@pytest.mark.parametrize("scope", ["all", "row"])
def test_a_diffuse_spike_has_no_culprit_and_is_narrowed_down(launch: Launch, scope: str) -> None:
    case = Case("fsdp1" if scope == "all" else "fsdp2", loss_agg_mode="seq-mean-token-sum")
    results = launch(2, action_cases.diffuse, case, scope)
    token, unit, _ = results[0]
    assert unit > 1.01 * token, "the batch has no unit whose tokens pull together"
    ((event,),) = same_events([run for *_, run in results])
    assert event["diagnosis"] == "diffuse" and event["diffuse"] and event["culprits"] == []
    assert event["complete"] == (not event["open_segments"])
    for part in event["diffuse"]:
        assert part["norm"] > part["threshold"] and part["tokens"] > 1
        assert all(largest["grad_norm"] <= event["threshold"] for largest in part["largest_tokens"])
        assert scope == "all" or (part["rank"], part["rows"]) == (1, [6])
    assert event["trigger"]["norm"] == pytest.approx(max(u["norm"] for u in event["units"]))
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


def test_medians_over_all_ranks_take_no_more_than_a_count(launch: Launch) -> None:
    """As many bytes for any number of different values; of ranks with the same tokens, one counts."""
    both = torch.randn(3, 2, 20_000, generator=torch.Generator().manual_seed(1))

    def medians(duplicates: int) -> tuple[dict[str, float | None], int]:
        advantage, weight = both[dist.get_rank() // duplicates].unsqueeze(1)
        tokens = {"response_mask": torch.ones_like(weight), "advantage": advantage, "weight": weight}
        micro_batch = MicroBatch({}, [], (torch.zeros(1), None), tokens)
        with Operations() as operations:
            found = token_medians([micro_batch], sequence_parallel_size=duplicates)
        return found, operations.received

    for ranks in (1, 3):
        wanted = both[:ranks].double().abs().transpose(0, 1).flatten(1).quantile(0.5, 1).tolist()
        for found, received in launch(3, medians, 3 // ranks):
            assert [*found.values()] == wanted and 0 < received < 2**17


def test_what_is_sent_to_rank_0_is_not_padded_nor_sent_to_others(launch: Launch) -> None:
    def gather(size: int, broken: int | None) -> tuple[Any, int]:
        rank = dist.get_rank()
        value = lambda: None if rank == broken else random.Random(0).randbytes(size * rank)  # noqa: E731
        with Operations() as operations:
            try:
                found = collectives.gather_on_first(value if rank == broken else value())
            except collectives.RankFailedError as error:
                found = str(error)
        return found and (found if isinstance(found, str) else [len(each) for each in found]), operations.received

    size = 10**6
    (found, received), *others = launch(3, gather, size, None)
    assert found == [0, size, 2 * size] and 3 * size < received < 3.01 * size
    assert [(None, True)] * 2 == [(found, 0 < received < 1000) for found, received in others]
    # An error on one rank is one on all, and no rank waits for it.
    messages = {found for found, _ in launch(3, gather, size, 2)}
    assert len(messages) == 1 and messages.pop().startswith("rank 2: ")


@pytest.mark.every_target
def test_what_cannot_be_sent_to_other_ranks_is_written_as_text(launch: Launch, tmp_path: Path) -> None:
    """And only the largest culprits have long texts, and none of them more than its share of a line."""
    culprits: list[dict[str, Any]] = [{"rank": 0, "row": row, "position": 0} for row in range(20)]

    def write() -> None:
        events = [{"global_step": 1, "mini_batch": 0, "drill": None, "warnings": [], "culprits": culprits}]
        tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
        evidence = UpdateEvidence(str(tmp_path), tokenizer, 1)
        truth = {"ground_truth": lambda: None}  # which cannot be pickled
        sample = {"prompt": [1, 2], "response": [3, 4], "reward": 1.0, "reward_model": truth}

        def sample_of(event: Any, culprit: dict[str, Any]) -> dict[str, Any]:
            return sample | ({"prompt": [1] * 10**6} if culprit["row"] == 3 else {})

        evidence.add(events, SimpleNamespace(sample=sample_of, rows_of=lambda event: None))
        evidence.write(1, {}, lambda rows: None)

    launch(2, write)
    (line,) = (tmp_path / "spikes.jsonl").read_text().splitlines()[:1]
    found = json.loads(line)["culprits"]
    assert all(
        "lambda" in culprit["ground_truth"] and culprit["token"] == "3" for culprit in found if culprit["row"] != 3
    )
    assert [culprit["prompt"] for culprit in found] == ["1 2"] * 3 + [None] + ["1 2"] * 12 + [None] * 4
