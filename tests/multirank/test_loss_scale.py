"""Losses of verl, none of which is scaled wrongly, and one that is."""

import pytest
import torch
import torch.distributed as dist
from actors import ENGINE, Case, build_actor
from batches import build_batch
from test_actor import MODES, Launch, on_engine, on_ranks
from verl.utils.gradloc import metrics

from gradloc.judge.loss_scale import coefficient_factor

Scales = list[tuple[list[list[float]], dict[str, str] | None]]


def scales(case: Case, factor: float = 1.0) -> tuple[Scales, list[str]]:
    """Of each mini-batch, the figures of an actor's loss on each rank, and their warning; and what is said of the run.

    The loss is that many times as large.
    """
    found: Scales = []
    original, backward = metrics.loss_scale_warning, torch.Tensor.backward

    def noted(by_rank: list[list[float]]) -> dict[str, str] | None:
        warning = original(by_rank)
        found.append((by_rank, warning))
        return warning

    torch.Tensor.backward = lambda self, *rest, **options: backward(factor * self, *rest, **options)  # type: ignore
    metrics.loss_scale_warning = noted  # type: ignore[assignment]
    try:
        actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e6)
        actor.update_policy(build_batch(case, dist.get_rank()))
    finally:
        metrics.loss_scale_warning, torch.Tensor.backward = original, backward  # type: ignore
    return found, [warning["name"] for warning in actor.gradloc.warnings]


@on_ranks(
    (2, Case("fsdp2", dynamic=True)),
    *[(2, Case("fsdp2", loss_agg_mode=mode)) for mode in ("seq-mean-token-mean", "seq-mean-token-sum")],
    (2, Case("fsdp2", loss_mode="cispo")),
    (2, Case("fsdp2", kl=True, entropy=True, rollout=True, rollout_weights=True)),
    # These two have a mean over sequences of their own, whatever the configuration says.
    (2, Case("fsdp2", loss_mode="gspo", loss_agg_mode=MODES[1])),
    on_engine(2, Case("fsdp2", loss_mode="geo_mean", loss_agg_mode=MODES[1])),
    # In bypass mode, the policy loss rejects about half of these tokens; the KL loss does not.
    on_engine(2, Case("fsdp2", rows=16, loss_mode="bypass_mode", kl=True)),
)
def test_the_losses_of_verl_are_not_scaled_wrongly(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, scales, case)
    assert results == results[:1] * world
    found, said = results[0]
    by_rank = found[0][0]
    tolerance = 0.15 if case.loss_mode == "geo_mean" else 0.02
    assert [figures[4] for figures in by_rank] == pytest.approx([1.0] * world, rel=tolerance)
    # GMPO's coefficients have the ratio of the response instead, so there is no single factor.
    assert coefficient_factor(by_rank) in ((None,) if case.loss_mode == "geo_mean" else (pytest.approx(1, rel=0.02),))
    # Of verl 0.9.1, GMPO is: it takes the mean of each micro-batch, and the engine adds these up.
    wrong = ENGINE and case.loss_mode == "geo_mean"
    assert [warning is not None for _, warning in found] == [wrong] * (case.rows // case.mini_batch)
    assert wrong or "loss_scale" not in said
    # The mean of the engine is over all tokens, also over those that are rejected.
    smaller = ENGINE and case.loss_mode == "bypass_mode"
    assert (sum(figures[0] for figures in by_rank) / world == pytest.approx(1, abs=0.1)) != (wrong or smaller)


@pytest.mark.target(version="0.9.1")
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_a_loss_that_is_scaled_wrongly_is_named(launch: Launch, factor: float) -> None:
    """Of one mini-batch alone, it is said where it is far too large."""
    ((_, warning),), said = launch(2, scales, Case("fsdp2"), factor)[0]
    times = f"is {factor:g} times what its weights, advantages and ratios give; it could be"
    assert warning is not None and times in warning["sentence"] and warning["factor"] == pytest.approx(factor, rel=1e-3)
    assert ("the number of ranks (2)" in warning["sentence"]) == (factor == 2)
    assert said == ["loss_scale"] * (factor == 8)
