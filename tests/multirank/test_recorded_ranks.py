"""Spikes of the FSDP engine that are only recorded: what is written is what the search in training saw."""

from pathlib import Path
from typing import Any

import actors
import pytest
import torch
import torch.distributed as dist
from actor_cases import Operations, compare_runs, stock_run, train
from actors import IDENTITY_THRESHOLD, Case, dp_actor, stock_dp_actor
from test_actor import THREE, Launch, on_ranks
from valid_events import events_in

from gradloc.tools.opening import Bundle, open_bundle


def recorded_and_searched(case: Case, directory: str, **options: Any) -> tuple[dict[str, bool], list[dict[str, Any]]]:
    """A run whose spikes are only recorded, against the unpatched actor, after the same run with the search."""
    detection = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "spike_replay": 4, **options}
    searched = train(case, bisect_dump_dir=f"{directory}/searched", **detection)
    dist.barrier()
    recorded = train(case, bisect_dump_dir=f"{directory}/recorded", spike_search="replay", **detection)
    dist.barrier()
    return compare_runs(recorded, stock_run(case)), searched.metrics, recorded.metrics


pytestmark = [
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(not actors.ENGINE, reason="this verl trains with its legacy actor"),
]

SMALL = Case(mini_batch=4, planted=THREE)


def parts_of(event: dict[str, Any], folder: Path, world: int) -> list[Bundle]:
    stem = (folder / event["replay"]).name.removesuffix("-rank0")
    return [open_bundle(folder / "replay" / f"{stem}-rank{rank}") for rank in range(world)]


@on_ranks(
    (2, Case(nested=True, optimizer="adamw", mini_batch=4, kl=True, entropy=True, rollout=True, planted=THREE)),
    (2, Case(dynamic=True, deferred=True, loss_agg_mode="seq-mean-token-mean", planted=THREE)),
    (2, Case("fsdp1", precision="float16", loss_scale=64.0, planted=THREE)),
)
def test_what_is_recorded_is_what_the_search_saw(launch: Launch, tmp_path: Path, world: int, case: Case) -> None:
    results = launch(world, recorded_and_searched, case, str(tmp_path))
    for same, searched, recorded in results:
        assert all(same.values()), same
        for ours, theirs in zip(recorded, searched, strict=True):
            assert ours["actor/gradloc/triggered"] == theirs["actor/gradloc/triggered"]
    searched, recorded = events_in(tmp_path / "searched"), events_in(tmp_path / "recorded")
    assert [event["mini_batch"] for event in recorded] == [event["mini_batch"] for event in searched]
    for event, other in zip(recorded, searched, strict=True):
        parts = parts_of(event, tmp_path / "recorded", world)
        whole = open_bundle(tmp_path / "searched" / other["replay"])
        assert event["global_norm"] == pytest.approx(other["global_norm"], rel=1e-4)
        assert (event["action"], event["world_size"], event["loss_scale"]) == ("log", world, case.loss_scale)
        likeliest = event["suspected"][0]
        assert likeliest["rank"] == 0 and event["suspected_ranks"] == [0]
        assert "the largest suspicion on rank 0 (the other one was not looked at) is that of" in event["summary"]
        assert whole.micro_batches
        for name, saved in whole.micro_batches.items():
            ours = parts[name[0]].micro_batches[name]
            assert parts[name[0]].rows[name] == whole.rows[name]
            assert set(ours.tokens) == set(saved.tokens)
            for column, values in saved.tokens.items():
                assert torch.equal(ours.tokens[column].nan_to_num(), values.nan_to_num()), column
            for row, theirs in zip(ours.rows, saved.rows, strict=True):
                assert torch.equal(row.input_ids, theirs.input_ids)
                assert torch.equal(row.position_ids, theirs.position_ids)
                assert (row.response_length, row.temperature) == (theirs.response_length, theirs.temperature)
        for key in ("model", "dtype", "grad_clip"):
            assert parts[0].manifest[key] == whole.manifest[key], key


def test_no_collective_call_is_made(launch: Launch, tmp_path: Path) -> None:
    def collective_calls() -> dict[str, list[str]]:
        found = {}
        recording = {"spike_detection": True, "spike_search": "replay", "grad_norm_threshold": IDENTITY_THRESHOLD}
        for name, module, options in (("recorded", dp_actor, recording), ("stock", stock_dp_actor(), {})):
            with Operations() as operations:
                train(SMALL, module, bisect_dump_dir=str(tmp_path / name), **options)
            found[name] = operations.collectives
        return found

    for calls in launch(2, collective_calls):
        assert calls["recorded"] == calls["stock"] and calls["stock"]
    assert len(events_in(tmp_path / "recorded")) == 2
