"""The oracle: the gradient of every micro-batch and of every single token, by brute force.

It is slow and meant to be obviously right: plain autograd on an unsharded copy of the model, a backward for each token.
Everything here runs inside the ranks of a cluster; each rank takes its own rows.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import torch
import torch.distributed as dist
from actors import (
    BYPASS_RATIO,
    END,
    ENTROPY_COEF,
    KL_COEF,
    LEARNING_RATE,
    PROMPT,
    TEMPERATURE,
    Case,
    build_config,
    build_model,
    gathered,
    on_device,
    stock_forward,
)
from mini_batches import loss_factor, split_rows, token_weights, whole_mini_batch
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import FSDPActorConfig


@dataclasses.dataclass
class Token:
    row: int
    position: int
    weight: float
    coefficient: float
    norm: float
    layer_norms: dict[str, float]
    facts: dict[str, float | bool | None]


@dataclasses.dataclass
class Unit:
    epoch: int
    mini_batch: int
    rank: int
    micro_batch: int
    rows: list[int]
    tokens: int
    # √Σw² over the tokens with a coefficient that is not zero.
    weight: float
    norm: float
    layer_norms: dict[str, float]
    each: list[Token] = dataclasses.field(default_factory=list)
    # How far the sum of the tokens' gradients is from the gradient of the unit, relative to the latter.
    residual: float = 0.0
    # For the tokens with a weight: the log-probs of training, of the old policy and, if there are any, of the rollout.
    log_probs: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.epoch, self.mini_batch, self.rank, self.micro_batch


def brute_force(case: Case, batch: DataProto, tokens: bool) -> tuple[list[Unit], list[float]]:
    """Every unit of one update_policy call, and the norm of every step's reduced gradient.

    They come from plain autograd on an unsharded copy of the model, which is trained alongside. Each rank takes the
    units of its own rows; all ranks get all of them. Without dropout and with SGD only.
    """
    config = build_config(case)
    model = build_model(dataclasses.replace(case, model="llama") if case.model == "tiled" else case)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(case.dtype)
    units, norms = [], []
    for epoch in range(case.epochs):
        for number, mini_batch in enumerate(batch.split(case.mini_batch)):
            total = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
            micro_batches = split_rows(case, config, mini_batch)
            config.global_batch_info.update(whole_mini_batch(case, mini_batch))
            for micro_batch, rows in enumerate(micro_batches):
                unit = Unit(epoch, number, dist.get_rank(), micro_batch, rows, 0, 0.0, 0.0, {})
                others = {name: values[rows] for name, values in mini_batch.non_tensor_batch.items()}
                tensors = on_device(mini_batch.batch[rows])
                measure_unit(case, config, model, unit, {**tensors, **others}, loss_factor(case, rows), tokens)
                for part, gradient in zip(total, take_gradients(case, [*model.parameters()]), strict=True):
                    part += gradient
                units.append(unit)
            norms.append(step(model, total, config.grad_clip))
    return [unit for of_rank in gathered(units) for unit in of_rank], norms


def measure_unit(
    case: Case,
    config: FSDPActorConfig,
    model: torch.nn.Module,
    unit: Unit,
    rows: dict[str, Any],
    factor: float,
    tokens: bool,
) -> None:
    """Fills in the unit, and leaves its gradient in the model."""
    mask = rows["response_mask"]
    info = config.global_batch_info
    weights = token_weights(case, mask, factor, info)
    unit.tokens = int(mask.sum())
    log_prob, entropy = log_probs_and_entropy(case, model, rows)
    if case.loss_mode == "bypass_mode":
        accepted = mask * ((log_prob - rows["old_log_probs"]).abs() <= math.log(BYPASS_RATIO))
        assert 0 < accepted.sum() < mask.sum()
        of_loss = token_weights(case, accepted, factor, info)
        weights = torch.where(accepted.bool() | (not case.kl), of_loss, weights)
    counted = (mask * weights) != 0
    old = log_prob if case.on_policy else rows["old_log_probs"]
    known = [log_prob, old, *([rows["rollout_log_probs"]] if case.rollout else [])]
    unit.log_probs = [values[counted].tolist() for values in known]

    def loss(log_prob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return factor * loss_of(case, config, rows, log_prob, entropy)

    def only(values: torch.Tensor, row: int, position: int) -> torch.Tensor:
        kept = values.detach().clone()
        kept[row, position] = values[row, position]
        return kept

    leaves = [log_prob.detach().requires_grad_(), entropy.detach().requires_grad_()]
    found = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    coefficients = found[0]
    kl = torch.autograd.grad(factor * kl_loss(case, config, rows, leaves[0]), leaves[0])[0] if case.kl else None
    unit.weight = weights[(found[0] != 0) | (found[1] != 0)].square().sum().sqrt().item()
    named = dict(model.named_parameters())  # as long to find as a backward
    parameters = [*named.values()]
    total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for row, position in mask.nonzero().tolist() if tokens else []:
        forget_gradients(parameters)
        share = loss(only(log_prob, row, position), only(entropy, row, position))
        (case.loss_scale * share).backward(retain_graph=True)
        weight = weights[row, position].item()
        norm, layer_norms = take_norms(case, named)
        token = Token(
            row=unit.rows[row],
            position=position,
            weight=weight,
            coefficient=coefficients[row, position].item(),
            norm=norm / weight,
            layer_norms={name: value / weight for name, value in layer_norms.items()},
            facts=token_facts(case, rows, log_prob, entropy, kl, row, position),
        )
        unit.each.append(token)
        for part, gradient in zip(total, take_gradients(case, parameters), strict=True):
            part += gradient
    forget_gradients(parameters)
    (case.loss_scale * loss(log_prob, entropy)).backward()
    unit.norm, unit.layer_norms = take_norms(case, named)
    if tokens:
        gaps = [(part - g).norm() for part, g in zip(total, take_gradients(case, parameters), strict=True)]
        unit.residual = torch.stack(gaps).norm().item() / (unit.norm or 1.0)


def loss_of(
    case: Case, config: FSDPActorConfig, rows: dict[str, Any], log_prob: torch.Tensor, entropy: torch.Tensor
) -> torch.Tensor:
    """verl's loss of a micro-batch, before the factor for gradient accumulation."""
    mask, info = rows["response_mask"], config.global_batch_info
    value, _ = get_policy_loss_fn(case.loss_mode)(
        old_log_prob=log_prob.detach() if case.on_policy else rows["old_log_probs"],
        log_prob=log_prob,
        advantages=rows["advantages"],
        response_mask=mask,
        loss_agg_mode=case.loss_agg_mode,
        config=config,
        rollout_is_weights=rows.get("rollout_is_weights"),
    )
    if case.entropy:
        value = value - ENTROPY_COEF * agg_loss(entropy, mask, case.loss_agg_mode, **info)
    if case.kl:
        value = value + kl_loss(case, config, rows, log_prob)
    return value


