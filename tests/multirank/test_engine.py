"""What only verl 0.9's FSDP engine has; the actor's own tests run against it as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import actors
import pytest
from actors import Case
from test_actor import ONE, THREE, Launch, cases, check_bit_identity, check_planted_tokens, near
from valid_events import valid_events

pytestmark = [
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(not actors.ENGINE, reason="this verl trains with its legacy actor"),
]

if actors.ENGINE:
    import engine_cases


@cases(
    (2, Case("fsdp1", deferred=True, mini_batch=4, planted=THREE)),
    (2, Case(deferred=True, dynamic=True, planted=THREE)),
    (2, Case(nested=True, mini_batch=4, rollout=True, kl=True, planted=THREE)),
    # One of the micro-batches has no response, and so no column.
    (2, Case("fsdp1-orig", deferred=True, nested=True, micro_batch=1, kl=True, entropy=True, planted=THREE)),
)
def test_planted_tokens_are_found(launch: Launch, world: int, case: Case) -> None:
    check_planted_tokens(launch, world, case)


@cases(
    (2, Case(deferred=True, dropout=0.2, optimizer="adamw", planted=THREE)),
    (2, Case("fsdp1", deferred=True, nested=True, micro_batch=1, kl=True, entropy=True, planted=THREE)),
)
def test_training_is_bit_identical(launch: Launch, world: int, case: Case) -> None:
    check_bit_identity(launch, world, case)


def check_written(
    folder: Path, results: list[tuple[list[Any], list[dict[str, Any]]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and steps in the files, after checking that the events describe the planted tokens, each once."""
    planted = {tuple(sorted(row.items())) for rows, _ in results for row in rows}
    assert len(planted) == len(THREE)
    events = valid_events(f"[{','.join((folder / 'spikes.jsonl').read_text().splitlines())}]")
    names = ("uid", "position", "token", "prompt", "response", "reward", "ground_truth", "data_source")
    culprits = [culprit for event in events for culprit in event["culprits"]]
    assert sorted(tuple(sorted((name, culprit[name]) for name in names)) for culprit in culprits) == sorted(planted)
    assert {event["global_step"] for event in events} == {7}
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [(step["global_step"], step["triggered"]) for step in steps] == [(7, len(events)), (8, 0)]
    return events, steps


@pytest.mark.parametrize("shuffle", [False, True], ids=["in_order", "shuffled"])
def test_each_rank_describes_its_culprits(launch: Launch, tmp_path: Path, shuffle: bool) -> None:
    case = Case(mini_batch=4, nested=not shuffle, planted=THREE)
    results = launch(2, engine_cases.evidence, case, str(tmp_path), shuffle, 2)
    events, _ = check_written(tmp_path, results)
    for _, (first, second) in results:
        assert first["actor/gradloc/triggered"] == len(events) and second["actor/gradloc/triggered"] == 0
        assert first["actor/gradloc/culprits"] == len(THREE)


def test_the_updates_of_a_step_are_counted_together(launch: Launch, tmp_path: Path) -> None:
    """As verl's asynchronous trainer with separate rollouts makes them, which takes a GPU to run."""
    results = launch(2, engine_cases.step_of_two_updates, Case(mini_batch=4, planted=ONE), str(tmp_path))
    (step,) = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    events = valid_events(f"[{','.join((tmp_path / 'spikes.jsonl').read_text().splitlines())}]")
    assert [event["mini_batch"] for event in events] == [0, 2]
    assert (step["global_step"], step["triggered"]) == (7, 2)
    for first, second in results:
        assert not [name for name in first if "gradloc" in name]
        assert second["actor/gradloc/triggered"] == 2 and second["actor/gradloc/culprits"] == 2


def test_ranks_that_share_their_data_are_counted_once(launch: Launch, tmp_path: Path) -> None:
    """Two pairs of ranks (Ulysses) write what two ranks with the same data write."""
    case = Case(mini_batch=4, packed=True, rollout=True, nested=True, planted=THREE)
    written = {}
    for world, size in ((2, 1), (4, 2)):
        folder = tmp_path / str(size)
        results = launch(world, engine_cases.evidence, case, str(folder), True, 2, size)
        assert [metrics == [{}, {}] for _, metrics in results] == [rank % size > 0 for rank in range(world)]
        written[size] = check_written(folder, results)
    (alone, steps), (shared, steps_of_shared) = written[1], written[2]
    # Which tokens a search names is its meter's affair, what it says of them is not.
    names = ("rank", "micro_batch", "row", "position", "advantage", "sources")
    for event, other in zip(alone, shared, strict=True):
        for name in ("epoch", "mini_batch", "world_size", "micro_batches", "median_advantage"):
            assert other[name] == event[name], name
        assert other["median_weight"] == near(event["median_weight"])
        assert sorted([c[name] for name in names] for c in other["culprits"]) == sorted(
            [c[name] for name in names] for c in event["culprits"]
        )
        tokens = {(unit["rank"], unit["micro_batch"]): unit["tokens"] for unit in event["units"]}
        assert {
            (unit["rank"], unit["micro_batch"]): unit["tokens"] for unit in other["units"]
        }.items() <= tokens.items()
    for step, other in zip(steps, steps_of_shared, strict=True):
        for name in ("ratio_max", "rollout_ratio_max", "unlikely_share"):
            assert other[name] == near(step[name]), name


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_resumes_with_what_was_learned(launch: Launch, tmp_path: Path, shared: bool) -> None:
    for state, norms, later, files, error in launch(2, engine_cases.resumed, str(tmp_path), shared):
        assert set(state) == {"gradloc", "layer_clip"} and "gradloc_state.pt" in files
        assert len(norms["norms"]) == 1
        assert later["loaded"] == [*norms["norms"], *later["loaded"][1:]] and len(later["loaded"]) == 2
        assert len(later["fresh"]) == 1
        assert error.startswith(f"RankFailedError: rank 0: ValueError: {tmp_path}/checkpoint/gradloc_state.pt cannot")
