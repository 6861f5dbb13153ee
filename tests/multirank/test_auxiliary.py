"""A gradient that comes from no token, against autograd; and losses of verl, none of which is scaled wrongly."""

import auxiliary_cases
import pytest
from actors import ENGINE, Case
from test_actor import MODES, Launch, harmless, on_engine, on_ranks

from gradloc.judge.loss_scale import coefficient_factor


# The engine of verl 0.9 computes without padding, over which the mean of this auxiliary loss would be another.
def test_the_gradient_of_an_auxiliary_loss_is_measured(launch: Launch) -> None:
    results = launch(2, auxiliary_cases.auxiliary, Case("fsdp2", checkpointing=True), 30.0, 2.0)
    ((event,),) = harmless(results)
    found = event["without_tokens"]
    expected = results[0][2][found["rank"], found["micro_batch"]]
    assert found["layer_norms"] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert found["norm"] == pytest.approx(expected["layers.1"], rel=1e-4)
    largest = max(event["units"], key=lambda unit: unit["norm"] / unit["threshold"])
    assert (found["rank"], found["micro_batch"]) == (largest["rank"], largest["micro_batch"])
    assert found["share"] == pytest.approx(found["norm"] / largest["norm"])
    assert (event["diagnosis"], event["culprits"]) == ("diffuse", [])
    assert event["verdict"]["cause"] == "auxiliary" and event["passes"] <= 16


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
    found = launch(world, auxiliary_cases.scales, case)
    assert found == found[:1] * world
    by_rank = found[0][0][0]
    tolerance = 0.15 if case.loss_mode == "geo_mean" else 0.02
    assert [figures[4] for figures in by_rank] == pytest.approx([1.0] * world, rel=tolerance)
    # GMPO's coefficients have the ratio of the response instead, so there is no single factor.
    assert coefficient_factor(by_rank) in ((None,) if case.loss_mode == "geo_mean" else (pytest.approx(1, rel=0.02),))
    # Of verl 0.9.1, GMPO is: it takes the mean of each micro-batch, and the engine adds these up.
    wrong = ENGINE and case.loss_mode == "geo_mean"
    assert [warning is not None for _, warning in found[0]] == [wrong] * (case.rows // case.mini_batch)
    # The mean of the engine is over all tokens, also over those that are rejected.
    smaller = ENGINE and case.loss_mode == "bypass_mode"
    assert (sum(figures[0] for figures in by_rank) / world == pytest.approx(1, abs=0.1)) != (wrong or smaller)


@pytest.mark.target(version="0.9.1")
def test_a_loss_that_is_scaled_wrongly_is_named(launch: Launch) -> None:
    ((_, warning),) = launch(2, auxiliary_cases.scales, Case("fsdp2"), 2.0)[0]
    assert warning is not None and "is 2 times what its weights, advantages and ratios give" in warning["sentence"]
    assert "the number of ranks (2)" in warning["sentence"]


def test_ranks_with_other_numbers_of_micro_batches_warn_alike(launch: Launch) -> None:
    first, second = launch(2, auxiliary_cases.warned_with_other_counts)
    assert first == second == []
