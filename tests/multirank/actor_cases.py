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
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import verl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from verl import DataProto
from verl.models.transformers import tiled_mlp
from verl.models.transformers.monkey_patch import apply_monkey_patch, patch_forward_with_backends
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.utils import activation_offload, attention_utils
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy, get_shard_placement_fn
from verl.utils.gradloc.fsdp.recorded_collectives import RecordedCollectives
from verl.utils.seqlen_balancing import prepare_dynamic_batch
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

ENGINE = importlib.util.find_spec("verl.workers.actor") is None
if ENGINE:
    import engine_actor
    from engine_actor import EngineActor

    dp_actor = types.SimpleNamespace(DataParallelPPOActor=EngineActor)
else:
    from verl.utils.gradloc.adapters import dp_actor as adapter
    from verl.workers.actor import dp_actor

# tests/gpu/ runs these cases on a GPU.
DEVICE = torch.device(os.environ.get("GRADLOC_TEST_DEVICE", "cpu"))
VOCABULARY = 67  # odd, so that not every shard has the same size
PROMPT, RESPONSE = 6, 10
TEMPERATURE = 0.9
# A step moves log-probs by a few percent: enough to see, too little to clip what it trained on.
LEARNING_RATE = 1e-3
KL_COEF, ENTROPY_COEF = 0.3, 0.05
# Tokens whose ratio is further from 1 are rejected in bypass_mode.
BYPASS_RATIO = 1.03
FIRST_RELEASE = verl.__version__.startswith("0.7.0")
# Rejection by a token's ratio: 0.7.1 has more kinds, under other names.
TOKEN_REJECTION = "token" if FIRST_RELEASE else "token_k1"
# What a planted token's advantage is multiplied with: far above the spread of ordinary tokens, weights included.
SPIKE = 5e3
# Between ordinary and planted tokens with a wide margin, for runs that the brute force cannot follow.
IDENTITY_THRESHOLD = 1e3
# By `Case.stays_unsharded`, then by `Case.hsdp`, as verl chooses.
SHARDING = (
    (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
    (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2),
)
# The vision-language model's tokens for an image: these follow the up to three padding tokens of a prompt.
VISION_START, IMAGE, VISION_END = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of running the actor. Batch sizes are those of one rank."""

    wrap: str = "fsdp2"
    # "llama", "lora", "frozen", "moe", "tiled" or "vision"
    model: str = "llama"
    precision: str = "float32"
    attention: str = "sdpa"
    layers: int = 3
    # verl 0.9's engine only: reduce the gradient in the last micro-batch alone; nested columns, as its trainer V1 has.
    deferred: bool = False
    nested: bool = False
    # For float16; also what the brute force multiplies its losses with.
    loss_scale: float = 1.0
    # The first two layers in one `fully_shard([...])`, and the norm with the LM head.
    grouped: bool = False
    # verl's reshard_after_forward=False.
    stays_unsharded: bool = False
    # Two replicas of a model that is sharded over half of the ranks.
    hsdp: bool = False
    # FSDP2's own offloading of parameters, gradients and optimizer.
    offload_policy: bool = False
    # Without the padding tokens; the log-probs fused with the LM head.
    packed: bool = False
    fused: bool = False
    # Images in responses, as tools may give them, and not in prompts.
    tool_images: bool = False
    activation_offload: bool = False
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
    # The log-probs of the reference policy, which a KL penalty in the reward needs, too.
    reference: bool = False
    entropy: bool = False
    rollout: bool = False
    rollout_weights: bool = False
    trigger: str = "unit"
    # (rank, row, position) of tokens with a spike, with a spike that PPO's clipping removes, and with a NaN.
    planted: tuple[tuple[int, int, int], ...] = ()
    clipped: tuple[tuple[int, int, int], ...] = ()
    # With a large ratio and a negative advantage, which only dual clipping removes.
    dual_clipped: tuple[tuple[int, int, int], ...] = ()
    nan: tuple[tuple[int, int, int], ...] = ()
    # (rank, row) of rows with an advantage of zero, as those of a group with equal rewards.
    still: tuple[tuple[int, int], ...] = ()

    @property
    def id(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "loss_scale":
                continue
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
        """Whether the old log-probs are those of the forward itself, as in verl 0.7's actor."""
        return not ENGINE and self.rows == self.mini_batch and self.epochs == 1

    @property
    def tolerance(self) -> float:
        """The relative error of a norm.

        In float32, norms are sums over a few 10,000 gradient entries, whose rounding differs with the order of
        summation. In half precision every value on the way through the three layers, some thirty in a row, is rounded
        to 8 or 11 bits: √30 roundings of 2^-9 or 2^-12, taken twice for a norm to spare.
        """
        return {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[self.precision]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)


@dataclasses.dataclass
class BypassLossConfig(PolicyLossConfig):
    """verl's, with what its trainer adds for bypass_mode."""

    rollout_correction: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"rollout_rs": TOKEN_REJECTION, "rollout_rs_threshold": BYPASS_RATIO}
    )


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
    # √Σw² over the tokens with a coefficient that is not zero.
    weight: float
    norm: float
    layer_norms: dict[str, float]
    each: list[Token] = dataclasses.field(default_factory=list)
    # How far the sum of the tokens' gradients is from the gradient of the unit, relative to the latter.
    residual: float = 0.0
    # Of the tokens with a weight: the log-probs of training, of the old policy and, if there are any, of the rollout.
    log_probs: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.epoch, self.mini_batch, self.rank, self.micro_batch


