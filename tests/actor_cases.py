"""Tiny actors in every wrapping, their data, and the brute force that GradLoc's answers are held against.

Everything here runs inside the ranks of a cluster. The brute force takes the gradient of each micro-batch, and of
each single token, on an unsharded copy of the model; the token weights come from closed formulas.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy, get_shard_placement_fn
from verl.utils.seqlen_balancing import prepare_dynamic_batch
from verl.workers.actor import dp_actor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

VOCABULARY = 67  # odd, so that not every shard has the same size
PROMPT, RESPONSE = 6, 10
TEMPERATURE = 0.9
# A step moves log-probs by a few percent: enough to see, too little to clip what it trained on.
LEARNING_RATE = 1e-3
KL_COEF, ENTROPY_COEF = 0.3, 0.05
# What a planted token's advantage is multiplied with: far above the spread of ordinary tokens, weights included.
SPIKE = 5e3
# Between ordinary and planted tokens with a wide margin, for runs that the brute force cannot follow.
IDENTITY_THRESHOLD = 1e3


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of running the actor. Batch sizes are those of one rank."""

    wrap: str = "fsdp2"
    checkpointing: bool = False
    tied: bool = False
    dropout: float = 0.0
    optimizer: str = "sgd"
    rows: int = 8
    mini_batch: int = 8
    micro_batch: int = 2
    dynamic: bool = False
    epochs: int = 1
    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    kl: bool = False
    entropy: bool = False
    rollout: bool = False
    trigger: str = "unit"
    # (rank, row, position) of tokens with a spike, with a spike that PPO's clipping removes, and with a NaN.
    planted: tuple[tuple[int, int, int], ...] = ()
    clipped: tuple[tuple[int, int, int], ...] = ()
    nan: tuple[tuple[int, int, int], ...] = ()

    @property
    def id(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and (field.name == "wrap" or value != field.default):
                words.append(value)
            elif isinstance(value, tuple) and value:
                words.append(f"{len(value)}_{field.name}")
            elif value is True:
                words.append(field.name)
            elif value != field.default:
                words.append(f"{field.name}_{value}")
        return "-".join(words)

    @property
    def on_policy(self) -> bool:
        return self.rows == self.mini_batch and self.epochs == 1


@dataclasses.dataclass
class Token:
    row: int
    position: int
    weight: float
    coefficient: float
    norm: float
    layer_norms: dict[str, float]
    facts: dict[str, float | None]


@dataclasses.dataclass
class Unit:
    epoch: int
    mini_batch: int
    rank: int
    micro_batch: int
    rows: list[int]
    tokens: int
    weight: float
    norm: float
    layer_norms: dict[str, float]
    each: list[Token] = dataclasses.field(default_factory=list)
    # How far the sum of the tokens' gradients is from the gradient of the unit, relative to the latter.
    residual: float = 0.0

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.epoch, self.mini_batch, self.rank, self.micro_batch


def build_model(case: Case) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=case.tied,
        attention_dropout=case.dropout,
        attn_implementation="sdpa",
        torch_dtype="float32",
    )
    model = LlamaForCausalLM(config)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def wrap(case: Case, model: LlamaForCausalLM) -> torch.nn.Module:
    """Shards a model the way verl's worker does; the weights are the same on each rank from the start."""
    if case.wrap == "none":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=["fsdp"])
    if case.wrap == "fsdp2":
        precision = MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True
        )
        options = {
            "mesh": mesh,
            "mp_policy": precision,
            "reshard_after_forward": True,
            "shard_placement_fn": get_shard_placement_fn(fsdp_size=mesh.size()),
        }
        apply_fsdp2(model, options, {})
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params={"fsdp1": False, "fsdp1-orig": True}[case.wrap],
    )


def build_config(case: Case, **gradloc: Any) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2" if case.wrap == "fsdp2" else "fsdp",
        rollout_n=1,
        ppo_mini_batch_size=case.mini_batch,
        ppo_micro_batch_size_per_gpu=case.micro_batch,
        use_dynamic_bsz=case.dynamic,
        ppo_max_token_len_per_gpu=2 * (PROMPT + RESPONSE),
        ppo_epochs=case.epochs,
        policy_loss=PolicyLossConfig(loss_mode=case.loss_mode),
        loss_agg_mode=case.loss_agg_mode,
        use_kl_loss=case.kl,
        kl_loss_coef=KL_COEF,
        entropy_coeff=ENTROPY_COEF if case.entropy else 0,
        use_torch_compile=False,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        **gradloc,
    )


