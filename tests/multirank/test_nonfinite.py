"""Gradients that are not numbers: traced to the token that they come from, or to none where there is none."""

from typing import Any

import action_cases
import pytest
from action_cases import POISONS
from actors import VOCABULARY, Case
from test_actor import Launch, harmless, on_ranks, same_events

PLACE = (1, 3, 4)


def places(event: dict[str, Any]) -> list[tuple[int, int, int]]:
    return sorted((culprit["rank"], culprit["row"], culprit["position"]) for culprit in event["culprits"])


@pytest.mark.parametrize("poison", POISONS)
def test_a_token_with_a_non_finite_input_is_the_culprit(launch: Launch, poison: str) -> None:
    case = Case(mini_batch=4, kl=True, rollout_weights=True)
    results = launch(2, action_cases.poisoned, case, poison, [PLACE])
    ((event,),) = harmless(results)
    assert places(event) == [PLACE] and event["culprits"][0]["source"] == "nonfinite"
    assert event["diagnosis"] == "tokens" and event["complete"]
    (unit,) = event["units"]
    assert unit["broken_tokens"] == 1


def test_a_nan_in_the_padding_is_found(launch: Launch) -> None:
    """The masks multiply it by zero, which NaN survives. Row 1 of rank 0 has no token at all."""
    poisoned = [(0, 1, 3), (1, 3, 9)]
    case = Case(loss_agg_mode="seq-mean-token-mean")
    results = launch(2, action_cases.poisoned, case, "advantage is NaN", poisoned)
    ((event,),) = harmless(results)
    assert places(event) == poisoned and event["diagnosis"] == "tokens" and event["complete"]


def test_no_token_is_blamed_where_every_one_is_nan(launch: Launch) -> None:
    case = Case("fsdp1")
    everywhere = [(rank, row, position) for rank in (0, 1) for row in range(8) for position in range(10)]
    results = launch(2, action_cases.poisoned, case, "advantage is NaN", everywhere)
    ((event,),) = same_events([run for _, run in results])
    assert (event["diagnosis"], event["passes"], event["culprits"]) == ("nonfinite", 0, [])
    assert event["complete"] and len(event["units"]) == 8


def test_a_rank_without_response_tokens_does_not_stop_the_search(launch: Launch) -> None:
    case = Case(planted=((0, 0, 4),))
    results = launch(2, action_cases.empty_mask, case)
    ((event,),) = same_events([run for _, run in results])
    assert places(event) == [(0, 0, 4)] and event["complete"]
    for same, _ in results:
        # Where the mean is taken over no token, its loss is NaN and not equal to itself; its gradient is zero.
        assert all(value for name, value in same.items() if name != "metrics"), same


# The index is that of a row's first element: its token's.
TOKEN = 11
WEIGHTS = [
    ("inf", "model.layers.1.self_attn.q_proj.weight", 7),
    ("nan", "lm_head.weight", 3),
]


@pytest.mark.parametrize(("value", "name", "index"), WEIGHTS)
def test_no_token_is_blamed_for_a_non_finite_weight(launch: Launch, value: str, name: str, index: int) -> None:
    runs = launch(2, action_cases.broken_weight, Case("fsdp1"), float(value), name, index)
    ((event,),) = same_events(runs)
    assert (event["diagnosis"], event["passes"], event["culprits"]) == ("nonfinite", 0, [])
    assert event["complete"] and len(event["units"]) == 8
    broken = event["broken_parameters"]
    assert 0 < broken["count"] <= broken["of"]


def test_a_nan_in_an_embedding_is_traced_to_its_token(launch: Launch) -> None:
    runs = launch(2, action_cases.broken_weight, Case(), float("nan"), "model.embed_tokens.weight", TOKEN * 32)
    ((event,),) = same_events(runs)
    assert event["culprits"] and event["complete"] and TOKEN < VOCABULARY
    # A prompt may have the token, too: then the row is broken from its first response token on.
    found = {culprit["token_id"] for culprit in event["culprits"] if culprit["position"] > 0}
    assert found == {TOKEN}


# The last: where no token of its micro-batch can move.
@on_ranks((2, Case("fsdp1")), (2, Case(still=((1, 2), (1, 3)))))
def test_a_nan_in_the_backward_of_one_token_is_traced_to_it(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, action_cases.broken_backward, case, PLACE)
    ((event,),) = harmless(results)
    assert places(event) == [PLACE] and event["culprits"][0]["source"] == "nonfinite" and event["complete"]
    assert event["passes"] <= 8


def test_no_token_is_blamed_for_a_nan_in_the_backward_of_all(launch: Launch) -> None:
    """One pass tells, however many units there are."""
    results = launch(2, action_cases.broken_backward, Case("fsdp1", micro_batch=1), None)
    ((event,),) = harmless(results)
    assert (event["diagnosis"], event["passes"], event["culprits"]) == ("nonfinite", 1, [])
    assert event["complete"] and len(event["units"]) == 16


# Over what float16 holds, whatever the gradient; for most tokens; and well within.
TOO_LARGE, LARGE, SMALL = 2.0**40, 2.0**20, 8.0


def test_no_token_is_blamed_for_an_overflow_of_the_loss_scale(launch: Launch) -> None:
    """The scaler leaves the step out and lowers its scale, as it does without GradLoc."""
    case = Case("fsdp1", precision="float16", loss_scale=TOO_LARGE)
    results = launch(2, action_cases.overflow, case, [])
    ((event,),) = harmless(results)
    assert (event["diagnosis"], event["passes"], event["culprits"]) == ("overflow", 0, [])
    assert event["loss_scale"] == TOO_LARGE and event["complete"]
    for *_, scales in results:
        assert scales[0] == scales[1] < TOO_LARGE


@on_ranks(*[(2, Case("fsdp2", precision="float16", loss_scale=scale)) for scale in (SMALL, LARGE, TOO_LARGE)])
def test_a_nan_token_is_not_called_an_overflow(launch: Launch, world: int, case: Case) -> None:
    """Not even where there is an overflow, too."""
    results = launch(world, action_cases.overflow, case, [PLACE])
    ((event,),) = harmless(results)
    assert event["diagnosis"] == "tokens" and places(event) == [PLACE] and event["complete"]
    for *_, scales in results:
        assert scales[0] == scales[1]