def build_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    if case.model == "moe":
        # Short inputs leave some of the experts idle.
        experts = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, attn_implementation="sdpa"))
    elif case.model == "vision":
        vision = {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        }
        config = Qwen2_5_VLConfig(
            text_config={**sizes, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            vision_config=vision,
            vision_start_token_id=VISION_START,
            image_token_id=IMAGE,
            vision_end_token_id=VISION_END,
            attn_implementation="sdpa",
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        apply_monkey_patch(model, use_remove_padding=False)
    else:
        config = LlamaConfig(
            **sizes,
            tie_word_embeddings=case.tied,
            attention_dropout=case.dropout,
            attn_implementation=case.attention,
            torch_dtype="float32",
        )
        model = LlamaForCausalLM(config)
    if case.model == "tiled":
        for layer in model.model.layers:  # verl does this to the whole class
            layer.mlp.__class__ = type("TiledLlamaMLP", (type(layer.mlp),), {})
            tiled_mlp._patch_mlp_class(type(layer.mlp), tiled_mlp._mlp_forward_fn, num_shards=3)
    if case.packed and case.attention == "sdpa":
        attention_utils._get_attention_functions = padding_functions
    if case.fused:
        model.__class__ = type("FusedModel", (type(model),), {})  # it is the class whose forward verl replaces
        patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    model = train_only_parts(model, case.model, case.wrap)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(DEVICE).train()


def train_only_parts(model: torch.nn.Module, kind: str, wrapping: str) -> torch.nn.Module:
    """The model with a frozen layer and embedding ("frozen"), or with adapters ("lora"); as it is for other kinds."""
    if kind == "frozen":
        model.model.layers[1].requires_grad_(False)
        if wrapping != "fsdp1":  # which wants a flat parameter to be trainable as a whole
            model.model.embed_tokens.requires_grad_(False)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        # Without zeros in them: they would leave half of the adapters without a gradient.
        options = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, options)
    return model


def wrap(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    """Shards a model the way verl's worker does; the weights are the same on each rank from the start."""
    if case.wrap == "none":
        return model
    shape = (2, dist.get_world_size() // 2) if case.hsdp else (dist.get_world_size(),)
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=["ddp", "fsdp"] if case.hsdp else ["fsdp"])
    if case.wrap == "fsdp2":
        precision = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
        options = {
            "mesh": mesh,
            "mp_policy": precision,
            "reshard_after_forward": not case.stays_unsharded,
            "shard_placement_fn": get_shard_placement_fn(fsdp_size=shape[-1]),
        }
        if case.offload_policy:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE.type != "cpu")
        if case.grouped:
            fully_shard([*model.model.layers[:2]], **options)
            fully_shard([model.model.norm, model.lm_head], **options)
            fully_shard(model, **options)
            return model
        apply_fsdp2(model, options, {})
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, is_lora=case.model == "lora"),
        device_id=DEVICE,
        device_mesh=mesh,
        sharding_strategy=SHARDING[case.stays_unsharded][case.hsdp],
        mixed_precision=MixedPrecision(param_dtype=case.dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
        use_orig_params={"fsdp1": False, "fsdp1-orig": True}[case.wrap],
    )


