"""Tiny actors of every kind: their case, model, wrapping and configuration, patched and as released.

Everything here runs inside the ranks of a cluster.
"""

import dataclasses
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cluster
import torch
import torch.distributed as dist
import verl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
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
from verl.models.transformers import tiled_mlp
from verl.models.transformers.monkey_patch import apply_monkey_patch, patch_forward_with_backends
from verl.utils import activation_offload, attention_utils
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy, get_shard_placement_fn
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

from gradloc.fsdp.failed_pass import RecordedCollectives
from gradloc.judge import judged

ENGINE = importlib.util.find_spec("verl.workers.actor") is None
if ENGINE:
    import engine_actor
    from engine_actor import EngineActor

    dp_actor = types.SimpleNamespace(DataParallelPPOActor=EngineActor)
else:
    from verl.workers.actor import dp_actor
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

DEVICE = torch.device(cluster.DEVICE)
LAYERS = 2
VOCABULARY = 67  # odd, so that not every shard has the same size
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
PROMPT, RESPONSE = 6, 10
# LlamaConfig's eos_token_id.
END = 2
# Fields of an event that come from rank 0 alone, or differ in time.
OF_RANK_0 = ("time", "replay", "identities", "warnings")
TEMPERATURE = 0.9
# A step moves log-probs by a few percent: enough to see, too little to clip what it trained on.
LEARNING_RATE = 1e-3
KL_COEF, ENTROPY_COEF = 0.3, 0.05
# Tokens whose ratio is further from 1 are rejected in bypass_mode.
BYPASS_RATIO = 1.03
FIRST_RELEASE = verl.__version__.startswith("0.7.0")
# In other releases, gspo is a mean over sequences whatever `loss_agg_mode` says.
GSPO_MODE_IS_FREE = verl.__version__.startswith("0.9.1")
# Rejection by a token's ratio: 0.7.1 has more kinds, under other names.
TOKEN_REJECTION = "token" if FIRST_RELEASE else "token_k1"
# The factor on a planted token's advantage: far above the spread of ordinary tokens, weights included.
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
    # verl 0.9's engine only: reduce the gradient in the last micro-batch alone; nested columns, as its trainer V1 has.
    deferred: bool = False
    nested: bool = False
    # For float16; also what the brute force multiplies its losses with.
    loss_scale: float = 1.0
    # verl's reshard_after_forward=False.
    stays_unsharded: bool = False
    # Two replicas of a model that is sharded over half of the ranks.
    hsdp: bool = False
    # FSDP's own offloading of parameters, gradients and optimizer; the actor has it with FSDP2.
    offload_policy: bool = False
    # Without the padding tokens; the log-probs fused with the LM head.
    packed: bool = False
    fused: bool = False
    # Images in responses, as tools may give them, and not in prompts.
    tool_images: bool = False
    activation_offload: bool = False
    checkpointing: bool = False
    reentrant: bool = False
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
        changed = [field for field in dataclasses.fields(self)[1:] if getattr(self, field.name) != field.default]
        values = {field.name: getattr(self, field.name) for field in changed}
        shown = (f"{name}={len(value) if isinstance(value, tuple) else value}" for name, value in values.items())
        return "-".join([self.wrap, *shown])

    @property
    def on_policy(self) -> bool:
        """Whether the old log-probs are those of the forward itself, as in verl 0.7's actor."""
        return not ENGINE and self.rows == self.mini_batch and self.epochs == 1

    @property
    def knows_entropy(self) -> bool:
        """Whether the actor computes the entropy: its loss has it or, in verl 0.7, the fused kernels give it."""
        return self.entropy or (self.fused and not ENGINE)

    @property
    def has_end(self) -> bool:
        return self.model not in ("moe", "vision")

    @property
    def tolerance(self) -> float:
        """The relative error of a norm.

        In float32, norms are sums over a few 10,000 gradient entries, whose rounding differs with the order of
        summation. In half precision every value on the way through the layers, some thirty in a row, is rounded
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


def build_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(1)
    if case.model == "moe":
        # Short inputs leave some of the experts idle.
        experts = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, attn_implementation="sdpa"))
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
            text_config={**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            vision_config=vision,
            vision_start_token_id=VISION_START,
            image_token_id=IMAGE,
            vision_end_token_id=VISION_END,
            attn_implementation="sdpa",
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        apply_monkey_patch(model, use_remove_padding=False)
    else:
        options = {"tie_word_embeddings": case.tied, "attention_dropout": case.dropout, "torch_dtype": "float32"}
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **options, attn_implementation="sdpa"))
    if case.model == "tiled":
        tile_mlps(model)
    if case.packed:
        attention_utils._get_attention_functions = padding_functions
    if case.fused:
        model.__class__ = type("FusedModel", (type(model),), {})  # it is the class whose forward verl replaces
        patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    model = train_only_parts(model, case.model, case.wrap)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": case.reentrant})
    return model.to(DEVICE).train()


def tile_mlps(model: torch.nn.Module) -> None:
    """Computes them in parts, as verl does, but not those of the whole class."""
    for layer in model.model.layers:
        layer.mlp.__class__ = type("TiledLlamaMLP", (type(layer.mlp),), {})
        tiled_mlp._patch_mlp_class(type(layer.mlp), tiled_mlp._mlp_forward_fn, num_shards=3)


def train_only_parts(model: torch.nn.Module, kind: str, wrapping: str) -> torch.nn.Module:
    """The model with a frozen layer and embedding ("frozen"), or with adapters ("lora"); as it is for other kinds."""
    if kind == "frozen":
        model.model.layers[1].requires_grad_(False)
        if wrapping != "fsdp1":  # which wants a flat parameter to be trainable as a whole
            model.model.embed_tokens.requires_grad_(False)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        # Without zeros in them: they would leave half of the adapters without a gradient. FSDP1 shards each on its own,
        # so that adapters in all layers would take thousands of collective calls.
        options = LoraConfig(
            r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
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
        apply_fsdp2(model, options, {})
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, is_lora=case.model == "lora"),
        device_id=DEVICE,
        device_mesh=mesh,
        sharding_strategy=SHARDING[case.stays_unsharded][case.hsdp],
        mixed_precision=MixedPrecision(param_dtype=case.dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
        cpu_offload=CPUOffload(offload_params=case.offload_policy),
        use_orig_params={"fsdp1": False, "fsdp1-orig": True}[case.wrap],
    )


def strategy(case: Case) -> str:
    """verl's word for the way of wrapping."""
    return "fsdp2" if case.wrap == "fsdp2" else "fsdp"


