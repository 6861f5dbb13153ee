"""verl 0.9's FSDP engine behind the calls of verl 0.7's actor, so that tests and benchmarks run on both."""

import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import Metric
from verl.utils.profiler import DistProfiler
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from gradloc.adapters.engines import WatchedEngine


def stock_engine() -> type[FSDPEngineWithLMHead]:
    """The engine of the unpatched tree, beside the patched one."""
    name = "verl.workers.engine.fsdp.stock_transformer_impl"
    if name not in sys.modules:
        path = Path(os.environ["GRADLOC_BASE_TREE"]) / "verl/workers/engine/fsdp/transformer_impl.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        with mock.patch.object(EngineRegistry, "_engines", {}):  # it registers itself
            spec.loader.exec_module(module)
    return sys.modules[name].FSDPEngineWithLMHead


def with_given_parts(engine: type[FSDPEngineWithLMHead], watched: bool) -> type[FSDPEngineWithLMHead]:
    """An engine that is given its module and optimizer by an `actor`, whose forward a test can replace."""

    class GivenParts(engine):
        actor: Any

        def _build_model_optimizer(self) -> None:
            self.module, self.optimizer = self.actor.actor_module, self.actor.actor_optimizer
            if self.optimizer is not None:
                self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0, total_iters=0)
            precision = getattr(torch, self.engine_config.dtype)
            self._autocast_dtype = precision
            self._uses_fsdp2_cpu_offload_policy = True  # saving a checkpoint would move the model to a GPU first

        def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            return self.actor._forward_micro_batch(micro_batch, loss_function, forward_only)

        def ordinary_forward_step(self, *arguments: Any) -> Any:
            return super().forward_step(*arguments)

        def optimizer_step(self) -> float:
            self.scaler = self.actor.scaler
            return super().optimizer_step()

        def optimizer_zero_grad(self) -> None:
            self.scaler = self.actor.scaler  # tests give their own
            super().optimizer_zero_grad()

    return type("TestedEngine", (WatchedEngine, GivenParts), {}) if watched else GivenParts


def built(engine_class: type, config: Any, packed: bool, loss: Any, tokenizer: Any = None, **attributes: Any) -> Any:
    """verl's worker around an engine, without its process group and its registration with Ray.

    Args:
        engine_class (type): The engine's class.
        config (ActorConfig | CriticConfig): The configuration that the loss is bound to.
        packed (bool): `use_remove_padding`.
        loss (Callable): verl's loss function.
        tokenizer (Any): The model's.
        attributes (Any): Those that the engine has before it is initialized.
    """
    engine_config = config.engine
    for name, value in {  # as verl's worker sets them
        "use_dynamic_bsz": config.use_dynamic_bsz,
        "micro_batch_size_per_gpu": config.ppo_micro_batch_size_per_gpu,
        "max_token_len_per_gpu": config.ppo_max_token_len_per_gpu,
        "use_fused_kernels": getattr(config, "use_fused_kernels", False),
    }.items():
        object.__setattr__(engine_config, name, value)
    model_config = types.SimpleNamespace(
        use_remove_padding=packed,
        use_fused_kernels=engine_config.use_fused_kernels,
        lora_rank=0,
        tokenizer=tokenizer,
        trust_remote_code=False,
        get_processor=lambda: None,
        get=lambda name, default=None: getattr(model_config, name, default),
    )
    engine = object.__new__(engine_class)
    engine.__dict__ |= attributes
    clip = getattr(config, "grad_clip", None) or 1.0
    engine.__init__(model_config, engine_config, FSDPOptimizerConfig(lr=1e-3, clip_grad=clip), None)
    engine._build_model_optimizer()
    worker = object.__new__(TrainingWorker)
    worker.engine, worker.engine_config, worker.model_config = engine, engine_config, model_config
    worker.flops_counter, worker.device_name = None, get_device_name()
    worker.profiler = DistProfiler(rank=dist.get_rank(), config=None)
    worker.loss_fn = partial(loss, config=config)
    return worker


def data_of(batch: DataProto, worker: Any, nested: bool, **settings: Any) -> Any:
    """A batch as verl's worker gets it: from the trainer V0, or if it is nested from V1."""
    config = worker.loss_fn.keywords["config"]
    batch.batch["prompts"] = _prompts(batch.batch)
    data = left_right_2_no_padding(batch.to_tensordict())
    if nested:
        _nest_responses(data)
    size = config.ppo_mini_batch_size * worker.engine.get_data_parallel_size()
    tu.assign_non_tensor(
        data,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=config.ppo_epochs,
        training_step=batch.meta_info["global_steps"],
        rollout_is_current=batch.meta_info.get("rollout_is_current", False),
        **settings,
    )
    return data