def stock_dp_actor() -> ModuleType:
    """The module of the unpatched actor, beside the patched one."""
    path = Path(os.environ["GRADLOC_BASE_TREE"]) / "verl/workers/actor/dp_actor.py"
    if "stock_dp_actor" not in sys.modules:
        spec = importlib.util.spec_from_file_location("stock_dp_actor", path)
        sys.modules["stock_dp_actor"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["stock_dp_actor"]


def build_actor(case: Case, module: ModuleType = dp_actor, **gradloc: Any) -> Any:
    model = wrap(case, build_model(case))
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[case.optimizer](model.parameters(), lr=LEARNING_RATE)
    return module.DataParallelPPOActor(build_config(case, **gradloc), model, optimizer)


def response_length(rank: int, row: int) -> int:
    """Ragged, with every length from 1 to RESPONSE; row 1 of rank 0 is fully masked."""
    return 0 if (rank, row) == (0, 1) else 1 + (7 * row + 3 * rank + 4) % RESPONSE


def build_batch(case: Case, rank: int, seed: int = 0) -> DataProto:
    """One rank's rows: left-padded prompts, right-padded responses, log-probs near those of the model."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(1, VOCABULARY, (case.rows, PROMPT + RESPONSE), generator=random)
    mask = torch.zeros_like(tokens)
    for row in range(case.rows):
        mask[row, row % 4 : PROMPT + response_length(rank, row)] = 1
    response_mask = mask[:, PROMPT:].float()
    tensors = {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": (tokens * mask)[:, PROMPT:],
        "response_mask": response_mask,
    }

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(case.rows, RESPONSE, generator=random)

    with torch.no_grad():
        log_probs = log_probs_and_entropy(build_model(case).eval(), tensors)[0]
    old_log_probs = log_probs + noise(0.05)
    advantages = torch.randn(case.rows, 1, generator=random).sign() + noise(0.2)
    # The first call of a run has the spikes; those after it are ordinary.
    for places, value, log_ratio in (case.planted, SPIKE, 0), (case.clipped, SPIKE, 1), (case.nan, math.nan, 0):
        for _, row, position in [place for place in places if place[0] == rank and seed == 0]:
            assert response_mask[row, position] == 1, f"no response token at row {row}, position {position}"
            advantages[row, position] = value if row % 2 or log_ratio else -value
            old_log_probs[row, position] = log_probs[row, position] - log_ratio
    tensors["old_log_probs"] = old_log_probs * response_mask
    tensors["ref_log_prob"] = (log_probs + noise(0.3)) * response_mask
    tensors["advantages"] = advantages * response_mask
    if case.rollout:
        tensors["rollout_log_probs"] = (old_log_probs + noise(0.02)) * response_mask
    return DataProto.from_dict(tensors, meta_info={"temperature": TEMPERATURE, "global_steps": 7 + seed})


def log_probs_and_entropy(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(
        input_ids=rows["input_ids"],
        attention_mask=rows["attention_mask"],
        position_ids=rows["position_ids"],
        use_cache=False,
    ).logits
    all_log_probs = (logits[:, PROMPT - 1 : -1] / TEMPERATURE).log_softmax(-1)
    log_probs = all_log_probs.gather(-1, rows["responses"].unsqueeze(-1)).squeeze(-1)
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1)


def split_rows(case: Case, config: FSDPActorConfig, mini_batch: DataProto) -> list[list[int]]:
    if case.dynamic:
        return prepare_dynamic_batch(mini_batch, max_token_len=config.ppo_max_token_len_per_gpu)[1]
    return [list(range(i, i + case.micro_batch)) for i in range(0, len(mini_batch), case.micro_batch)]


def token_weights(case: Case, mask: torch.Tensor, factor: float) -> torch.Tensor:
    """How much each token's own loss counts in the loss that is differentiated."""
    lengths = mask.sum(-1, keepdim=True)
    sequences = (lengths > 0).sum()
    mode = "seq-mean-token-mean" if case.loss_mode == "gspo" else case.loss_agg_mode
    weight = {
        "token-mean": 1 / lengths.sum(),
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-mean": 1 / (sequences * lengths.clamp(min=1)),
        "seq-mean-token-sum-norm": torch.tensor(1 / mask.shape[1]),
    }[mode]
    return factor * weight * mask


def layer_of(parameter: str) -> str:
    patterns = {
        r"model\.embed_tokens\.": "embed_tokens",
        r"model\.(layers\.\d+)\.": r"\1",
        r"model\.norm\.": "norm",
        r"lm_head\.": "lm_head",
    }
    for pattern, name in patterns.items():
        if match := re.match(pattern, parameter):
            return match.expand(name)
    raise KeyError(parameter)


def take_norms(model: torch.nn.Module) -> tuple[float, dict[str, float]]:
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            square = parameter.grad.double().square().sum().item()
            squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + square
    return math.sqrt(sum(squares.values())), {name: math.sqrt(square) for name, square in squares.items()}


def brute_force(case: Case, batch: DataProto, tokens: bool) -> tuple[list[Unit], list[float]]:
    """Every unit of one update_policy call, and the norm of every step's reduced gradient.

    They come from plain autograd on an unsharded copy of the model, which is trained alongside. Each rank takes the
    units of its own rows; all ranks get all of them. Without dropout and with SGD only.
    """
    config = build_config(case)
    model = build_model(case)
    units, norms = [], []
    for epoch in range(case.epochs):
        for number, mini_batch in enumerate(batch.split(case.mini_batch)):
            total = [torch.zeros_like(parameter) for parameter in model.parameters()]
            micro_batches = split_rows(case, config, mini_batch)
            for micro_batch, rows in enumerate(micro_batches):
                unit = Unit(epoch, number, dist.get_rank(), micro_batch, rows, 0, 0.0, 0.0, {})
                factor = len(rows) / case.mini_batch if case.dynamic else case.micro_batch / case.mini_batch
                measure_unit(case, config, model, unit, dict(mini_batch.batch[rows]), factor, tokens)
                for part, parameter in zip(total, model.parameters(), strict=True):
                    part += parameter.grad
                units.append(unit)
            norms.append(step(model, total, config.grad_clip))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, units)
    return [unit for rank_units in gathered for unit in rank_units], norms


