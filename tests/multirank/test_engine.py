"""The evidence of verl 0.9's FSDP engine; the actor's own tests run against it as well."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import actors
import pytest
import torch
import torch.distributed as dist
from actors import Case, build_actor, local
from batches import Words, build_batch, response_length, with_columns
from reduced_meter_cases import share_sequences, stand_in_for_a_gpu
from test_actor import ONE, THREE, Launch, near
from valid_events import events_in, lines_in
from verl.workers.utils.losses import ppo_loss

from gradloc.adapters.actor_config import TokenClipConfig
from gradloc.adapters.update_evidence import TrainedData


def evidence(case: Case, directory: str, shuffle: bool, size: int = 1) -> tuple[list[Any], list[dict[str, Any]]]:
    """Two updates whose evidence is written, of groups of `size` ranks that share their data and split its computation.

    Returns:
        tuple: For each planted token, its row's name, and its position and id; the metrics of each update.
    """
    options = {"spike_detection": True, "grad_norm_threshold": 1e3, "bisect_dump_dir": directory}
    if size > 1:
        options["ulysses_sequence_parallel_size"] = size
        stand_in_for_a_gpu(case, size)
    actor = build_actor(case, **options)
    if size > 1:
        share_sequences(actor, size)
    own_rank = dist.get_rank() // size
    actor.engine._evidence._tokenizer = Words()
    actor.dataloader = {"shuffle": shuffle}
    metrics, planted = [], []
    for seed in range(2):
        with torch.random.fork_rng():
            batch = build_batch(case, own_rank, seed)
        with_columns(case, batch, own_rank)
        if seed == 0:
            for rank, row, position in case.planted:
                if rank == own_rank:
                    prompt = batch.batch["input_ids"][row, : -batch.batch["responses"].shape[1]]
                    prompt = prompt[batch.batch["attention_mask"][row, : len(prompt)].bool()]
                    planted.append(
                        {
                            "uid": f"{rank}/{row}",
                            "position": position,
                            "token": str(batch.batch["responses"][row, position].item()),
                            "prompt": " ".join(map(str, prompt.tolist())),
                            "response": " ".join(
                                map(str, batch.batch["responses"][row, : response_length(rank, row)].tolist())
                            ),
                            "reward": 100.0 * rank + row,
                            "ground_truth": str(row),
                            "data_source": "sums",
                        }
                    )
        metrics.append(actor.update_policy(batch))
    return planted, metrics


def nested_loss(config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
    """A user's own loss, which computes with the nested tensors that the engine gives, beside those of the data."""
    given = {name: values + 0.0 * data["input_ids"] for name, values in model_output.items()}
    assert all(values.is_nested for values in given.values())
    return ppo_loss(config, given, data, dp_group)


def found_with(loss: Any, case: Case) -> tuple[list[Any], list[Any]]:
    """The culprits of an update with a loss, and the parameters after it."""
    clip = TokenClipConfig(enable=True, action="log")
    actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e3, token_clip=clip)
    actor.worker.loss_fn = partial(loss, config=actor.config)
    with torch.random.fork_rng():
        batch = build_batch(case, dist.get_rank())
    actor.update_policy(batch)
    culprits = [culprit for event in actor.events for culprit in event["culprits"]]
    return culprits, [local(parameter).tolist() for parameter in actor.actor_module.parameters()]


def step_of_two_updates(case: Case, directory: str) -> list[dict[str, Any]]:
    """The metrics of two updates that make up a step; both have the planted tokens, and rewards that cannot be read."""
    actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e3, bisect_dump_dir=directory)
    metrics = []
    for update in range(2):
        with torch.random.fork_rng():
            batch = build_batch(case, dist.get_rank())
        actor.update_of_step = update, 2
        with mock.patch.object(TrainedData, "rows_of", side_effect=ZeroDivisionError):
            metrics.append(actor.update_policy(batch))
    return metrics


pytestmark = [
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(not actors.ENGINE, reason="this verl trains with its legacy actor"),
]


