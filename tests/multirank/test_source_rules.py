"""Where a mismatch with the rollout begins, with a real actor's batch."""

from functools import partial

import pytest
import torch.distributed as dist
from actor_cases import train
from actors import ENGINE, RESPONSE, Case
from batches import response_length
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
    case = Case(rollout=True, nested=ENGINE, still=still)
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
