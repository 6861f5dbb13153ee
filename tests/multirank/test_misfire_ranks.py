"""The rewards of a mini-batch, as the trainers of both verls give them, against a verdict's claim."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actors import ENGINE, Case, build_actor
from batches import Words, build_batch, with_columns
from test_actor import Launch
from valid_events import events_in

# In responses of four prompts of each mini-batch, on both ranks.
PLANTED = ((0, 2, 0), (0, 6, 0), (1, 0, 0), (1, 5, 0), (0, 14, 0), (0, 20, 0), (1, 13, 0), (1, 17, 0))
ANSWERS = 2


def written(case: Case, directory: str, with_uids: bool = True, broken: Sequence[tuple[int, int]] = ()) -> None:
    """Writes the evidence of an update. The planted tokens' responses have the reward -3, the others 0 and 1.

    Args:
        broken (Sequence, optional): (rank, row) whose reward is NaN, and with it the advantages of their groups.
    """
    rank = dist.get_rank()
    actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e3, bisect_dump_dir=directory)
    batch = build_batch(case, rank)
    with_columns(case, batch, rank)
    rows = range(len(batch))
    del batch.non_tensor_batch["uid"]
    if with_uids:
        batch.non_tensor_batch["uid"] = np.array([f"{rank}/{row // ANSWERS}" for row in rows], dtype=object)
    scores = batch.batch["rm_scores" if case.nested else "token_level_scores"].zero_()
    scores[:, 0] = torch.tensor([-3.0 if (rank, row, 0) in PLANTED else float(row % 2) for row in rows])
    batch.batch["advantages"][:, 1:] *= 0.5  # a row's largest one counts
    for of_rank, row in broken:
        if of_rank == rank:
            scores[row, 0] = math.nan
            batch.batch["advantages"][row // ANSWERS * ANSWERS :][:ANSWERS] = math.nan
    metrics = actor.update_policy(batch)
    if not ENGINE:  # what its worker calls
        from verl.utils.gradloc.adapters.dp_actor import write_evidence

        write_evidence(actor, batch, Words(), metrics)


def written_despite_an_error(case: Case, directory: str) -> None:
    data = "verl.utils.gradloc.adapters.update_evidence.TrainedData"
    with mock.patch(f"{data}.rewarded_rows", side_effect=ZeroDivisionError):
        written(case, directory)


def events(launch: Launch, folder: Path, write: Callable[[Case, str], None] = written) -> list[dict[str, Any]]:
    case = Case(rows=24, mini_batch=12, nested=ENGINE, planted=PLANTED)
    launch(2, write, case, str(folder))
    return events_in(folder)


@pytest.mark.every_target
def test_the_reward_of_the_culprits_responses_is_named(launch: Launch, tmp_path: Path) -> None:
    found = events(launch, tmp_path)
    assert [event["mini_batch"] for event in found] == [0, 1]
    for event in found:
        assert len(event["culprits"]) == 4 and {culprit["reward"] for culprit in event["culprits"]} == {-3.0}
        verdict = event["verdict"]
        # Row 1 of rank 0 has no response, and so no advantage.
        rows = 23 if event["mini_batch"] == 0 else 24
        assert (verdict["cause"], verdict["culprits"], verdict["ordinary"]) == ("misfire", 1.0, 4 / rows)
        assert "in responses with the reward -3 (all 4 culprits in 4 prompts, " in verdict["sentence"]


def test_the_row_whose_reward_is_not_finite_is_named(launch: Launch, tmp_path: Path) -> None:
    event = events(launch, tmp_path, partial(written, broken=[(1, 15)]))[1]
    verdict = event["verdict"]
    assert verdict["cause"] == "nonfinite" and "`advantages` is NaN or infinite in" in verdict["sentence"]
    # Rows 14 and 15 of rank 1 are rows 2 and 3 of its second mini-batch, and one group.
    assert " Advantages: both responses to one prompt, first row 2 on rank 1." in verdict["sentence"]
    assert verdict["sentence"].endswith("The reward of row 3 on rank 1 is NaN or infinite.")


@pytest.mark.parametrize("write", [partial(written, with_uids=False), written_despite_an_error], ids=["uids", "error"])
def test_without_rewards_to_compare_the_verdict_stays(
    launch: Launch, tmp_path: Path, write: Callable[..., None]
) -> None:
    for event in events(launch, tmp_path, write):
        assert event["verdict"]["cause"] == "advantage"
