"""The steps of a spike drill, on one process: which token is drawn, and what the copy of the mini-batch is."""

import math
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from plain_passes import observe
from torch import Tensor, nn

from gradloc import GradLoc, GradLocConfig, drill
from gradloc.drill import Planted
from gradloc.measure.micro_batch import MicroBatch

VOCABULARY, LENGTH, HEALTHY_ROW = 11, 4, 2


def drilled_event(step: int, rows: int = 4) -> dict[str, Any]:
    """The drill of a mini-batch with one row in a micro-batch.

    In all rows but one, the only token with a weight in the loss has a log-prob that is NaN.
    """
    torch.manual_seed(0)
    model = nn.Embedding(VOCABULARY, VOCABULARY)
    ids = torch.randint(VOCABULARY, (rows, LENGTH))

    def forward(inputs: dict[str, Any], kept: list[int], length: int) -> tuple[None, Tensor]:
        of = inputs["ids"][kept, :length]
        return None, torch.log_softmax(model(of), -1).gather(-1, of[..., None])[..., 0]

    gradloc = GradLoc(model, GradLocConfig(grad_norm_threshold=1e3, spike_drill_step=step), forward)
    gradloc.start_update(step)
    for row in range(rows):
        inputs = {"ids": ids[row : row + 1]}
        gradloc.begin_pass(inputs, [row])
        _, log_prob = forward(inputs, [0], LENGTH)
        weight = torch.full((1, LENGTH), 1 / (rows * LENGTH))
        noted = log_prob
        if row != HEALTHY_ROW:
            weight[0, 1:] = 0
            noted = log_prob + torch.tensor([math.nan, 0, 0, 0])
        observe(gradloc, noted, None, weight, response_mask=torch.ones(1, LENGTH), token_id=inputs["ids"])
        (-noted * weight).sum().backward()
        gradloc.end_pass()
    assert gradloc.locate(epoch=0, mini_batch=0).take_step
    (event,) = gradloc.events
    return event


@pytest.mark.parametrize("step", range(1, 5))
def test_only_a_micro_batch_with_a_usable_token_is_drawn(step: int) -> None:
    event = drilled_event(step)
    assert event["error"] is None and event["drill"]["found"]
    assert event["drill"]["planted"]["row"] == HEALTHY_ROW


def micro_batch(coefficients: list[float], dtype: torch.dtype) -> MicroBatch:
    coefficient = torch.tensor([coefficients], dtype=dtype)
    ordinary = torch.full(coefficient.shape, 0.1)
    tokens = {"coefficient": coefficient, "log_prob": -ordinary, "weight": ordinary}
    return MicroBatch({}, [0], (torch.empty(0), None), {**tokens, "response_mask": torch.ones(coefficient.shape)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_overflow_of_the_scale_breaks_no_token_of_the_copy(dtype: torch.dtype) -> None:
    own = [micro_batch([1024.0, math.inf, -512.0, math.nan], dtype)]
    planted = Planted((0, 0), 0, 0, 0, weight=0.1, sign=1.0, norm=1.0)
    (copy,) = drill.plant(own, True, planted, raised=2000.0, scale=1024.0, new_scale=2.0)
    assert torch.equal(copy.broken(scaled=True), own[0].broken(scaled=True))
    assert copy.tokens["coefficient"][0, :3].tolist() == pytest.approx([4000.0, math.inf, -1.0], rel=2**-8)
    assert own[0].tokens["coefficient"][0, 0] == 1024.0


@pytest.mark.parametrize(("reduced", "checked"), [(True, [call("first"), call("second")]), (False, [])])
def test_dummy_inputs_are_checked_for_a_reduced_gradient(reduced: bool, checked: list[Any]) -> None:
    passes = Mock(scale=1.0)
    passes.whole_micro_batches.return_value = ["first", "second"]
    drill.rerun([], Mock(), passes, {}, reduced)
    assert passes.check_dummy_inputs.call_args_list == checked and passes.accumulate.call_count == 2
