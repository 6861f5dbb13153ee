"""The weight of a token in the loss, with every policy loss that verl has."""

import itertools
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from actors import ENGINE, TOKEN_REJECTION, BypassLossConfig
from notation import Caplog
from test_actor import MODES
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from gradloc.adapters import loss_weights
from gradloc.adapters.loss_weights import (
    AggregationCall,
    aggregation_mode,
    policy_weights,
    recorded_aggregation,
    with_derived,
)
from gradloc.judge import of_one_step
from gradloc.measure.update_facts import own_facts

AGG_LOSS = core_algos.agg_loss
# The last row has no tokens.
MASK = (torch.arange(7) < torch.tensor([5, 7, 1, 3, 0]).unsqueeze(1)).float()
WHOLE_BATCH = {"dp_size": 2, "batch_num_tokens": 41, "global_batch_size": 12, "loss_scale_factor": 9}


def build_config(mode: str, agg_mode: str, **options: Any) -> FSDPActorConfig:
    beta = {"dro_beta": 0.5} if mode == "dro" else {}
    correction = {"loss_type": "reinforce", "rollout_rs": TOKEN_REJECTION, "rollout_rs_threshold": 1.5}
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=5,
        loss_agg_mode=agg_mode,
        policy_loss=BypassLossConfig(loss_mode=mode, rollout_correction=correction, **beta),
        **options,
    )