def strategy(case: Case) -> str:
    """verl's word for the way of wrapping."""
    return "fsdp2" if case.wrap == "fsdp2" else "fsdp"


def build_config(case: Case, **gradloc: Any) -> FSDPActorConfig:
    engine = {"use_no_sync_for_gradient_accumulation": case.deferred} if ENGINE else {}
    return FSDPActorConfig(
        strategy=strategy(case),
        rollout_n=1,
        ppo_mini_batch_size=case.mini_batch,
        ppo_micro_batch_size_per_gpu=case.micro_batch,
        use_dynamic_bsz=case.dynamic,
        ppo_max_token_len_per_gpu=2 * (PROMPT + RESPONSE),
        ppo_epochs=case.epochs,
        # clip_cov would draw at random those that it clips, were it not all of them.
        policy_loss=BypassLossConfig(loss_mode=case.loss_mode, clip_cov_ratio=1.0, kl_cov_ratio=0.2),
        loss_agg_mode=case.loss_agg_mode,
        use_kl_loss=case.kl,
        kl_loss_coef=KL_COEF,
        entropy_coeff=ENTROPY_COEF if case.entropy else 0,
        use_torch_compile=False,
        use_remove_padding=case.packed,
        use_fused_kernels=case.fused,
        fsdp_config=FSDPEngineConfig(dtype=case.precision, use_torch_compile=False, **engine),
        # Without bundles in the working directory, where no test asks for them.
        **{"spike_replay": 0, **gradloc},
    )


def stock_dp_actor() -> Any:
    """The module of the unpatched actor, beside the patched one."""
    if ENGINE:
        return types.SimpleNamespace(DataParallelPPOActor=engine_actor.StockEngineActor)
    return stock_module("verl/workers/actor/dp_actor.py")


def stock_module(path: str) -> ModuleType:
    """A module of the unpatched tree, beside the patched one."""
    name = "stock_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(os.environ["GRADLOC_BASE_TREE"]) / path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def build_actor(
    case: Case,
    module: Any = dp_actor,
    change_model: Callable[[torch.nn.Module], None] = lambda _: None,
    **gradloc: Any,
) -> Any:
    model = build_model(case)
    change_model(model)
    model = wrap(case, model)
    if case.activation_offload:
        if DEVICE.type == "cpu":  # pinned memory takes a GPU
            activation_offload.SynchronizedGroupOffloadHandler.offload.__defaults__ = (False,)
        activation_offload.enable_activation_offloading(model, strategy(case), case.checkpointing)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[case.optimizer](model.parameters(), lr=LEARNING_RATE)
    actor = module.DataParallelPPOActor(build_config(case, **gradloc), model, optimizer)
    if ENGINE:
        actor.nested = case.nested
    if getattr(actor, "gradloc", None) is not None:
        compare_collective_calls(actor.gradloc._model._recorded)
    if case.precision == "float16":
        # The actor's own is for GPUs, and disabled on a CPU.
        actor.scaler = grad_scaler(case.loss_scale)
    return actor


class OtherCallsError(BaseException):
    """No `Exception`, so that no search takes it for an error of its own."""


def compare_collective_calls(replay: RecordedCollectives) -> None:
    """Has every pass of a search raise an error if it makes other collective calls than those recorded before it."""
    recording = replay.recording

    @contextmanager
    def comparing(**options: Any) -> Iterator[None]:
        recorded = replay._recorded_calls
        with recording(**options):
            yield
        if replay._can_replay and recorded is not None:
            before, now = ([call.signature for call in calls] for calls in (recorded, replay._recorded_calls))
            if before != now:
                raise OtherCallsError(f"{before} were recorded, {now} were made")

    replay.recording = comparing


def checkpoints(actor: Any, scheduler: Any = None, checkpoint_config: dict[str, Any] | None = None) -> Any:
    """What saves and loads the actor's checkpoints: as verl 0.7's worker does, or the engine."""
    manager = FSDPCheckpointManager(
        actor.actor_module, actor.actor_optimizer, scheduler, checkpoint_config=checkpoint_config
    )
    if not ENGINE:
        return WorkerCheckpoints(actor, manager)
    actor.engine.checkpoint_manager = manager
    return actor.engine