def measure_unit(
    case: Case,
    config: FSDPActorConfig,
    model: torch.nn.Module,
    unit: Unit,
    rows: dict[str, torch.Tensor],
    factor: float,
    tokens: bool,
) -> None:
    """Fills in the unit, and leaves its gradient in the model."""
    mask = rows["response_mask"]
    weights = token_weights(case, mask, factor)
    unit.tokens = int(mask.sum())
    unit.weight = weights.square().sum().sqrt().item()
    log_prob, entropy = log_probs_and_entropy(model, rows)

    def loss(log_prob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        value, _ = get_policy_loss_fn(case.loss_mode)(
            old_log_prob=log_prob.detach() if case.on_policy else rows["old_log_probs"],
            log_prob=log_prob,
            advantages=rows["advantages"],
            response_mask=mask,
            loss_agg_mode=case.loss_agg_mode,
            config=config,
        )
        if case.entropy:
            value = value - ENTROPY_COEF * agg_loss(entropy, mask, case.loss_agg_mode)
        if case.kl:
            penalty = kl_penalty(log_prob, rows["ref_log_prob"], config.kl_loss_type)
            value = value + KL_COEF * agg_loss(penalty, mask, case.loss_agg_mode)
        return factor * value

    def only(values: torch.Tensor, row: int, position: int) -> torch.Tensor:
        kept = values.detach().clone()
        kept[row, position] = values[row, position]
        return kept

    leaf = log_prob.detach().requires_grad_()
    (coefficients,) = torch.autograd.grad(loss(leaf, entropy.detach()), leaf)
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for row, position in mask.nonzero().tolist() if tokens else []:
        model.zero_grad()
        loss(only(log_prob, row, position), only(entropy, row, position)).backward(retain_graph=True)
        weight = weights[row, position].item()
        norm, layer_norms = take_norms(model)
        token = Token(
            row=unit.rows[row],
            position=position,
            weight=weight,
            coefficient=coefficients[row, position].item(),
            norm=norm / weight,
            layer_norms={name: value / weight for name, value in layer_norms.items()},
            facts=token_facts(case, rows, log_prob, entropy, row, position),
        )
        unit.each.append(token)
        for part, parameter in zip(total, model.parameters(), strict=True):
            part += parameter.grad
    model.zero_grad()
    loss(log_prob, entropy).backward()
    unit.norm, unit.layer_norms = take_norms(model)
    if tokens:
        gaps = [(part - p.grad).norm() for part, p in zip(total, model.parameters(), strict=True)]
        unit.residual = torch.stack(gaps).norm().item() / unit.norm


def token_facts(
    case: Case, rows: dict[str, torch.Tensor], log_prob: torch.Tensor, entropy: torch.Tensor, row: int, position: int
) -> dict[str, float | None]:
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
        "ref_log_prob": rows["ref_log_prob"][row, position] if case.kl else None,
        "entropy": entropy[row, position] if case.entropy else None,
        "rollout_log_prob": None if rollout is None else rollout[row, position],
        "rollout_ratio": None if rollout is None else (log_prob - rollout)[row, position].exp(),
        "sequence_ratio": differences.mean().exp(),
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
                parameter -= LEARNING_RATE * gradient * (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm.item()


@dataclasses.dataclass
class Run:
    """What one or more update_policy calls of an actor left behind, on one rank."""

    metrics: list[dict[str, Any]]
    events: list[str]
    forwards: list[int]
    gradients: list[list[torch.Tensor]]
    parameters: list[torch.Tensor]
    rng: torch.Tensor
    training: list[bool]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    case: Case,
    module: ModuleType = dp_actor,
    calls: int = 1,
    prepare: Callable[[Any], None] | None = None,
    **gradloc: Any,
) -> Run:
    actor = build_actor(case, module, **gradloc)
    run = Run([], [], [], [], [], torch.empty(0), [])
    count = 0

    def count_forward(*_: Any) -> None:
        nonlocal count
        count += 1

    def keep_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        run.gradients.append([local(p.grad) for p in parameters if p.grad is not None])

    actor.actor_module.register_forward_pre_hook(count_forward)
    actor.actor_optimizer.register_step_pre_hook(keep_gradients)
    if prepare is not None:
        prepare(actor)
    torch.manual_seed(5 + dist.get_rank())
    for seed in range(calls):
        count = 0
        with torch.random.fork_rng():
            batch = build_batch(case, dist.get_rank(), seed)
        run.metrics.append(actor.update_policy(batch))
        run.forwards.append(count)
        if getattr(actor, "gradloc", None) is not None:
            run.events.append(json.dumps(actor.gradloc.events))
    run.parameters = [local(p) for p in actor.actor_module.parameters()]
    run.rng = torch.get_rng_state()
    run.training = [m.training for m in actor.actor_module.modules()]
    return run


def units_and_run(case: Case) -> tuple[list[Unit], list[float], Run]:
    """The brute force, and a run in which every unit counts as a spike."""
    units, norms = brute_force(case, build_batch(case, dist.get_rank()), tokens=False)
    return units, norms, train(case, spike_detection=True, grad_norm_threshold=1e-6, bisect_budget_steps=1)


def search(case: Case) -> tuple[list[Unit], list[float], float, Run]:
    """The brute force with every token, a threshold between the planted tokens and the others, and a run with it."""
    units, norms = brute_force(case, build_batch(case, dist.get_rank()), tokens=True)
    above, below = [], []
    for unit in units:
        for token in unit.each:
            place = (unit.rank, unit.mini_batch * case.mini_batch + token.row, token.position)
            (above if place in case.planted else below).append(token.norm)
    assert len(above) == len(case.planted) * case.epochs and min(above) > 100 * max(below)
    threshold = math.sqrt(min(above) * max(below))
    run = train(
        case,
        spike_detection=True,
        grad_norm_threshold=threshold,
        bisect_budget_steps=500,
        spike_trigger=case.trigger,
    )
    return units, norms, threshold, run


def both_triggers(case: Case) -> tuple[Run, Run]:
    """Runs with either trigger, and a threshold that the worst unit exceeds, but not the reduced gradient."""
    units, (norm,) = brute_force(case, build_batch(case, dist.get_rank()), tokens=False)
    of_unit = max(unit.norm / unit.weight for unit in units)
    of_mean = norm * dist.get_world_size() / math.hypot(*(unit.weight for unit in units))
    detection = {"spike_detection": True, "grad_norm_threshold": math.sqrt(of_unit * of_mean)}
    return train(case, spike_trigger="unit", **detection), train(case, spike_trigger="global", **detection)


def compare_runs(run: Run, other: Run) -> dict[str, bool]:
    """What is bit-identical in two runs."""

    def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))

    def shared(metrics: dict[str, Any]) -> str:
        return repr({name: value for name, value in metrics.items() if "gradloc" not in name})

    return {
        "gradients": len(run.gradients) == len(other.gradients) and all(map(equal, run.gradients, other.gradients)),
        "parameters": equal(run.parameters, other.parameters),
        "rng": torch.equal(run.rng, other.rng),
        "training flags": run.training == other.training,
        "metrics": list(map(shared, run.metrics)) == list(map(shared, other.metrics)),
    }


