"""The steps of a spike drill, on one process: which token is drawn, and what the copy of the mini-batch is."""

import math
from typing import Any

import pytest
import torch
from plain_passes import Loop
from torch import Tensor, nn

from gradloc import drill
from gradloc.drill import Planted
from gradloc.measure.micro_batch import MicroBatch

VOCABULARY, LENGTH, BROKEN = 11, 4, 0
# By row: one whose log-probs are NaN, one without a weight in the loss, and the only one that a drill can use.
FIRST_TOKENS, WEIGHTS, USABLE_ROW = [BROKEN, 1, 2, BROKEN], [0.1, 0.0, 0.1, 0.1], 2


def drilled_event(step: int) -> dict[str, Any]:
    """The drill of a mini-batch with one row in a micro-batch."""
    torch.manual_seed(0)
    model, ids = nn.Embedding(VOCABULARY, VOCABULARY), torch.randint(1, VOCABULARY, (4, 1, 1 + LENGTH))
    ids[:, 0, 0] = torch.tensor(FIRST_TOKENS)

    def logits(ids: Tensor) -> Tensor:
        return model(ids).where(ids[:, :1, None] != BROKEN, math.nan)

    loop = Loop(model, ids, 1, logits, grad_norm_threshold=1e3, spike_drill_step=step)
    loop.gradloc.start_update(step)
    for row, weight in enumerate(WEIGHTS):
        loop.run_pass(row, weight=weight)
    assert loop.gradloc.locate(epoch=0, mini_batch=0).take_step
    (event,) = loop.gradloc.events
    return event


@pytest.mark.parametrize("step", range(1, 5))
def test_only_a_micro_batch_with_a_usable_token_is_drawn(step: int) -> None:
    event = drilled_event(step)
    assert event["error"] is None and event["drill"]["found"]
    assert event["drill"]["planted"]["row"] == USABLE_ROW


def micro_batch(coefficients: list[float], dtype: torch.dtype) -> MicroBatch:
    coefficient = torch.tensor([coefficients], dtype=dtype)
    ordinary = torch.full(coefficient.shape, 0.1)
    tokens = {"coefficient": coefficient, "log_prob": -ordinary, "weight": ordinary}
    return MicroBatch({}, [0], (torch.empty(0), None), {**tokens, "response_mask": torch.ones(coefficient.shape)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_overflow_of_the_scale_breaks_no_token_of_the_copy(dtype: torch.dtype) -> None:
    own = [micro_batch([1024.0, math.inf, -512.0, math.nan], dtype)]
    planted = Planted((0, 0), 0, 0, 0, weight=0.1, sign=1.0, norm=1.0)
    (copy,) = drill.plant(own, True, planted, raised=2000.0, scale=1024.0, new_scale=2.0)
    assert torch.equal(copy.broken(scaled=True), own[0].broken(scaled=True))
    assert copy.tokens["coefficient"][0, :3].tolist() == pytest.approx([4000.0, math.inf, -1.0], rel=2**-8)
    assert own[0].tokens["coefficient"][0, 0] == 1024.0
