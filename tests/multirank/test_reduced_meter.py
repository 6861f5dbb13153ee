"""The search by the reduced gradient alone, as sequence parallelism needs it."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import reduced_meter_cases
import torch.distributed as dist
from actor_cases import Run, break_embedding, compare_runs, threshold_between
from actors import IDENTITY_THRESHOLD, PROMPT, Case, build_model
from batches import build_batch
from notation import Capsys
from oracle import Unit, brute_force
from test_actor import (
    ON_ENGINE,
    ONE,
    THREE,
    Launch,
    check_culprits,
    check_unit,
    near,
    on_ranks,
    same_events,
    tokens_over,
)

from gradloc.replay.command import main as replay

over_a_threshold = partial(reduced_meter_cases.train, grad_norm_threshold=IDENTITY_THRESHOLD)

# Each row has the number of ranks, how many share their data, and the case.
shared = partial(on_ranks, names="world size case")


@shared(
    (2, 1, Case("fsdp2", planted=THREE)),
    (2, 1, Case("fsdp1", dynamic=True, kl=True, entropy=True, loss_agg_mode="seq-mean-token-mean", planted=ONE)),
    (1, 1, Case("none", planted=((0, 5, 9),))),
    # The actor itself chooses this meter.
    (2, 1, Case("fsdp2", model="tiled", planted=THREE)),
    (2, 2, Case("fsdp2", packed=True, entropy=True, planted=((0, 0, 4), (0, 6, 1)))),
    (4, 2, Case("fsdp1", packed=True, planted=THREE), ON_ENGINE),
)
def test_planted_tokens_are_found(launch: Launch, world: int, size: int, case: Case) -> None:
    def search() -> tuple[list[Unit], list[float], float, Run, dict[str, bool]]:
        units, norms = brute_force(case, build_batch(case, dist.get_rank() // size), tokens=True)
        # Each group of ranks counts once.
        units = [replace(unit, rank=unit.rank // size) for unit in units if unit.rank % size == 0]
        threshold = threshold_between(case, units)
        run = reduced_meter_cases.train(case, size, grad_norm_threshold=threshold)
        off = reduced_meter_cases.train(case, size, detect=False)
        return units, norms, threshold, run, compare_runs(run, off)

    results = launch(world, search)
    units, (norm,), threshold, *_ = results[0]
    ((event,),) = same_events([run for *_, run, _ in results])
    assert event["complete"] and event["search"] == "reduced" and event["world_size"] == world // size
    assert event["trigger"]["kind"] == "global" and event["global_norm"] == near(norm)
    assert len(check_culprits(event, units, threshold, case)) == len(case.planted)
    found = {(unit["rank"], unit["micro_batch"]): unit for unit in event["units"]}
    with_culprits = {(unit.rank, unit.micro_batch): unit for unit, _ in tokens_over(units, threshold).values()}
    assert set(found) == set(with_culprits)
    for key, unit in with_culprits.items():
        check_unit(found[key], unit, threshold, case.tolerance)
    for *_, same in results:
        assert all(same.values()), same


def test_a_spike_of_shared_sequences_replays_in_one_process(launch: Launch, tmp_path: Path, capsys: Capsys) -> None:
    """Rank 0 writes what the first of the two ranks that share the culprit's row has sent."""
    case = Case("fsdp2", packed=True, planted=((1, 3, 6),))

    def spiked() -> Run:
        if dist.get_rank() == 0:
            build_model(case).save_pretrained(tmp_path / "model")
        run = over_a_threshold(case, 2, bisect_dump_dir=str(tmp_path / "dump"), spike_replay=1)
        dist.barrier()
        return run

    ((event,),) = same_events(launch(4, spiked))
    (culprit,) = event["culprits"]
    assert replay([str(tmp_path / "dump" / event["replay"]), "--model", str(tmp_path / "model"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (token,) = [token for token in result["tokens"] if token["culprit"]]
    assert (token["rank"], token["row"], token["position"]) == (1, 3, 6)
    assert token["replayed"] == pytest.approx(culprit["grad_norm"], rel=1e-4)


def test_a_nan_row_of_an_idle_rank_changes_no_norm(launch: Launch) -> None:
    """What is measured together is averaged: zero times NaN would reach the other rank's tokens."""
    case = Case("fsdp2", planted=((0, 4, 2),))
    found = {}
    prepare = partial(break_embedding, case, 1, 0, PROMPT - 1)
    for meter in ("local", "reduced"):
        ((event,),) = same_events(launch(2, partial(over_a_threshold, case, 1, meter, prepare=prepare)))
        assert event["complete"]
        found[meter] = {(c["rank"], c["row"], c["position"]): c for c in event["culprits"]}
    assert set(found["reduced"]) == set(found["local"]) == {(0, 4, 2), (1, 0, 0)}
    assert found["reduced"][1, 0, 0]["source"] == "nonfinite"
    expected = found["local"][0, 4, 2]["grad_norm"]
    assert math.isfinite(expected) and found["reduced"][0, 4, 2]["grad_norm"] == near(expected)


# A token of each row of rank 1.
BROKEN = tuple((1, row, 0) for row in range(Case().rows))


def test_a_rank_whose_rows_are_all_broken_ends_the_search_on_all(launch: Launch) -> None:
    case = Case(packed=True, planted=((0, 0, 4),), nan=BROKEN)
    ((event,),) = same_events(launch(2, over_a_threshold, case, 1))
    assert event["error"].startswith("rank 1: ValueError: each of its rows") and not event["complete"]
    assert {(c["rank"], c["row"], c["position"]) for c in event["culprits"]} == {*BROKEN}


@shared(
    (2, 1, Case("fsdp2", planted=THREE)),
    (4, 2, Case("fsdp1", packed=True, nan=((1, 3, 2),)), ON_ENGINE),
)
def test_drop_leaves_what_the_local_meter_leaves(launch: Launch, world: int, size: int, case: Case) -> None:
    for distance, run in launch(world, reduced_meter_cases.drop, case, size):
        ((event,),) = same_events([run])
        assert event["applied"] and len(event["culprits"]) == len(case.planted) + len(case.nan)
        assert distance < 1e-5