def kl_loss(case: Case, config: FSDPActorConfig, rows: dict[str, Any], log_prob: torch.Tensor) -> torch.Tensor:
    penalty = kl_penalty(log_prob, rows["ref_log_prob"], config.kl_loss_type)
    return KL_COEF * agg_loss(penalty, rows["response_mask"], case.loss_agg_mode, **config.global_batch_info)


def token_facts(
    case: Case,
    rows: dict[str, Any],
    log_prob: torch.Tensor,
    entropy: torch.Tensor,
    kl: torch.Tensor | None,
    row: int,
    position: int,
) -> dict[str, float | bool | None]:
    """What the evidence says of a token besides its gradient; None where the run has no such data."""
    # On-policy, verl takes the log-probs of this very forward for the old ones.
    old = log_prob if case.on_policy else rows["old_log_probs"]
    rollout = rows.get("rollout_log_probs")
    differences = (log_prob - (old if rollout is None else rollout))[row][rows["response_mask"][row].bool()]
    facts = {
        "token_id": rows["responses"][row, position],
        "advantage": rows["advantages"][row, position],
        "log_prob": log_prob[row, position],
        "old_log_prob": old[row, position],
        "ratio": (log_prob - old)[row, position].exp(),
        # Without a KL loss, a KL penalty in the reward has it in the batch.
        "ref_log_prob": rows["ref_log_prob"][row, position] if "ref_log_prob" in rows else None,
        "entropy": entropy[row, position] if case.knows_entropy else None,
        "rollout_log_prob": None if rollout is None else rollout[row, position],
        "rollout_ratio": None if rollout is None else (log_prob - rollout)[row, position].exp(),
        "sequence_ratio": differences.mean().exp(),
        "kl_coefficient": None if kl is None else kl[row, position],
        # The other models name no token that ends a turn.
        "after_eos": (rows["responses"][row, :position] == END).any() if case.has_end else None,
    }
    return {name: None if value is None else value.item() for name, value in facts.items()}


def step(model: torch.nn.Module, gradients: list[torch.Tensor], max_norm: float) -> float:
    """The optimizer step of all ranks together: mean of the gradients, clipping, plain SGD."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    if norm.isfinite():
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if parameter.requires_grad:
                    parameter -= LEARNING_RATE * gradient * (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm.item()


def forget_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def take_gradients(case: Case, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """In float32, free of the loss scale, of all parameters; zero where a backward did not come."""
    return [
        torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float() / case.loss_scale
        for p in parameters
    ]


def take_norms(case: Case, named: dict[str, torch.nn.Parameter]) -> tuple[float, dict[str, float]]:
    return norms_of(dict(zip(named, take_gradients(case, [*named.values()]), strict=True)))


def norms_of(gradients: dict[str, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """That of all parameters' gradients together, and by layer."""
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + gradient.double().square().sum().item()
    return math.sqrt(sum(squares.values())), {name: math.sqrt(square) for name, square in squares.items()}


@functools.cache
def layer_of(parameter: str) -> str:
    patterns = {
        r"embed_tokens\.": "embed_tokens",
        r"(visual\.blocks\.\d+)\.": r"\1",
        r"(visual\..*)\.(weight|bias)": r"\1",
        r"(layers\.\d+)\.mlp\.gate\.": r"\1.router",
        r"(layers\.\d+)\.": r"\1",
        r"model\.norm\.": "norm",
        r"lm_head\.": "lm_head",
        r"score\.": "score",
    }
    for pattern, name in patterns.items():
        if match := re.search(pattern, parameter):
            return match.expand(name)
    raise KeyError(parameter)


def log_probs_and_entropy(
    case: Case, model: torch.nn.Module, rows: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an unsharded model: by plain torch, or by the unpatched actor where there is more to it."""
    if case.precision != "float32" or case.packed or case.fused or case.model == "vision":
        return stock_forward(case, model, rows)
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs, use_cache=False).logits
    all_log_probs = (logits[:, PROMPT - 1 : -1] / TEMPERATURE).log_softmax(-1)
    log_probs = all_log_probs.gather(-1, rows["responses"].unsqueeze(-1)).squeeze(-1)
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1)
