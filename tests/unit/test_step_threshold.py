"""The threshold in a step's metrics is that of the mini-batch with the largest norm."""

from __future__ import annotations

import pytest
import torch
from plain_passes import observe
from torch import nn

from gradloc import GradLoc, GradLocConfig
from gradloc.threshold import MARGIN


@pytest.mark.parametrize(("sizes", "largest"), [((3.0, 1.0), 0), ((1.0, 3.0), 1)])
def test_norm_and_threshold_are_of_one_mini_batch(sizes: tuple[float, float], largest: int) -> None:
    model, given = nn.Embedding(5, 5), (2e6, 1e6)
    gradloc = GradLoc(model, GradLocConfig(grad_norm_threshold="auto"), forward=lambda *_: (None, torch.zeros(1, 2)))
    # A tenth of 29 norms exceeds the third largest, of 30 the fourth: a mini-batch takes the threshold to the next.
    norms = [9e6, 8e6, *(threshold / MARGIN for threshold in given), *[1.0] * 25]
    gradloc.load_state_dict(gradloc.state_dict() | {"token_norms": norms})
    gradloc.start_update(1)
    for index, size in enumerate(sizes):
        model.zero_grad()
        gradloc.begin_pass({}, [0])
        ids = torch.tensor([[1, 2]])
        log_prob = torch.log_softmax(model(ids), -1)[..., 0]
        observe(gradloc, log_prob, None, torch.full((1, 2), 0.5), response_mask=torch.ones(1, 2), token_id=ids)
        (-size * 0.5 * log_prob).sum().backward()
        gradloc.end_pass()
        assert gradloc.locate(epoch=0, mini_batch=index).take_step
    metrics = {name.removeprefix("actor/gradloc/"): value for name, value in gradloc.metrics().items()}
    assert metrics["threshold"] == given[largest]
    assert metrics["spike_margin"] == pytest.approx(metrics["token_norm_max"] / metrics["threshold"])
