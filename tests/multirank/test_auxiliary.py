"""A gradient that comes from no token, against autograd; and losses of verl, none of which is scaled wrongly."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from action_cases import compared
from actor_cases import Run
from actors import ENGINE, Case, build_actor, build_config, build_model, gathered, on_device
from batches import build_batch
from mini_batches import split_rows
from oracle import brute_force, log_probs_and_entropy, norms_of
from plain_passes import observe
from test_actor import MODES, Launch, harmless, on_engine, on_ranks
from torch import Tensor
from verl.utils.gradloc import GradLoc, GradLocConfig, metrics

from gradloc.judge.loss_scale import coefficient_factor

BLOCK = "layers.1.mlp"


class AuxiliaryLoss(torch.autograd.Function):
    """Adds the gradient of a loss to a hidden state's backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones(())


def attach(module: torch.nn.Module, scale: float, found: list[Tensor] | None = None) -> None:
    """Attaches an auxiliary loss to a layer; with a list, only puts the loss there."""
    names = {name.replace("_fsdp_wrapped_module.", ""): child for name, child in module.named_modules()}
    (block,) = [child for name, child in names.items() if name.endswith(BLOCK)]

    def hook(child: torch.nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        loss = scale * child.get_submodule("gate_proj")(arguments[0].detach()).logsumexp(-1).square().mean()
        if found is not None:
            found.append(loss)
            return output
        return AuxiliaryLoss.apply(output, loss)

    block.register_forward_hook(hook)


def auxiliary(
    case: Case, scale: float, over: float
) -> tuple[dict[str, bool], Run, dict[tuple[int, int], dict[str, float]]]:
    """An actor with an auxiliary loss; τ is that part of what tokens alone would need.

    Returns:
        tuple: What is bit-identical to the unpatched actor; the run; and by (rank, micro-batch), each layer's norm of
            the auxiliary gradient alone, by autograd on an unsharded copy.
    """
    batch = build_batch(case, dist.get_rank())
    units, _ = brute_force(case, batch, tokens=False)
    threshold = over * max(unit.norm / unit.weight for unit in units if unit.weight)

    config, copy = build_config(case), build_model(case)
    found: list[Tensor] = []
    attach(copy, scale, found)
    own: dict[tuple[int, int], dict[str, float]] = {}
    for index, rows in enumerate(split_rows(case, config, batch)):
        found.clear()
        log_probs_and_entropy(case, copy, on_device(batch.batch[rows]))
        named = dict(copy.named_parameters())
        gradients = torch.autograd.grad(sum(found), [*named.values()], allow_unused=True, materialize_grads=True)
        _, own[dist.get_rank(), index] = norms_of(dict(zip(named, gradients, strict=True)))
    both = {"change_model": functools.partial(attach, scale=scale)}
    same, run = compared(case, 1, both, grad_norm_threshold=threshold)
    return same, run, {name: norms for of_rank in gathered(own) for name, norms in of_rank.items()}


def scales(case: Case, factor: float = 1.0) -> list[tuple[list[list[float]], dict[str, str] | None]]:
    """Of each mini-batch, the figures of an actor's loss on each rank, and the warning that they give.

    The loss is that many times as large.
    """
    found: list[tuple[list[list[float]], dict[str, str] | None]] = []
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
    return found


def warned_with_other_counts() -> list[dict[str, str]]:
    """The warnings where rank 0 has three micro-batches and the others one, and the weights add up to a third."""
    micro_batches, shape = 1 if dist.get_rank() else 3, (4, 8)
    model = torch.nn.Linear(5, 1)
    gradloc = GradLoc(model, GradLocConfig(grad_norm_threshold=1e6), no_forward)
    weight, advantage = torch.full(shape, 1 / (3 * micro_batches * 32)), torch.ones(shape)
    tokens = {"response_mask": torch.ones(shape), "token_id": torch.zeros(shape).long(), "advantage": advantage}
    for step in range(3):
        gradloc.start_update(step)
        for _ in range(micro_batches):
            gradloc.begin_pass({}, range(4))
            log_prob = torch.nn.functional.logsigmoid(model(torch.randn(*shape, 5))).squeeze(-1)
            observe(gradloc, log_prob, None, weight, "token-mean", **tokens)
            (-log_prob * advantage * weight).sum().backward()
            gradloc.end_pass()
        gradloc.locate(epoch=0, mini_batch=0)
        model.zero_grad()
    return gradloc.warnings


def no_forward(*_: Any) -> Any:
    raise AssertionError("there is no search")


# The engine of verl 0.9 computes without padding, over which the mean of this auxiliary loss would be another.
def test_the_gradient_of_an_auxiliary_loss_is_measured(launch: Launch) -> None:
    results = launch(2, auxiliary, Case("fsdp2", checkpointing=True), 30.0, 2.0)
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
    found = launch(world, scales, case)
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
    ((_, warning),) = launch(2, scales, Case("fsdp2"), 2.0)[0]
    assert warning is not None and "is 2 times what its weights, advantages and ratios give" in warning["sentence"]
    assert "the number of ranks (2)" in warning["sentence"]


def test_ranks_with_other_numbers_of_micro_batches_warn_alike(launch: Launch) -> None:
    first, second = launch(2, warned_with_other_counts)
    assert first == second == []