class WorkerCheckpoints:
    """The calls around a checkpoint in verl 0.7's worker."""

    def __init__(self, actor: Any, manager: FSDPCheckpointManager) -> None:
        self.actor, self.manager = actor, manager

    def save_checkpoint(self, folder: str) -> None:
        self.manager.save_checkpoint(folder)
        adapter.save_state(self.actor, self.manager, folder)

    def load_checkpoint(self, folder: str) -> None:
        self.manager.load_checkpoint(folder)
        adapter.load_state(self.actor, self.manager, folder)


def grad_scaler(scale: float) -> ShardedGradScaler:
    # Its default group is the one of its module's import, which other tests have destroyed.
    return ShardedGradScaler(device=DEVICE.type, init_scale=scale, process_group=dist.group.WORLD)


def padding_functions() -> tuple[Callable[..., Any], ...]:
    """Stand-ins for flash attention's functions around the removal of padding, for where it is not installed."""

    def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return values[indices]

    def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
        padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
        return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))

    def rearrange(values: torch.Tensor, pattern: str) -> torch.Tensor:
        assert pattern == "b s ... -> (b s) ..."
        return values.flatten(0, 1)

    def unpad_input(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        indices = mask.flatten().nonzero().flatten()
        lengths = torch.nn.functional.pad(mask.sum(-1).cumsum(0), (1, 0))
        return values.flatten(0, 1)[indices], indices, lengths

    return index_first_axis, pad_input, rearrange, unpad_input


def response_length(rank: int, row: int) -> int:
    """Ragged, with every length from 1 to RESPONSE; row 1 of rank 0 is fully masked."""
    return 0 if (rank, row) == (0, 1) else 1 + (7 * row + 3 * rank + 4) % RESPONSE


def build_batch(case: Case, rank: int, seed: int = 0) -> DataProto:
    """One rank's rows: left-padded prompts, right-padded responses, log-probs near those of the model."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    special = VISION_END if case.model == "vision" else 0
    tokens = torch.randint(special + 1, VOCABULARY, (case.rows, PROMPT + RESPONSE), generator=random)
    mask = torch.zeros_like(tokens)
    for row in range(case.rows):
        mask[row, row % 4 : PROMPT + response_length(rank, row)] = 1
    response_mask = mask[:, PROMPT:].float()
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    images = np.array([None] * case.rows, dtype=object)
    if case.model == "vision":
        # Of the text and of the three axes of an image: as wide as one token, it leaves all four alike.
        position_ids = position_ids.unsqueeze(1).expand(-1, 4, -1).clone()
        for row in range(0, case.rows, 3):
            # Four patches make one token; two rows of three have no image.
            start = PROMPT - 3
            if case.tool_images:
                start = PROMPT + 1
                assert response_length(rank, row) > 4
                response_mask[row, 1:4] = 0
            tokens[row, start : start + 3] = torch.tensor([VISION_START, IMAGE, VISION_END])
            patches = torch.randn(4, 3 * 2 * 4 * 4, generator=random)
            images[row] = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2]])}
    tensors = {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "position_ids": position_ids,
        "responses": (tokens * mask)[:, PROMPT:],
        "response_mask": response_mask,
    }

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(case.rows, RESPONSE, generator=random)

    others = {"multi_modal_inputs": images} if case.model == "vision" else {}
    with torch.no_grad():
        log_probs = log_probs_and_entropy(case, build_model(case).eval(), {**on_device(tensors), **others})[0]
    log_probs = log_probs.float().cpu()
    old_log_probs = log_probs + noise(0.05)
    advantages = torch.randn(case.rows, 1, generator=random).sign() + noise(0.2)
    # The first call of a run has the spikes; those after it are ordinary.
    for places, value, log_ratio in (
        (case.planted, SPIKE, 0),
        (case.clipped, SPIKE, 1),
        (case.dual_clipped, -SPIKE, 2),
        (case.nan, math.nan, 0),
    ):
        for _, row, position in [place for place in places if place[0] == rank and seed == 0]:
            assert response_mask[row, position] == 1, f"no response token at row {row}, position {position}"
            advantages[row, position] = value if row % 2 or log_ratio else -value
            old_log_probs[row, position] = log_probs[row, position] - log_ratio
    advantages[[row for at, row in case.still if at == rank]] = 0.0
    tensors["old_log_probs"] = old_log_probs * response_mask
    reference = (log_probs + noise(0.3)) * response_mask
    if case.reference or case.kl:
        tensors["ref_log_prob"] = reference
    tensors["advantages"] = advantages * response_mask
    if case.rollout:
        tensors["rollout_log_probs"] = (old_log_probs + noise(0.02)) * response_mask
    if case.rollout_weights:
        tensors["rollout_is_weights"] = noise(0.3).exp() * response_mask
    return DataProto.from_dict(tensors, others, meta_info={"temperature": TEMPERATURE, "global_steps": 7 + seed})


def parts(outputs: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Entropy and log-probs of an actor's forward, which 0.7.1 gives by name."""
    return outputs if FIRST_RELEASE else (outputs.get("entropys"), outputs["log_probs"])


def with_hook_on_log_probs(forward: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """An actor's forward that puts a hook on the log-probs it computes."""

    def of_the_actor(*arguments: Any, **options: Any) -> Any:
        outputs = forward(*arguments, **options)
        parts(outputs)[1].register_hook(hook)
        return outputs

    def of_the_engine(micro_batch: Any, loss: Callable[..., Any], forward_only: bool) -> Any:
        def computed(model_output: dict[str, torch.Tensor], **others: Any) -> Any:
            model_output["log_probs"].register_hook(hook)
            return loss(model_output=model_output, **others)

        return forward(micro_batch, computed, forward_only)

    return of_the_engine if ENGINE else of_the_actor


def on_device(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def log_probs_and_entropy(
    case: Case, model: torch.nn.Module, rows: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an unsharded model: by plain torch, or by the unpatched actor where there is more to it."""
    if case.precision != "float32" or case.packed or case.fused or case.model == "vision":
        actor = stock_dp_actor().DataParallelPPOActor(build_config(case), model)
        if ENGINE:
            return actor.forward(rows, TEMPERATURE)
        entropy, log_probs = parts(actor._forward_micro_batch(rows, TEMPERATURE, calculate_entropy=True))
        assert entropy is not None
        return log_probs, entropy
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
        group = dist.group.WORLD if ENGINE else None
        return prepare_dynamic_batch(mini_batch, config.ppo_max_token_len_per_gpu, dp_group=group)[1]
    return [list(range(i, i + case.micro_batch)) for i in range(0, len(mini_batch), case.micro_batch)]


def token_weights(case: Case, mask: torch.Tensor, factor: float, info: dict[str, Any]) -> torch.Tensor:
    """How much each token's own loss counts in the loss that is differentiated.

    verl 0.9's engine takes its means over the whole mini-batch of all ranks, whose sizes are in `info`. Of the losses
    with an aggregation of their own, it has left two theirs: sapo and geo_mean.
    """
    lengths = mask.sum(-1, keepdim=True)
    if ENGINE and case.loss_mode != "geo_mean":
        of_sequence = info["dp_size"] / info["global_batch_size"]
        weight = {
            "token-mean": torch.tensor(info["dp_size"] / info["batch_num_tokens"]),
            "seq-mean-token-sum": torch.tensor(of_sequence),
            "seq-mean-token-mean": of_sequence / lengths.clamp(min=1),
            "seq-mean-token-sum-norm": torch.tensor(of_sequence / mask.shape[1]),
        }["seq-mean-token-mean" if case.loss_mode == "sapo" else case.loss_agg_mode]
        return torch.where(mask > 0, weight, 0.0)
    # The geometric mean alone counts sequences without a token, too.
    sequences = len(mask) if case.loss_mode == "geo_mean" else (lengths > 0).sum()
    of_sequences = case.loss_mode in ("gspo", "sapo", "geo_mean")
    mode = "seq-mean-token-mean" if of_sequences else case.loss_agg_mode
    weight = {
        "token-mean": 1 / lengths.sum().clamp(min=1),
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-mean": 1 / (sequences * lengths.clamp(min=1)),
        # Only 0.7.1 takes the mean that the name promises.
        "seq-mean-token-sum-norm": torch.tensor(1 / mask.shape[1]) / (1 if FIRST_RELEASE else sequences),
    }[mode]
    return torch.where(mask > 0, factor * weight, 0.0)


def layer_of(parameter: str) -> str:
    patterns = {
        r"embed_tokens\.": "embed_tokens",
        r"(visual\.blocks\.\d+)\.": r"\1",
        r"(visual\..*)\.(weight|bias)": r"\1",
        r"(layers\.\d+)\.mlp\.gate\.": r"\1.router",
        r"(layers\.\d+)\.": r"\1",
        r"model\.norm\.": "norm",
        r"lm_head\.": "lm_head",
    }
    for pattern, name in patterns.items():
        if match := re.search(pattern, parameter):
            return match.expand(name)
    raise KeyError(parameter)


def take_gradients(case: Case, model: torch.nn.Module) -> list[torch.Tensor]:
    """In float32, free of the loss scale, of all parameters; zero where a backward did not come."""
    return [
        torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float() / case.loss_scale
        for p in model.parameters()
    ]


def take_norms(case: Case, model: torch.nn.Module) -> tuple[float, dict[str, float]]:
    squares: dict[str, float] = {}
    for (name, _), gradient in zip(model.named_parameters(), take_gradients(case, model), strict=True):
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + gradient.double().square().sum().item()
    return math.sqrt(sum(squares.values())), {name: math.sqrt(square) for name, square in squares.items()}


def brute_force(case: Case, batch: DataProto, tokens: bool, steps: int | None = None) -> tuple[list[Unit], list[float]]:
    """Every unit of one update_policy call (or of its first steps), and the norm of every step's reduced gradient.

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
            if steps is not None and len(norms) == steps:
                break
            total = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
            micro_batches = split_rows(case, config, mini_batch)
            if ENGINE:
                tokens_of_all = mini_batch.batch["response_mask"].sum().to(DEVICE)
                dist.all_reduce(tokens_of_all)
                config.global_batch_info.update(
                    dp_size=dist.get_world_size(),
                    batch_num_tokens=tokens_of_all.item(),
                    global_batch_size=case.mini_batch * dist.get_world_size(),
                )
            for micro_batch, rows in enumerate(micro_batches):
                unit = Unit(epoch, number, dist.get_rank(), micro_batch, rows, 0, 0.0, 0.0, {})
                factor = len(rows) / case.mini_batch if case.dynamic else case.micro_batch / case.mini_batch
                factor = 1.0 if ENGINE else factor
                others = {name: values[rows] for name, values in mini_batch.non_tensor_batch.items()}
                tensors = on_device(mini_batch.batch[rows])
                measure_unit(case, config, model, unit, {**tensors, **others}, factor, tokens)
                for part, gradient in zip(total, take_gradients(case, model), strict=True):
                    part += gradient
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
            penalty = kl_penalty(log_prob, rows["ref_log_prob"], config.kl_loss_type)
            value = value + KL_COEF * agg_loss(penalty, mask, case.loss_agg_mode, **info)
        return factor * value

    def only(values: torch.Tensor, row: int, position: int) -> torch.Tensor:
        kept = values.detach().clone()
        kept[row, position] = values[row, position]
        return kept

    leaves = [log_prob.detach().requires_grad_(), entropy.detach().requires_grad_()]
    found = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    coefficients = found[0]
    unit.weight = weights[(found[0] != 0) | (found[1] != 0)].square().sum().sqrt().item()
    total = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for row, position in mask.nonzero().tolist() if tokens else []:
        model.zero_grad()
        share = loss(only(log_prob, row, position), only(entropy, row, position))
        (case.loss_scale * share).backward(retain_graph=True)
        weight = weights[row, position].item()
        norm, layer_norms = take_norms(case, model)
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
        for part, gradient in zip(total, take_gradients(case, model), strict=True):
            part += gradient
    model.zero_grad()
    (case.loss_scale * loss(log_prob, entropy)).backward()
    unit.norm, unit.layer_norms = take_norms(case, model)
    if tokens:
        gaps = [(part - g).norm() for part, g in zip(total, take_gradients(case, model), strict=True)]
        unit.residual = torch.stack(gaps).norm().item() / (unit.norm or 1.0)


def token_facts(
    case: Case, rows: dict[str, Any], log_prob: torch.Tensor, entropy: torch.Tensor, row: int, position: int
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
        # Without a KL loss, a KL penalty in the reward has it in the batch.
        "ref_log_prob": rows["ref_log_prob"][row, position] if "ref_log_prob" in rows else None,
        "entropy": entropy[row, position] if case.entropy or (case.fused and not ENGINE) else None,
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
                if parameter.requires_grad:
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


def events_of(actor: Any) -> list[dict[str, Any]]:
    """Those of the last `update_policy`; the engine itself has only those of its last mini-batch."""
    return (actor if ENGINE else actor.gradloc).events


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    case: Case,
    module: Any = dp_actor,
    calls: int = 1,
    prepare: Callable[[Any], None] | None = None,
    change_model: Callable[[torch.nn.Module], None] = lambda _: None,
    change_batch: Callable[[DataProto], None] = lambda _: None,
    **gradloc: Any,
) -> Run:
    actor = build_actor(case, module, change_model, **gradloc)
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
        change_batch(batch)
        run.metrics.append(actor.update_policy(batch))
        run.forwards.append(count)
        if getattr(actor, "gradloc", None) is not None:
            run.events.append(json.dumps(events_of(actor)))
    run.parameters = [local(p) for p in actor.actor_module.parameters()]
    run.rng = torch.get_rng_state()
    if DEVICE.type == "cuda":
        run.rng = torch.cat([run.rng, torch.cuda.get_rng_state()])
    run.training = [m.training for m in actor.actor_module.modules()]
    return run


def units_and_run(case: Case) -> tuple[list[Unit], list[float], Run]:
    """The brute force, and a run in which every unit counts as a spike."""
    units, norms = brute_force(case, build_batch(case, dist.get_rank()), tokens=False)
    return units, norms, train(case, spike_detection=True, grad_norm_threshold=1e-6, bisect_budget_steps=2)


def search(case: Case, **gradloc: Any) -> tuple[list[Unit], list[float], float, Run]:
    """The brute force with every token, a threshold between the planted tokens and the others, and a run with it."""
    units, norms = brute_force(case, build_batch(case, dist.get_rank()), tokens=True)
    above, below = [], []
    for unit in units:
        for token in unit.each:
            place = (unit.rank, unit.mini_batch * case.mini_batch + token.row, token.position)
            (above if place in case.planted else below).append(token.norm)
    assert len(above) == len(case.planted) * case.epochs and min(above) > 50 * max(below)
    threshold = math.sqrt(min(above) * max(below))
    run = train(
        case,
        spike_detection=True,
        grad_norm_threshold=threshold,
        bisect_budget_steps=500,
        spike_trigger=case.trigger,
        **gradloc,
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

    def same_figures(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, list) and isinstance(theirs, list):
            return len(ours) == len(theirs) and all(map(same_figures, ours, theirs))
        # Of a micro-batch without response tokens the unpatched actor logs NaN.
        return repr(ours) == repr(theirs) or repr(theirs) == "nan"

    def same_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
        names = [name for name in {**ours, **theirs} if "gradloc" not in name]
        return all(same_figures(ours.get(name), theirs.get(name)) for name in names)

    return {
        "gradients": len(run.gradients) == len(other.gradients) and all(map(equal, run.gradients, other.gradients)),
        "parameters": equal(run.parameters, other.parameters),
        "rng": torch.equal(run.rng, other.rng),
        "training flags": run.training == other.training,
        "metrics": len(run.metrics) == len(other.metrics) and all(map(same_metrics, run.metrics, other.metrics)),
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

        def failing_forward(*arguments: Any, **options: Any) -> Any:
            if where == "before the forward":
                fail()
            outputs = forward(*arguments, **options)
            if where == "after the forward":
                fail()
            return outputs

        if where == "in a layer":
            layers = [m for m in actor.actor_module.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
            layers[1].register_forward_hook(fail)
        elif where == "in the backward":
            actor._forward_micro_batch = with_hook_on_log_probs(forward, fail)
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


def metrics_with_rejected_rows(rejected: tuple[int, int], case: Case, detection: bool = False) -> dict[str, Any]:
    """What an update reports once rejection sampling has left nothing of the first few rows of both ranks."""

    def reject(batch: DataProto) -> None:
        batch.batch["response_mask"][: rejected[dist.get_rank()]] = 0

    return train(case, change_batch=reject, spike_detection=detection).metrics[0]


def gradloc_of_a_default_actor() -> Any:
    return build_actor(Case()).gradloc


def weights_both_ways(case: Case) -> tuple[list[float], list[float]]:
    """The weights of rank 0's rows from the closed formula, and as the derivative of verl's aggregation."""
    lengths = torch.tensor([response_length(0, row) for row in range(case.rows)])
    mask = (torch.arange(RESPONSE) < lengths.unsqueeze(1)).float()
    losses = torch.zeros_like(mask, requires_grad=True)
    sizes = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 16} if ENGINE else {}
    agg_loss(losses, mask, case.loss_agg_mode, **sizes).backward()
    return token_weights(case, mask, 1.0, sizes).flatten().tolist(), losses.grad.flatten().tolist()