def metrics_of(output: Any, role: str) -> dict[str, Any]:
    """Those of a worker's update, but for how long it took."""
    found = {}
    for name, value in tu.get(output, "metrics").items():
        name = name if name.startswith(f"{role}/") else f"{role}/{name}"
        values = [v.aggregate() if isinstance(v, Metric) else v for v in value] if isinstance(value, list) else value
        if "/gradloc/" in name or "/layer_clip/" in name:
            (values,) = values  # the step's, whatever the number of its mini-batches
        if "/perf/" not in name:
            found[name] = values
    return found


class EngineActor:
    """What the tests know of an actor: `update_policy`, its parts, and `gradloc`, `layer_clip`, `scaler`.

    An update is the worker's own `train_mini_batch`; the data are those of the trainer V0, or with `nested` of V1. Of
    ranks that share their data (Ulysses), only the first has metrics.
    """

    nested = False
    dataloader: dict[str, Any] = {}
    # Which update of its step the next one is, and of how many.
    update_of_step = 0, 1

    watched = True
    engine_class: Callable[[], type[FSDPEngineWithLMHead]] = staticmethod(lambda: FSDPEngineWithLMHead)

    def __init__(self, config: FSDPActorConfig, module: torch.nn.Module, optimizer: Any = None) -> None:
        self.config, self.actor_module, self.actor_optimizer = config, module, optimizer
        self.scaler = None
        self.events: list[dict[str, Any]] = []
        engine = with_given_parts(self.engine_class(), self.watched)
        self.worker = built(engine, config, config.use_remove_padding, ppo_loss, actor=self)
        self.engine = self.worker.engine
        if optimizer is not None and self.watched:
            self.engine._build(config)
            self._keep_events()
            if self.gradloc is not None and config.bisect_dump_dir == type(config).bisect_dump_dir:
                self._evidence_folder = tempfile.TemporaryDirectory()
                self.engine._evidence._directory = self._evidence_folder.name

    @property
    def gradloc(self) -> Any:
        return getattr(getattr(self.engine, "watch", None), "gradloc", None)

    @property
    def layer_clip(self) -> Any:
        return self.engine.watch.layer_clip if self.watched and self.config.layer_clip.enable else None

    def _keep_events(self) -> None:
        train_batch = self.engine.train_batch

        def keeping(*arguments: Any, **options: Any) -> Any:
            output = train_batch(*arguments, **options)
            if self.gradloc is not None:
                self.events += self.gradloc.events
            return output

        self.engine.train_batch = keeping

    def update_policy(self, batch: DataProto) -> dict[str, Any]:
        self.events = []
        data = data_of(
            batch,
            self.worker,
            self.nested,
            calculate_entropy=self.config.entropy_coeff != 0,
            temperature=batch.meta_info["temperature"],
            dataloader_kwargs=self.dataloader,
            update_of_step=self.update_of_step,
        )
        output = TrainingWorker.train_mini_batch.__wrapped__(self.worker, data)
        if not self.engine.is_mp_src_rank_with_outputs():
            assert output is None
            return {}
        return metrics_of(output, "actor")

    def _forward_micro_batch(self, *arguments: Any) -> Any:
        return self.engine.ordinary_forward_step(*arguments)

    def forward(self, rows: dict[str, Any], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy of padded rows."""
        captured: dict[str, torch.Tensor] = {}

        def capture(
            model_output: dict[str, torch.Tensor], data: Any, dp_group: Any = None
        ) -> tuple[torch.Tensor, dict]:
            for name in ("log_probs", "entropy"):
                captured[name] = no_padding_2_padding(model_output[name], data)
            return torch.zeros(()), {}

        tensors = {name: value for name, value in rows.items() if isinstance(value, torch.Tensor)}
        tensors["prompts"] = _prompts(rows)
        images = {name: list(value) for name, value in rows.items() if name not in tensors}
        data = left_right_2_no_padding(tu.get_tensordict({**tensors, **images}, {"temperature": temperature}))
        tu.assign_non_tensor(
            data,
            calculate_entropy=True,
            use_remove_padding=self.config.use_remove_padding,
            use_fused_kernels=self.config.use_fused_kernels,
        )
        self.engine.ordinary_forward_step(data, capture, False)
        return captured["log_probs"], captured["entropy"]


def _prompts(rows: Any) -> torch.Tensor:
    return rows["input_ids"][:, : -rows["responses"].shape[1]]


def _nest_responses(data: Any) -> None:
    """Makes nested columns of padded ones."""
    mask = data.pop("attention_mask").bool()
    data.pop("max_response_len")
    width = data["responses"].shape[1]
    for name in ("prompts", "responses", *(key for key in data.keys() if key not in ("prompts", "responses"))):
        column = data[name]
        if isinstance(column, torch.Tensor) and not column.is_nested and column.dim() == 2 and column.shape[1] > 1:
            of_column = mask[:, :-width] if name == "prompts" else mask[:, -width:]
            rows = [row[kept] for row, kept in zip(column, of_column, strict=True)]
            data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class StockEngineActor(EngineActor):
    """The same with the unpatched engine."""

    watched = False
    engine_class = staticmethod(stock_engine)