def weights_and_gradient(
    mode: str, agg_mode: str, config: FSDPActorConfig, log_prob: torch.Tensor, old_log_prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, and the gradient of verl's own loss at an advantage of -1."""
    given = {"advantages": -MASK, "response_mask": MASK, "loss_agg_mode": agg_mode, "config": config}
    with recorded_aggregation() as calls:
        loss, _ = get_policy_loss_fn(mode)(old_log_prob=old_log_prob, log_prob=log_prob, **given)
    weights = policy_weights(next(iter(calls), None), config, MASK, **config.global_batch_info)
    assert core_algos.agg_loss is AGG_LOSS  # given back
    return weights, torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.every_target
@pytest.mark.smoke
@pytest.mark.parametrize("agg_mode", MODES)
@pytest.mark.parametrize("mode", list(POLICY_LOSS_REGISTRY))
def test_weights_are_those_of_the_loss_itself(mode: str, agg_mode: str) -> None:
    """With a ratio of 1 and an advantage of -1, a token's loss changes as fast as its log-prob."""
    log_prob = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for info in ({}, WHOLE_BATCH):
        config = build_config(mode, agg_mode, global_batch_info=info)
        weights, gradient = weights_and_gradient(mode, agg_mode, config, log_prob, log_prob.detach())
        assert weights.flatten().tolist() == pytest.approx(gradient.flatten().tolist(), rel=1e-5), info
        assert (weights > 0).equal(MASK.bool())


@pytest.mark.parametrize("agg_mode", MODES)
def test_tokens_that_bypass_mode_rejects_have_no_weight(agg_mode: str) -> None:
    config = build_config("bypass_mode", agg_mode)
    log_prob = torch.zeros(MASK.shape, requires_grad=True)
    rejected = MASK.bool() & (torch.arange(35).reshape(5, 7) % 3 == 0)
    rollout = torch.where(rejected, -1.0, 0.0)
    weights, gradient = weights_and_gradient("bypass_mode", agg_mode, config, log_prob, rollout)
    assert weights.flatten().tolist() == pytest.approx(gradient.flatten().tolist(), rel=1e-5)
    assert (weights > 0).equal(MASK.bool() & ~rejected)
    config = build_config("bypass_mode", agg_mode, use_kl_loss=True)
    with_kl, _ = weights_and_gradient("bypass_mode", agg_mode, config, log_prob, rollout)
    plain, _ = weights_and_gradient("vanilla", agg_mode, build_config("vanilla", agg_mode), log_prob, rollout)
    assert with_kl.equal(torch.where(rejected, plain, weights))


@pytest.mark.every_target
@pytest.mark.smoke
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_trains_a_micro_batch_without_tokens(loss_type: str) -> None:
    """As one of failed requests. Released verl raises an error, and the run ends."""
    config = build_config("bypass_mode", "token-mean", global_batch_info=WHOLE_BATCH)
    config.policy_loss.rollout_correction["loss_type"] = loss_type
    log_prob = torch.full(MASK.shape, -1.0, requires_grad=True)
    losses, metrics = [], []
    for mask in (MASK, 0 * MASK):
        given = {"advantages": -mask, "response_mask": mask, "loss_agg_mode": "token-mean", "config": config}
        loss, figures = get_policy_loss_fn("bypass_mode")(
            old_log_prob=log_prob.detach() - 0.1, log_prob=log_prob, **given
        )
        losses.append(loss)
        metrics.append(figures)
    assert losses[0] != 0 and losses[1] == 0 and metrics[0].keys() == metrics[1].keys()
    assert not torch.autograd.grad(losses[1], log_prob)[0].any()


@pytest.mark.every_target
def test_what_a_loss_called_can_be_read_again() -> None:
    """Its weights and its mode."""
    config = build_config("vanilla", "token-mean", use_kl_loss=True)
    kept = MASK.bool() & (torch.arange(7) != 1)
    with recorded_aggregation() as calls:
        core_algos.agg_loss(torch.ones(5, 7), kept.float(), "seq-mean-token-sum")
        core_algos.agg_loss(torch.ones(5, 7), MASK, "token-mean")  # a figure for the log
    (call,) = calls
    rejected = MASK.bool() & ~kept
    for _ in range(2):
        weights = policy_weights(call, config, MASK)
        assert weights[kept].tolist() == pytest.approx([1 / 4] * int(kept.sum()))  # rows with a token
        assert weights[rejected].tolist() == pytest.approx([1 / 16] * int(rejected.sum()))
        assert aggregation_mode(call, config, MASK.shape) == "seq-mean-token-sum"


@pytest.mark.smoke
@pytest.mark.skipif(ENGINE, reason="verl 0.9 divides by the tokens of the whole mini-batch")
@pytest.mark.parametrize("agg_mode", MODES)
def test_a_micro_batch_without_a_token_has_no_loss(agg_mode: str) -> None:
    """A fix of verl 0.7, where the mean is NaN."""
    losses = torch.ones(5, 7, requires_grad=True)
    loss = core_algos.agg_loss(losses, torch.zeros(5, 7), agg_mode)
    loss.backward()
    assert loss.item() == 0.0 and losses.grad.eq(0).all()


@pytest.mark.skipif(ENGINE, reason="of the actor of verl 0.7")
def test_a_second_loss_of_a_pass_does_not_end_training() -> None:
    from gradloc.adapters.dp_actor import WatchedUpdates

    actor = WatchedUpdates()
    actor.watch, actor._passed = MagicMock(), None
    assert actor._observed(lambda **given: given["log_prob"])(response_mask=MASK, log_prob=3.0) == 3.0
    actor.watch.observe.assert_not_called()


@pytest.mark.skipif(ENGINE, reason="of the actor of verl 0.7")
def test_an_update_that_is_not_watched_is_told_once(caplog: Caplog) -> None:
    from gradloc.adapters.dp_actor import WatchedUpdates

    class Verls:
        def _optimizer_step(self) -> torch.Tensor:
            return torch.tensor(3.0)

    class WithItsOwnUpdate(WatchedUpdates, Verls):
        def update_policy(self) -> list[float]:
            return [self._optimizer_step().item() for _ in range(2)]

    actor = WithItsOwnUpdate()
    assert actor.update_policy() == [3.0, 3.0] and not caplog.records  # nothing is on
    actor.watch = MagicMock()
    assert actor.update_policy() == [3.0, 3.0] and not actor.watch.mock_calls
    (record,) = caplog.records
    assert record.getMessage().startswith("WithItsOwnUpdate takes optimizer steps outside of verl's own update")


LENGTHS = MASK.sum(1, keepdim=True)


@pytest.fixture
def warnings_again() -> None:
    """What is logged once may have been logged by another test."""
    loss_weights._said.clear()


def taken(losses: torch.Tensor, mask: torch.Tensor, mode: str, **info: int) -> AggregationCall:
    with recorded_aggregation() as calls:
        core_algos.agg_loss(losses, mask, mode, **info)
    return calls[0]


@pytest.mark.every_target
@pytest.mark.usefixtures("warnings_again")
@pytest.mark.parametrize("of_rows", [(5,), (5, 1)], ids=["one per row", "a column"])
def test_the_weight_of_a_sequence_is_divided_among_its_tokens(of_rows: tuple[int, ...], caplog: Caplog) -> None:
    config = build_config("vanilla", "token-mean")
    mode = "token-mean" if len(of_rows) == 1 else "seq-mean-token-mean"
    call = taken(torch.ones(of_rows), torch.ones(of_rows), mode)
    for _ in range(2):
        weights = policy_weights(call, config, MASK)
        # A row without a token has none.
        torch.testing.assert_close(weights, torch.where(MASK.bool(), 1 / 5 / LENGTHS, 0.0))
    assert [record.message for record in caplog.records if "divides a sequence's weight" in record.message]
    assert len(caplog.records) == 1
    assert aggregation_mode(call, config, MASK.shape) is None  # no sum of the tokens' weights is promised
    # The second sequence is rejected: its tokens have the terms of KL alone.
    config = build_config("vanilla", "token-mean", use_kl_loss=True)
    call = taken(torch.ones(of_rows), (torch.arange(5) != 1).float().view(of_rows), mode)
    kept = MASK.bool() & (torch.arange(5) != 1).unsqueeze(1)
    assert call.kept(MASK).equal(kept)
    rejected = torch.where(MASK.bool(), 1 / 16, 0.0)
    torch.testing.assert_close(policy_weights(call, config, MASK), torch.where(kept, 1 / 4 / LENGTHS, rejected))


@pytest.mark.usefixtures("warnings_again")
@pytest.mark.parametrize("shape", [(16,), (5, 6), (7, 5), None])
def test_of_other_losses_the_configured_weights_are_assumed(shape: tuple[int, ...] | None, caplog: Caplog) -> None:
    config = build_config("vanilla", MODES[1], use_kl_loss=True)
    call = None if shape is None else taken(torch.ones(shape), torch.ones(shape), "token-mean")
    whole = policy_weights(taken(torch.ones(5, 7), MASK, MODES[1]), config, MASK)
    for _ in range(2):
        assert policy_weights(call, config, MASK).equal(whole)
    (record,) = caplog.records
    assert f"those of loss_agg_mode={MODES[1]}." in record.message
    assert aggregation_mode(call, config, MASK.shape) == MODES[1]


@pytest.mark.every_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY.keys() - {"bypass_mode"}))
def test_no_loss_of_verl_is_called_wrong(mode: str, dtype: torch.dtype) -> None:
    """In every aggregation, with importance weights, and a KL loss that rounding swallows in half precision."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(600) < torch.randint(150, 601, (8, 1), generator=generator)).float()
    old, away, apart = (torch.randn(mask.shape, generator=generator) for _ in range(3))
    for agg_mode, kl, sign in itertools.product(MODES, ("kl", "k2", "low_var_kl"), (1.0, -1.0, 0.0)):
        coefficient = 1e-2 if sign else 1e-3
        options = {"use_kl_loss": True, "kl_loss_type": kl, "kl_loss_coef": coefficient}
        config = build_config(mode, agg_mode, **options)
        log_prob = (-old.abs()).to(dtype).requires_grad_()
        tokens = {"response_mask": mask, "log_prob": log_prob.detach(), "old_log_prob": log_prob.detach().float()}
        tokens["advantage"] = mask * (sign or torch.randn((8, 1), generator=generator))
        tokens["ref_log_prob"], tokens["rollout_log_prob"] = (log_prob.detach() + 0.05 * each for each in (away, apart))
        tokens["rollout_is_weight"] = (tokens["old_log_prob"] - tokens["rollout_log_prob"]).exp() * mask
        given = {"advantages": tokens["advantage"], "response_mask": mask, "loss_agg_mode": agg_mode}
        given |= {"config": config, "rollout_is_weights": tokens["rollout_is_weight"]}
        with recorded_aggregation() as calls:
            loss, _ = get_policy_loss_fn(mode)(old_log_prob=tokens["old_log_prob"], log_prob=log_prob, **given)
        penalty = core_algos.kl_penalty(logprob=log_prob, ref_logprob=tokens["ref_log_prob"], kl_penalty=kl)
        loss = loss + core_algos.agg_loss(penalty, mask, agg_mode, **config.global_batch_info) * coefficient
        (tokens["coefficient"],) = torch.autograd.grad(loss, log_prob)
        call = next(iter(calls), None)
        tokens = with_derived(tokens, call, config, (), 1.0, config.global_batch_info)
        facts = own_facts([tokens], loss_agg_mode=aggregation_mode(call, config, mask.shape))
        found = of_one_step(facts.tolist())
        assert found["identities"]["loss"]["state"] == "held", (agg_mode, kl, sign, found["identities"]["loss"])
