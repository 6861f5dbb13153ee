"""The search against brute force, and training that is bit-identical to unpatched verl: float32, one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import actor_cases
import actors
import pytest
import test_actions
import test_actor
import test_drill
from actors import Case
from test_actor import Launch

ONE = ((0, 3, 5),)
THREE = ((0, 0, 4), (0, 3, 0), (0, 5, 9))
WRAPS = ["fsdp2", "fsdp1", "fsdp1-orig"]


def cases(*chosen: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.id)


CHECKPOINTED = Case(checkpointing=True, mini_batch=4, kl=True, entropy=True, planted=ONE)


@cases(
    *[Case(wrap, planted=THREE) for wrap in WRAPS],
    *[dataclasses.replace(CHECKPOINTED, wrap=wrap) for wrap in WRAPS],
    Case(dynamic=True, mini_batch=4, rollout=True, planted=THREE),
    Case(packed=True, entropy=True, dynamic=True, planted=THREE),
    Case("fsdp1", model="lora", planted=ONE),
    Case(model="lora", planted=ONE),
    Case(model="frozen", planted=ONE),
    Case(model="moe", micro_batch=8, planted=ONE),
    Case(activation_offload=True, checkpointing=True, planted=ONE),
    Case(offload_policy=True, checkpointing=True, planted=THREE),
)
def test_planted_tokens_are_found(launch: Launch, case: Case) -> None:
    test_actor.check_planted_tokens(launch, 1, case)


def unpatched_twice(case: Case) -> dict[str, bool]:
    runs = [actor_cases.train(case, actors.stock_dp_actor(), calls=2) for _ in range(2)]
    return actor_cases.compare_runs(*runs)


@pytest.mark.parametrize("wrap", WRAPS)
def test_two_runs_of_the_unpatched_actor_are_bit_identical(launch: Launch, wrap: str) -> None:
    """Or the next test could not be passed."""
    case = Case(wrap, dropout=0.2, optimizer="adamw", planted=THREE)
    (same,) = launch(1, unpatched_twice, case)
    assert all(same.values()), same


@cases(
    *[Case(wrap, dropout=0.2, optimizer="adamw", planted=THREE) for wrap in WRAPS],
    Case(checkpointing=True, dropout=0.2, optimizer="adamw", mini_batch=4, planted=ONE),
    Case(activation_offload=True, checkpointing=True, optimizer="adamw", planted=ONE),
)
def test_training_is_bit_identical_after_a_search(launch: Launch, case: Case) -> None:
    test_actor.check_bit_identity(launch, 1, case)


@cases(*[Case(wrap, planted=ONE, nan=((0, 2, 7),)) for wrap in WRAPS])
def test_tokens_with_a_nan_gradient_are_culprits(launch: Launch, case: Case) -> None:
    test_actor.test_tokens_with_a_nan_gradient_are_culprits(launch, 1, case)


@cases(*[Case(wrap, planted=ONE) for wrap in WRAPS])
def test_drop_takes_the_culprits_out(launch: Launch, case: Case) -> None:
    test_actions.test_drop_takes_the_culprits_out(launch, 1, case)


@cases(*[Case(wrap, planted=ONE) for wrap in WRAPS])
def test_skip_leaves_the_step_out(launch: Launch, case: Case) -> None:
    test_actions.test_skip_leaves_the_step_out(launch, 1, case)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(checkpointing=True, dropout=0.2, optimizer="adamw", mini_batch=4), {}),
        (Case("fsdp1", dynamic=True, mini_batch=4, kl=True), {}),
        (Case(planted=THREE), {"spike_action": "drop", "clip_layers": True}),
    ],
    ids=lambda value: getattr(value, "id", None) or str(value),
)
def test_a_drill_finds_its_token(launch: Launch, case: Case, options: dict[str, Any]) -> None:
    test_drill.test_a_drill_finds_its_token_and_leaves_training_bit_identical(launch, 1, case, options)