def settings_of(case: Case) -> dict[str, Any]:
    """Those that an actor and a critic have."""
    return {
        "strategy": strategy(case),
        "rollout_n": 1,
        "ppo_mini_batch_size": case.mini_batch,
        "ppo_micro_batch_size_per_gpu": case.micro_batch,
        "use_dynamic_bsz": case.dynamic,
        "ppo_max_token_len_per_gpu": 2 * (PROMPT + RESPONSE),
        "ppo_epochs": case.epochs,
        "loss_agg_mode": case.loss_agg_mode,
    }


def build_config(case: Case, **gradloc: Any) -> FSDPActorConfig:
    # verl 0.9.0, with which the plugin may be tested, reduces in the last micro-batch alone, and lacks the setting.
    choices = {field.name for field in dataclasses.fields(FSDPEngineConfig)}
    engine = {key: case.deferred for key in ("use_no_sync_for_gradient_accumulation",) if key in choices}
    return FSDPActorConfig(
        **settings_of(case),
        # clip_cov would draw at random those that it clips, were it not all of them.
        policy_loss=BypassLossConfig(loss_mode=case.loss_mode, clip_cov_ratio=1.0, kl_cov_ratio=0.2),
        use_kl_loss=case.kl,
        kl_loss_coef=KL_COEF,
        entropy_coeff=ENTROPY_COEF if case.entropy else 0,
        use_torch_compile=False,
        use_remove_padding=case.packed,
        use_fused_kernels=case.fused,
        fsdp_config=FSDPEngineConfig(dtype=case.precision, use_torch_compile=False, **engine),
        # Without bundles in the working directory, where no test asks for them, and whatever else the machine does.
        **{"spike_replay": 0, "bisect_budget_seconds": None, **gradloc},
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
    if getattr(actor, "gradloc", None) is not None and actor.gradloc._model is not None:
        for reduces, replay in actor.gradloc._model.recorded.items():
            check_collective_calls(replay, reduces)
    if case.precision == "float16":
        # The actor's own is for GPUs, and disabled on a CPU. The default group is that of the module's import, which
        # other tests have destroyed.
        group = dist.group.WORLD
        actor.scaler = ShardedGradScaler(device=DEVICE.type, init_scale=case.loss_scale, process_group=group)
    return actor


class OtherCallsError(BaseException):
    """No `Exception`, so that no search takes it for an error of its own."""


def check_collective_calls(replay: RecordedCollectives, reduces: bool) -> None:
    """Has every pass of a search raise an error if it makes other collective calls than those recorded before it.

    And if it reduces something, but its gradient is not to be reduced.
    """
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
        names = {call.signature[0] for call in replay._recorded_calls or ()}
        if not reduces and any("reduce" in name for name in names):
            raise OtherCallsError(f"a pass without reduction made the calls {names}")

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
    """The checkpoints of verl 0.7's worker, by its own methods, without the rest of it."""

    def __init__(self, actor: Any, manager: FSDPCheckpointManager) -> None:
        off = dict.fromkeys(("_is_rollout", "_is_lora", "_is_offload_param", "_is_offload_optimizer"), False)
        self.worker = types.SimpleNamespace(actor=actor, checkpoint_manager=manager, _is_actor=True, **off)

    def save_checkpoint(self, folder: str) -> None:
        inspect.unwrap(ActorRolloutRefWorker.save_checkpoint)(self.worker, folder)

    def load_checkpoint(self, folder: str) -> None:
        inspect.unwrap(ActorRolloutRefWorker.load_checkpoint)(self.worker, folder)


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


def parts(outputs: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Entropy and log-probs of an actor's forward, which 0.7.1 gives by name."""
    return outputs if FIRST_RELEASE else (outputs.get("entropys"), outputs["log_probs"])


def on_device(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def events_of(actor: Any) -> list[dict[str, Any]]:
    """Rank 0's of the last `update_policy`, judged, after a check of what this rank has. A collective call.

    The engine itself has only those of its last mini-batch.
    """
    own = (actor if ENGINE else actor.gradloc).events
    box = [own]
    dist.broadcast_object_list(box, src=0)
    for event, whole in zip(own, box[0], strict=True) if dist.get_rank() else ():
        pairs = zip(event["culprits"], whole["culprits"], strict=True)
        culprits = [{name: finished[name] for name in culprit} for culprit, finished in pairs]
        known = {**whole, "culprits": culprits, **{name: event[name] for name in OF_RANK_0}}
        assert repr(event) == repr(known) and event["replay"] is None
    return [judged(event) for event in box[0]]


def gathered(value: Any) -> list[Any]:
    """That of each rank. A collective call."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def stock_forward(case: Case, model: torch.nn.Module, rows: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of an unsharded model, by the unpatched actor."""
    if case.model == "vision":  # what shards a model moves its images
        images = [None if image is None else on_device(image) for image in rows["multi_modal_inputs"]]
        rows = {**rows, "multi_modal_inputs": images}
    actor = stock_dp_actor().DataParallelPPOActor(build_config(case), model)
    if ENGINE:
        return actor.forward(rows, TEMPERATURE)
    entropy, log_probs = parts(actor._forward_micro_batch(rows, TEMPERATURE, calculate_entropy=True))
    assert entropy is not None
    return log_probs, entropy
