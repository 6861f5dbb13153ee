"""What is usual in a mini-batch, and where a mismatch with the rollout begins, with a real actor's batch."""

import statistics
from functools import partial

import actors
import pytest
import reduced_meter_cases
import torch
import torch.distributed as dist
from actor_cases import Run, train
from actors import RESPONSE, Case
from batches import build_batch, response_length
from mini_batches import token_weights
from notation import cases
from test_actor import Launch, same_events
from verl import DataProto

# Rows of the longest responses, with masked tokens between two turns. From the second turn of the first row on, the
# rollout's log-probs are of other tokens; of the second row, from the middle of the first turn on.
TURNS, GAP = ((0, 5), (1, 6)), range(3, 5)


@pytest.mark.slow
@pytest.mark.target(version="0.9.1")
def test_turns_and_where_the_mismatch_begins_are_recorded(launch: Launch) -> None:

    def change(batch: DataProto) -> None:
        tensors = batch.batch
        rollout = tensors["old_log_probs"].clone()
        for number, (rank, row) in enumerate(TURNS):
            assert response_length(rank, row) == RESPONSE
            if rank == dist.get_rank():
                rollout[row, 1 if number else GAP.stop :] -= 3.0
                for name in ("response_mask", "advantages", "old_log_probs"):
                    tensors[name][row, GAP.start : GAP.stop] = 0.0
                rollout[row, GAP.start : GAP.stop] = 0.0  # as verl's agent loops write them
        tensors["rollout_log_probs"] = rollout

    # Half of the rows cannot move, which takes half of the passes.
    still = tuple((rank, row) for rank in range(2) for row in range(4))
    case = Case(rollout=True, nested=actors.ENGINE, still=still)
    every_token = {"grad_norm_threshold": 1e-6, "bisect_until": "exhaustive", "bisect_budget_steps": 2000}
    results = launch(2, partial(train, case, change_batch=change, spike_detection=True, **every_token))
    ((event,),) = same_events(results)
    culprits = {(c["rank"], c["row"], c["position"]): c for c in event["culprits"]}
    assert 0 < results[0].metrics[0]["actor/gradloc/misaligned_share"] < 1
    (retokenized, misaligned), gap = TURNS, GAP
    for row in TURNS:
        positions = {position for *place, position in culprits if tuple(place) == row}
        assert positions == {*range(RESPONSE)} - {*gap}
    for (*place, position), culprit in culprits.items():
        found = tuple(culprit[name] for name in ("turn", "mismatch_start", "mismatch_turn"))
        turn = 1 if position < gap.start else 2
        if tuple(place) == retokenized:
            assert found == (turn, gap.stop, 2)
        elif tuple(place) == misaligned:
            assert found == (turn, 1, None)
        else:
            assert found == (None, None, None)
        is_retokenized = tuple(place) == retokenized and turn == 2
        assert ("retokenized" in culprit["sources"]) == is_retokenized == (culprit["source"] == "retokenized")
    assert "; the mismatch begins with the first token after turn 1" in event["summary"]


@cases(
    "world size case",
    (2, 1, Case(loss_agg_mode="seq-mean-token-mean")),
    (4, 2, Case("fsdp2", packed=True)),
    ids=["data parallel", "sequence parallel"],
)
def test_medians_are_those_of_all_ranks(launch: Launch, world: int, size: int, case: Case) -> None:
    """The search has one pass; groups of `size` ranks share their data."""

    def medians() -> tuple[Run, list[float], list[float]]:
        batch = build_batch(case, dist.get_rank() // size).batch
        meter = "local" if size == 1 else "reduced"
        run = reduced_meter_cases.train(case, size, meter, grad_norm_threshold=1e-6, bisect_budget_steps=1)
        mask, factor = batch["response_mask"], case.micro_batch / case.mini_batch
        weights = [token_weights(case, part, factor, {}) for part in mask.split(case.micro_batch)]
        return run, batch["advantages"].abs()[mask > 0].tolist(), torch.cat(weights)[mask > 0].tolist()

    results = launch(world, medians)
    ((event,),) = same_events([run for run, *_ in results])
    ranks = results[::size]
    for name, values in (("advantage", 1), ("weight", 2)):
        everywhere = [value for rank in ranks for value in rank[values] if value]
        assert event[f"median_{name}"] == pytest.approx(statistics.median(everywhere), rel=1e-6)
    assert event["world_size"] == world // size
    # One rank's median would not do.
    assert len({statistics.median(rank[1]) for rank in ranks}) == len(ranks)
