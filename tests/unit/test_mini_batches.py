"""Mini-batches out of the ordinary in a plain training loop: what is a spike in them, and what is done about it."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import Caplog, Patch
from plain_passes import Loop
from test_without_tokens import PROMPT, RESPONSE, VOCABULARY, Model
from torch import Tensor, nn

from gradloc.evidence import event as events
from gradloc.fsdp import collectives
from gradloc.measure.micro_batch import token_equivalent, token_equivalents
from gradloc.measure.mini_batch import MiniBatch
from gradloc.measure.passes import LocalMeter, Passes

UNITS = 4
WEIGHT = 1 / (UNITS * RESPONSE)
ORDINARY = [1.0, -1.0, 1.0, -1.0]


def build_loop(auxiliary: float = 0.0, **settings: Any) -> Loop:
    """Micro-batches of one row. `auxiliary` scales the model's own loss."""
    ids = torch.randint(VOCABULARY, (UNITS, 1, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(1))
    return Loop(Model(auxiliary), ids, PROMPT, **settings)


def with_outlier(outlier: float, advantages: Sequence[float] = ORDINARY) -> list[Tensor]:
    """The advantages of micro-batches; that of one token of the last is multiplied."""
    found = [torch.full((1, RESPONSE), advantage) for advantage in advantages]
    found[-1][0, 3] *= outlier
    return found


def norm_of(model: nn.Module) -> float:
    """Of the gradient that there is."""
    return math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))


def usual_norm() -> float:
    """The largest norm for one token without a spike."""
    loop = build_loop(grad_norm_threshold=1e9)
    loop.step(*ORDINARY)
    return loop.gradloc.metrics()["actor/gradloc/token_norm_max"]


def norms_of_auxiliary(scale: float, ids: Tensor) -> list[float]:
    """By row, the norm of the gradient without any token."""
    norms = []
    for row in ids:
        model = Model(scale)
        (0 * model(row)).sum().backward()
        norms.append(norm_of(model))
    return norms


@pytest.mark.parametrize("auxiliary", [0.0, 0.1])
def test_a_micro_batch_that_cannot_move_is_no_spike(auxiliary: float) -> None:
    """All responses to its prompt got the same reward; an auxiliary loss has a small gradient all the same."""
    loop = build_loop(auxiliary, grad_norm_threshold="auto", spike_action="skip")
    for _ in range(25):
        assert loop.step(1.0, 0.0, -1.0, 0.5).take_step
        assert loop.gradloc.events == [] and loop.gradloc.metrics()["actor/gradloc/triggered"] == 0
    loop.step(*[0.0] * UNITS)
    expected = max(norms_of_auxiliary(auxiliary, loop.ids)) / (WEIGHT * math.sqrt(RESPONSE))
    assert loop.gradloc.metrics()["actor/gradloc/token_norm_max"] == pytest.approx(expected, rel=1e-5)


def test_a_unit_over_its_threshold_is_not_explained_by_another() -> None:
    """Only the first is over by its auxiliary loss, and none of its tokens can move; the last has a culprit."""
    first, *others = norms_of_auxiliary(1.0, build_loop(grad_norm_threshold=1e9).ids)
    assert first > 1.02 * max(others)
    loop = build_loop(1.0, grad_norm_threshold=(first + max(others)) / 2 / (WEIGHT * math.sqrt(RESPONSE)))
    loop.step(*with_outlier(1e7, [0.0, 1e-3, 1e-3, 1e-3]))
    (event,) = loop.gradloc.events
    assert {unit["micro_batch"] for unit in event["units"]} == {0, 3}
    assert [(culprit["row"], culprit["position"]) for culprit in event["culprits"]] == [(3, 3)]
    assert event["explained"] is False


@pytest.mark.parametrize("action", ["log", "skip"])
@pytest.mark.parametrize("where", ["the search", "the event"])
def test_a_spike_without_an_event_still_counts(monkeypatch: Patch, caplog: Caplog, action: str, where: str) -> None:
    fail = Mock(side_effect=collectives.RankFailedError("rank 1: MemoryError: a planted one"))
    owner, name = (MiniBatch, "gather_figures") if where == "the search" else (events, "token_facts_of")
    monkeypatch.setattr(owner, name, fail)
    loop = build_loop(grad_norm_threshold=1e-3, spike_action=action)
    located = loop.step(*ORDINARY)
    assert located.take_step == (action == "log") and loop.gradloc.events == []
    assert located.norm == pytest.approx(norm_of(loop.model), rel=1e-6)
    metrics = loop.gradloc.metrics()
    assert metrics["actor/gradloc/triggered"] == 1 and metrics["actor/gradloc/skipped"] == (action == "skip")
    assert "has no event" in caplog.text and "a planted one" in caplog.text


def test_a_drop_that_fails_leaves_the_finding_as_it_is(monkeypatch: Patch) -> None:
    loop = build_loop(grad_norm_threshold=3 * usual_norm(), spike_action="drop")
    accumulate = Passes.accumulate

    def failing(passes: Passes, *arguments: Any, own_index: int | None = None, **options: Any) -> Any:
        if own_index is not None:
            raise collectives.RankFailedError("rank 1: OutOfMemoryError: a planted one")
        return accumulate(passes, *arguments, **options)

    monkeypatch.setattr(Passes, "accumulate", failing)
    loop.step(*with_outlier(1e3))
    (event,) = loop.gradloc.events
    assert not event["applied"] and "a planted one" in event["error"]
    assert event["diagnosis"] == "tokens" and event["explained"] and event["complete"]


def test_an_automatic_global_threshold_is_of_that_gradient() -> None:
    """Micro-batches whose gradients point elsewhere add up to less than the largest of them times their number."""
    loop = build_loop(grad_norm_threshold="auto", spike_trigger="global")
    for number in range(24):
        scale = 1 + 0.1 * (number % 3)
        loop.step(scale, -scale, scale, -scale)
        expected = norm_of(loop.model) / (WEIGHT * math.sqrt(UNITS * RESPONSE))
        assert loop.gradloc.metrics()["actor/gradloc/token_norm_max"] == pytest.approx(expected, rel=1e-5)
    threshold = loop.gradloc.metrics()["actor/gradloc/threshold"]
    assert threshold == pytest.approx(5 * 1.2 / scale * expected, rel=0.2)


def test_many_ranks_measure_a_limited_number_of_probes(monkeypatch: Patch) -> None:
    for ranks, width in ((1, 1), (256, 256), (2048, 256)):
        monkeypatch.setattr(collectives, "world_size", Mock(return_value=ranks))
        assert LocalMeter(nn.Linear(1, 1), torch.device("cpu")).width == width


def test_one_token_equivalent_is_that_of_many() -> None:
    values = [0.0, 5e-324, 1e-300, 1.0, 3.0, 1e308, math.inf, math.nan]
    pairs = list(product(values, values))
    of_many = token_equivalents(*torch.tensor(pairs, dtype=torch.float64).T).tolist()
    assert [token_equivalent(*pair) for pair in pairs] == of_many


def test_a_mini_batch_that_was_thrown_away_is_forgotten() -> None:
    loop = build_loop(grad_norm_threshold=3 * usual_norm())
    loop.gradloc.start_update(1)
    loop.backward(*with_outlier(1e4))
    loop.gradloc.start_mini_batch()
    loop.backward(*ORDINARY)
    loop.gradloc.locate(0, 1)
    assert not loop.gradloc.events