def check_written(
    folder: Path, results: list[tuple[list[Any], list[dict[str, Any]]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and steps in the files, after checking that the events describe the planted tokens, each once."""
    planted = {tuple(sorted(row.items())) for rows, _ in results for row in rows}
    assert len(planted) == len(THREE)
    events = events_in(folder)
    names = ("uid", "position", "token", "prompt", "response", "reward", "ground_truth", "data_source")
    culprits = [culprit for event in events for culprit in event["culprits"]]
    assert sorted(tuple(sorted((name, culprit[name]) for name in names)) for culprit in culprits) == sorted(planted)
    assert {event["global_step"] for event in events} == {7}
    steps = lines_in(folder, "steps.jsonl")
    assert [(step["global_step"], step["triggered"]) for step in steps] == [(7, len(events)), (8, 0)]
    return events, steps


@pytest.mark.parametrize("shuffle", [False, True], ids=["in_order", "shuffled"])
def test_each_rank_describes_its_culprits(launch: Launch, tmp_path: Path, shuffle: bool) -> None:
    case = Case(mini_batch=4, nested=not shuffle, planted=THREE)
    results = launch(2, evidence, case, str(tmp_path), shuffle)
    events, _ = check_written(tmp_path, results)
    for _, (first, second) in results:
        assert first["actor/gradloc/triggered"] == len(events) and second["actor/gradloc/triggered"] == 0
        assert first["actor/gradloc/culprits"] == len(THREE)


def test_the_updates_of_a_step_are_counted_together(launch: Launch, tmp_path: Path) -> None:
    """As verl's asynchronous trainer with separate rollouts makes them, which takes a GPU to run."""
    results = launch(2, step_of_two_updates, Case(mini_batch=4, planted=ONE), str(tmp_path))
    (step,) = lines_in(tmp_path, "steps.jsonl")
    events = events_in(tmp_path)
    assert [event["mini_batch"] for event in events] == [0, 2]
    assert all(event["verdict"] for event in events)
    assert (step["global_step"], step["triggered"]) == (7, 2)
    for first, second in results:
        assert not [name for name in first if "gradloc" in name]
        assert second["actor/gradloc/triggered"] == 2 and second["actor/gradloc/culprits"] == 2


@pytest.mark.parametrize("packed", [False, True])
def test_a_loss_is_given_what_the_engine_gives(launch: Launch, packed: bool) -> None:
    """Nested tensors, which verl's own loss takes apart."""
    case = Case(packed=packed, entropy=True, nested=True, planted=THREE)
    own, verls = (launch(2, found_with, loss, case) for loss in (nested_loss, ppo_loss))
    assert own == verls and len(own[0][0]) == len(THREE)


def test_ranks_that_share_their_data_are_counted_once(launch: Launch, tmp_path: Path) -> None:
    """Two pairs of ranks (Ulysses) write what two ranks with the same data write."""
    case = Case(mini_batch=4, packed=True, rollout=True, nested=True, planted=THREE)
    written = {}
    for world, size in ((2, 1), (4, 2)):
        folder = tmp_path / str(size)
        results = launch(world, evidence, case, str(folder), True, size)
        assert [metrics == [{}, {}] for _, metrics in results] == [rank % size > 0 for rank in range(world)]
        written[size] = check_written(folder, results)
    (alone, steps), (shared, steps_of_shared) = written[1], written[2]
    # Which tokens a search names is its meter's affair, what it says of them is not.
    names = ("rank", "micro_batch", "row", "position", "advantage", "sources")
    for event, other in zip(alone, shared, strict=True):
        assert other["world_size"] == event["world_size"]
        assert other["median_weight"] == near(event["median_weight"])
        ours, theirs = (sorted([c[name] for name in names] for c in of["culprits"]) for of in (other, event))
        assert ours == theirs
    for step, other in zip(steps, steps_of_shared, strict=True):
        for name in ("ratio_max", "rollout_ratio_max", "unlikely_share"):
            assert other[name] == near(step[name]), name