def identity(case: Case, budget: int) -> tuple[dict[str, bool], dict[str, bool], Run]:
    """Two calls with a search in the first, compared with detection off and with the unpatched actor."""
    searched = train(
        case, calls=2, spike_detection=True, grad_norm_threshold=IDENTITY_THRESHOLD, bisect_budget_steps=budget
    )
    off = train(case, calls=2, spike_detection=False)
    stock = train(case, stock_dp_actor(), calls=2)
    return compare_runs(searched, stock), compare_runs(off, stock), searched


def failing_search(case: Case, where: str) -> tuple[dict[str, bool], Run]:
    """A run in which one extra pass fails on rank 1 alone, compared with the unpatched actor."""
    ordinary = case.rows // case.micro_batch
    count = 0

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == ordinary + 1 and dist.get_rank() == 1:
            raise RuntimeError("planted failure")

    def prepare(actor: Any) -> None:
        forward = actor._forward_micro_batch

        def failing_forward(*arguments: Any, **options: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
            if where == "before the forward":
                fail()
            entropy, log_prob = forward(*arguments, **options)
            if where == "after the forward":
                fail()
            elif where == "in the backward":
                log_prob.register_hook(fail)
            return entropy, log_prob

        if where == "in a layer":
            layers = [m for m in actor.actor_module.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
            layers[1].register_forward_hook(fail)
        else:
            actor._forward_micro_batch = failing_forward

    stock = train(case, stock_dp_actor(), calls=2)
    run = train(
        case,
        calls=2,
        prepare=prepare,
        spike_detection=True,
        grad_norm_threshold=IDENTITY_THRESHOLD,
        bisect_budget_steps=100,
    )
    assert count > ordinary, "the failure was never reached"
    return compare_runs(run, stock), run


def watch(case: Case, threshold: float, calls: int) -> Run:
    return train(case, calls=calls, spike_detection=True, grad_norm_threshold=threshold)


def gradloc_of_a_default_actor() -> Any:
    return build_actor(Case()).gradloc


def weights_both_ways(case: Case) -> tuple[list[float], list[float]]:
    """The weights of rank 0's rows from the closed formula, and as the derivative of verl's aggregation."""
    lengths = torch.tensor([response_length(0, row) for row in range(case.rows)])
    mask = (torch.arange(RESPONSE) < lengths.unsqueeze(1)).float()
    losses = torch.zeros_like(mask, requires_grad=True)
    agg_loss(losses, mask, case.loss_agg_mode).backward()
    return token_weights(case, mask, 1.0).flatten().tolist(), losses.grad.flatten().tolist()
