"""The checks of a run in the patched actor: all ranks agree, and an event's verdict is the warning's."""

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from actor_cases import train
from actors import Case, events_of
from notation import cases
from test_actor import Launch, on_engine, on_ranks
from verl import DataProto


def warned(
    case: Case, stale_ranks: tuple[int, ...], calls: int, late: int = 0, written: str = "", multiplied: str = ""
) -> tuple[list[Any], dict[str, Any], list[Any], dict[str, float]]:
    """What is said after the last update of several.

    The policy moves away from the reference with each update, as training does: in the first one they are the same.

    Args:
        case (Case): What is trained.
        stale_ranks (tuple): Whose rollout has the reference's weights.
        calls (int): The number of updates.
        late (int): By how many positions the rollout's lists are late: a token in front has a log-prob, too.
        written (str): A layer whose weights on the last rank are tripled before the last update.
        multiplied (str): A layer whose gradient is multiplied by 100 after the backward passes of the last update.

    Returns:
        tuple: The warnings, the state for a checkpoint, the verdicts of the last update's events, and its metrics.
    """
    actors: list[Any] = []
    updates = itertools.count()

    def change(batch: DataProto) -> None:
        columns, update = batch.batch, next(updates)
        if written and (update, dist.get_rank()) == (calls - 1, dist.get_world_size() - 1):
            for name, parameter in actors[0].actor_module.named_parameters():
                if f"{written}." in name:
                    parameter.detach().mul_(3)
        if multiplied and update == calls - 1:
            actors[0].gradloc.locate = partial(multiply_and, actors[0].gradloc.locate, actors[0].actor_module)
        generator = torch.Generator().manual_seed(dist.get_rank())
        old = columns["old_log_probs"]
        columns["ref_log_prob"] = old - 0.5 * update * torch.rand(old.shape, generator=generator)
        source = columns["ref_log_prob"] if dist.get_rank() in stale_ranks else old
        columns["rollout_log_probs"] = source.roll(late, 1) + 0.01 * torch.randn(old.shape, generator=generator)

    def multiply_and(locate: Callable[..., Any], module: torch.nn.Module, *arguments: Any) -> Any:
        for name, parameter in module.named_parameters():
            if f"{multiplied}." in name and parameter.grad is not None:
                parameter.grad.mul_(100)
        return locate(*arguments)

    detection = {"spike_detection": True, "grad_norm_threshold": 1e-6, "bisect_budget_steps": 2}
    train(case, calls=calls, prepare=actors.append, change_batch=change, **detection)
    gradloc = actors[0].gradloc
    verdicts = [event["verdict"] for event in events_of(actors[0])]
    return gradloc.warnings, gradloc.state_dict()["run_checks"], verdicts, gradloc.metrics()


ORDINARY = Case("fsdp2", mini_batch=4, kl=True, rollout=True)
DYNAMIC = Case("fsdp1", mini_batch=4, epochs=2, kl=True, rollout=True, dynamic=True)


def test_all_ranks_warn_alike(launch: Launch) -> None:
    results = launch(2, warned, ORDINARY, (1,), 6)
    assert results == results[:1] * 2
    (warning,), state, verdicts, _ = results[0]
    assert len(state["readings"]) == state["updates"] == 6 and state["rates"] > 0
    said = r"For [456]\d% of the responses, as from one of several workers .*, the rollout still samples"
    assert warning["name"] == "partly_stale" and re.match(said, warning["sentence"])
    for verdict in verdicts:
        assert (verdict["cause"], verdict["check"]) == ("partly_stale", warning["check"])
        assert re.match(said, verdict["sentence"])
    assert verdicts


def test_one_update_does_not_warn(launch: Launch) -> None:
    for warnings, state, *_ in launch(2, warned, ORDINARY, (0, 1), 2):
        assert warnings == [] and state["times"] == {"off": 0, "stale_reference": 1}


@on_ranks(on_engine(2, ORDINARY), (2, DYNAMIC))
def test_log_probs_of_other_positions_are_told_at_once(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, warned, case, (), 1, 1)
    assert results == results[:1] * world
    (warning,), _, verdicts, metrics = results[0]
    said = "The rollout's log-probs are one position late in all responses (r[t] fits p[t-1])"
    assert warning["name"] == "misaligned" and warning["sentence"].startswith(said)
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {"misaligned"}
    assert metrics["actor/gradloc/misplaced_share"] == warning["share"] == 1


@pytest.mark.target(version="0.9.1")
@cases(
    "calls change said",
    (3, "written", r"The weights of layers\.1 changed .*: their norm is [12]\.\d+ times what"),
    (
        2,
        "multiplied",
        r"The optimizer's gradient in the layer layers\.1 is at least \d\d(\.\d)? times what the backward passes",
    ),
)
def test_a_layer_that_something_else_changes_is_named(launch: Launch, calls: int, change: str, said: str) -> None:
    """Its weights on one rank, or its gradient after the backward passes."""
    results = launch(2, partial(warned, ORDINARY, (), calls, **{change: "layers.1"}))
    assert results == results[:1] * 2
    warnings, _, verdicts, _ = results[0]
    assert warnings[0]["name"] == "layer" and re.match(said, warnings[0]["sentence"])
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {"layer"}
