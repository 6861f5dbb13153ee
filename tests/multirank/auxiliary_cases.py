"""A gradient that comes from no token, and the scale of ordinary losses. Runs inside the ranks of a cluster."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from action_cases import compared
from actor_cases import Run
from actors import Case, build_actor, build_config, build_model, on_device
from batches import build_batch
from mini_batches import split_rows
from oracle import brute_force, log_probs_and_entropy, norms_of
from plain_passes import observe
from torch import Tensor
from verl.utils.gradloc import GradLoc, GradLocConfig, metrics

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
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)

    both = {"change_model": functools.partial(attach, scale=scale)}
    same, run = compared(case, 1, both, grad_norm_threshold=threshold)
    return same, run, {name: norms for of_rank in everywhere for name, norms in of_rank.items()}


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
