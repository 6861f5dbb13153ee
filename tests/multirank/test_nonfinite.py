"""Gradients that are not numbers: traced to the token that they come from, or to none where there is none."""

import math
from collections.abc import Callable
from typing import Any

import action_cases
import pytest
import torch.distributed as dist
from action_cases import POISONS
from actors import ENGINE, VOCABULARY, Case
from test_actor import Launch, harmless, places, same_events
from verl import DataProto

PLACE = (1, 3, 4)
PADDED = [(0, 1, 3), (1, 3, 9)]
EVERYWHERE = [(rank, row, position) for rank in (0, 1) for row in range(8) for position in range(10)]
# Over what float16 holds, whatever the gradient; for most tokens; and well within.
TOO_LARGE, LARGE, SMALL = 2.0**40, 2.0**20, 8.0


def half(loss_scale: float) -> Case:
    return Case("fsdp2", precision="float16", loss_scale=loss_scale, nan=(PLACE,))


# The function that makes the run, its case and further arguments, and the culprits.
OF_TOKENS: dict[str, tuple[Callable[..., Any], Case, tuple[Any, ...], list[Any]]] = {
    **{
        poison: (action_cases.poisoned, Case(mini_batch=4, kl=True, rollout_weights=True), (poison, [PLACE]), [PLACE])
        for poison in POISONS
    },
    # The masks multiply it by zero, which NaN survives. Row 1 of rank 0 has no token at all.
    "in the padding": (
        *(action_cases.poisoned, Case(loss_agg_mode="seq-mean-token-mean"), ("advantage is NaN", PADDED)),
        PADDED,
    ),
    # This attention lets a NaN through to tokens before it: the prefix that ends with it is the first broken one.
    "in the forward": (action_cases.broken_activation, Case("fsdp1"), PLACE, [PLACE]),
    "in the backward": (action_cases.broken_backward, Case("fsdp1"), (PLACE,), [PLACE]),
    # It is not called an overflow, even where there is one, too.
    **{f"scaled by {s:g}": (action_cases.overflow, half(s), (), [PLACE]) for s in (SMALL, LARGE, TOO_LARGE)},
}
# Padding is verl 0.7's alone; the engine of 0.9 computes these in another layout.
MARKS = {
    "in the padding": pytest.mark.skipif(ENGINE, reason="verl 0.9 trains without padding"),
    **dict.fromkeys(("in the forward", "in the backward"), pytest.mark.target(version="0.9.1")),
}


@pytest.mark.parametrize("what", [pytest.param(name, marks=MARKS.get(name, ())) for name in OF_TOKENS])
def test_a_token_that_is_not_a_number_is_the_culprit(launch: Launch, what: str) -> None:
    function, case, arguments, culprits = OF_TOKENS[what]
    results = launch(2, function, case, *arguments)
    ((event,),) = harmless(results)
    assert places(event) == culprits and {culprit["source"] for culprit in event["culprits"]} == {"nonfinite"}
    assert event["diagnosis"] == "tokens" and event["complete"] and event["passes"] < 10
    assert [unit["broken_tokens"] for unit in event["units"]] == [1] or what not in POISONS
    for *_, scales in results if function is action_cases.overflow else ():
        assert scales[0] == scales[1]


# As above, with the diagnosis and the passes; no matter how many units there are, one tells.
OF_NO_TOKEN: dict[str, tuple[Callable[..., Any], Case, tuple[Any, ...], str, int]] = {
    "every token": (action_cases.poisoned, Case("fsdp1"), ("advantage is NaN", EVERYWHERE), "nonfinite", 0),
    "a weight": (
        *(action_cases.broken_weight, Case("fsdp1"), (math.inf, "model.layers.1.self_attn.q_proj.weight", 7)),
        *("nonfinite", 0),
    ),
    "the backward": (action_cases.broken_backward, Case("fsdp1", micro_batch=1), (None,), "nonfinite", 1),
    "the loss scale": (
        *(action_cases.overflow, Case("fsdp1", precision="float16", loss_scale=TOO_LARGE), ()),
        *("overflow", 0),
    ),
}


@pytest.mark.parametrize("what", OF_NO_TOKEN)
def test_no_token_is_blamed_for_what_breaks_all(launch: Launch, what: str) -> None:
    """Of an overflow, the scaler leaves the step out and lowers its scale, as it does without GradLoc."""
    function, case, arguments, diagnosis, passes = OF_NO_TOKEN[what]
    results = launch(2, function, case, *arguments)
    ((event,),) = harmless(results)
    assert (event["diagnosis"], event["passes"], event["culprits"]) == (diagnosis, passes, [])
    assert event["complete"] and len(event["units"]) == 2 * case.rows // case.micro_batch
    broken = event["broken_parameters"]
    assert 0 < broken["count"] <= broken["of"]
    for *_, scales in results if diagnosis == "overflow" else ():
        assert scales[0] == scales[1] < event["loss_scale"] == TOO_LARGE


def test_a_rank_without_response_tokens_does_not_stop_the_search(launch: Launch) -> None:
    def change_batch(batch: DataProto) -> None:
        if dist.get_rank() == 1:
            batch.batch["response_mask"].zero_()
            batch.batch["advantages"].zero_()

    case = Case(planted=((0, 0, 4),))
    results = launch(2, lambda: action_cases.compared(case, 1, {"change_batch": change_batch}))
    ((event,),) = same_events([run for _, run in results])
    assert places(event) == [(0, 0, 4)] and event["complete"]
    for same, _ in results:
        # A mean over no token is NaN, not equal to itself, with a gradient of zero.
        assert all(value for name, value in same.items() if name != "metrics"), same


TOKEN = 11


def test_a_nan_in_an_embedding_is_traced_to_its_token(launch: Launch) -> None:
    # The index is that of a row's first element: its token's.
    results = launch(2, action_cases.broken_weight, Case(), math.nan, "model.embed_tokens.weight", TOKEN * 32)
    ((event,),) = harmless(results)
    assert event["culprits"] and event["complete"] and TOKEN < VOCABULARY
    # A prompt may have the token, too: then the row is broken from its first response token on.
    found = {culprit["token_id"] for culprit in event["culprits"] if culprit["position"] > 0}
    assert found == {TOKEN}
