"""Tiny critics, patched and as released, and the gradients of their micro-batches by brute force.

Everything here runs inside the ranks of a cluster.
"""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actors import DEVICE, ENGINE, LEARNING_RATE, RESPONSE, SIZES, Case, settings_of, stock_module, wrap
from batches import Words, build_batch, with_columns
from mini_batches import loss_factor, split_rows, token_weights, whole_mini_batch
from oracle import norms_of
from transformers import LlamaConfig, LlamaForTokenClassification
from verl import DataProto
from verl.models.transformers import tiled_mlp
from verl.workers.config import FSDPCriticConfig, FSDPCriticModelCfg, FSDPEngineConfig

CLIP = 0.5
# Of a planted return; ordinary ones are about 1.
RETURN = 1e4


def build_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(2)
    options = {"attn_implementation": "sdpa", "torch_dtype": "float32", "num_labels": 1, "classifier_dropout": 0.0}
    model = LlamaForTokenClassification(LlamaConfig(**SIZES, **options))
    if case.model == "tiled":
        for layer in model.model.layers:
            layer.mlp.__class__ = type("TiledLlamaMLP", (type(layer.mlp),), {})
            tiled_mlp._patch_mlp_class(type(layer.mlp), tiled_mlp._mlp_forward_fn, num_shards=3)
    return model.to(DEVICE).train()


def build_config(case: Case, **options: Any) -> FSDPCriticConfig:
    if ENGINE:
        own = {"fsdp": FSDPEngineConfig(dtype="float32", use_torch_compile=False)}
    else:
        model = FSDPCriticModelCfg(path="none", tokenizer_path="no/such/folder", use_remove_padding=case.packed)
        own = {"model": model, "model_config": types.SimpleNamespace()}  # verl would read the tokenizer for the latter
    return FSDPCriticConfig(**settings_of(case), cliprange_value=CLIP, **own, **options)


class BrokenTokenizer:
    """One that cannot be used."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        raise OSError("no such tokenizer")


class Critic:
    """What the tests know of a critic, whatever the verl: `update`, the model's `module`, and the `watch`."""

    def __init__(self, case: Case, stock: bool = False, tokenizer: Any = None, **options: Any) -> None:
        self.case, self.config, self.tokenizer = case, build_config(case, **options), tokenizer or Words()
        self.module = wrap(case, build_model(case))
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self._update = (_engine_update if ENGINE else _legacy_update)(self, optimizer, stock)

    def update(self, batch: DataProto) -> dict[str, Any]:
        return self._update(batch)


def _legacy_update(critic: Critic, optimizer: Any, stock: bool) -> Any:
    if stock:
        made = stock_module("verl/workers/critic/dp_critic.py").DataParallelPPOCritic
    else:
        from verl.workers.critic.dp_critic import DataParallelPPOCritic as made
    verls = made(critic.config, critic.module, optimizer)
    if not (stock or isinstance(critic.tokenizer, BrokenTokenizer)):
        # In place of a tokenizer on the disk, which the critic reads where there is a spike.
        verls.__dict__["_tokenizer"] = critic.tokenizer
    critic.watch = getattr(verls, "watch", None)
    return verls.update_critic


def _engine_update(critic: Critic, optimizer: Any, stock: bool) -> Any:
    from engine_actor import built, data_of
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import value_loss

    # The registered one is the watched one.
    (registered, *_) = set(EngineRegistry._engines["value_model"]["fsdp2"].values())
    assert registered is not FSDPEngineWithValueHead and issubclass(registered, FSDPEngineWithValueHead)

    class GivenParts(FSDPEngineWithValueHead if stock else registered):
        def _build_model_optimizer(self) -> None:
            self.module, self.optimizer = critic.module, optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)
            self._autocast_dtype = torch.float32
            self._uses_fsdp2_cpu_offload_policy = True
            self.scaler = None

    config, case = critic.config, critic.case
    worker = built(GivenParts, config, case.packed, value_loss, critic.tokenizer)
    engine = worker.engine

    def update(batch: DataProto) -> dict[str, Any]:
        data = data_of(batch, worker, case.nested, temperature=1.0, dataloader_kwargs={"shuffle": False})
        output = TrainingWorker.train_mini_batch.__wrapped__(worker, data)
        critic.watch = getattr(engine, "watch", None)
        found = {}
        for name, values in tu.get(output, "metrics").items():
            values = values if isinstance(values, list) else [values]
            # As the trainer does, which takes the mean.
            of = [float(v.aggregate() if isinstance(v, Metric) else v) for v in values if v is not None]
            found[f"critic/{name}"] = sum(of) / len(of) if of else None
        return found

    return update


def build_data(case: Case, seed: int) -> DataProto:
    """The rows of this rank, with values near those of the model and returns around 1; some returns are planted."""
    rank = dist.get_rank()
    with torch.random.fork_rng():
        batch = build_batch(case, rank, seed)
    with_columns(case, batch, rank)
    random = torch.Generator().manual_seed(31 * seed + rank)
    mask = batch.batch["response_mask"]
    with torch.no_grad():
        values = values_of(case, build_model(case), batch.batch).cpu().float()
    # Some of them are so far from the model's that the clipped loss has no gradient.
    batch.batch["values"] = (values + torch.randn(mask.shape, generator=random) * 0.4) * mask
    returns = (values + torch.randn(mask.shape, generator=random)) * mask
    for at, row, position in case.planted:
        if at == rank and seed == 0:
            assert mask[row, position]
            returns[row, position] = RETURN
    batch.batch["returns"] = returns
    return batch


def values_of(case: Case, model: torch.nn.Module, rows: Any) -> torch.Tensor:
    """The values of the responses, as verl computes them: 0.7 in bfloat16."""
    inputs = {name: rows[name].to(DEVICE) for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=not ENGINE):
        return model(**inputs, use_cache=False).logits[:, -RESPONSE - 1 : -1].squeeze(-1)


def brute_force(case: Case, batch: DataProto) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    """Of the first mini-batch, each rank's micro-batches, and the reduced gradient's norm by layer.

    Plain autograd on an unsharded copy, and the loss as PPO's authors write it.
    """
    config, model = build_config(case), build_model(dataclasses.replace(case, model="llama"))
    mini_batch = batch[: case.mini_batch]
    info = whole_mini_batch(case, mini_batch)
    named = dict(model.named_parameters())
    found, total = [], {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for rows in split_rows(case, config, mini_batch):
        part = mini_batch.batch[rows]
        mask, returns, old = (part[name].float().to(DEVICE) for name in ("response_mask", "returns", "values"))
        values = values_of(case, model, part).float()
        weight = token_weights(case, mask, loss_factor(case, rows), info)
        clipped = old + (values - old).clamp(-CLIP, CLIP)
        losses = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        # Within the clip range both losses are the same but for rounding, and both have a gradient.
        within = (values - old).abs() <= CLIP
        moves = (within | ((values - returns) ** 2 >= (clipped - returns) ** 2)) & (weight != 0)
        loss = (weight * losses).sum()
        gradients = dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))
        norm, layer_norms = norms_of(gradients)
        for name, gradient in gradients.items():
            total[name] += gradient
        count = int(moves.sum())
        errors = (values - returns).detach()[moves].double()
        found.append(
            {
                "rows": len(rows),
                "tokens": int(mask.sum()),
                "norm": norm,
                "weight": float(weight[moves].double().square().sum().sqrt()),
                "error": float(errors.square().mean().sqrt()) if count else None,
                "layer_norms": layer_norms,
            }
        )
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    for gradient in total.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return by_rank, norms_of(total)[1]


def first_spike(case: Case, directory: str, threshold: float) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """The brute force, and the first spike that the critic has with this τ; the metrics of the update."""
    critic = Critic(case, spike_detection=True, grad_norm_threshold=threshold, bisect_dump_dir=directory)
    batch = build_data(case, 0)
    expected, reduced = brute_force(case, batch)
    metrics = critic.update(batch)
    dist.barrier()
    lines = [json.loads(line) for line in Path(directory, "critic.jsonl").read_text().splitlines()]
    return expected, reduced, lines[0], metrics


def planted(case: Case, directory: str, threshold: float | str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two ordinary updates around one with planted returns: the metrics of each, and the file's lines."""
    critic = Critic(case, spike_detection=True, grad_norm_threshold=threshold, bisect_dump_dir=directory)
    metrics = [critic.update(build_data(case, seed)) for seed in (1, 0, 2)]
    dist.barrier()
    lines = [json.loads(line) for line in Path(directory, "critic.jsonl").read_text().splitlines()]
    return metrics, lines


def resumed(directory: str) -> list[list[float]]:
    """The norms that an automatic threshold has learned, and those of another one that has loaded them."""
    from verl.utils.gradloc.adapters.watch import read_state

    critics = [Critic(Case(), spike_detection=True, bisect_dump_dir=directory) for _ in range(2)]
    critics[0].update(build_data(Case(), 1))
    critics[0].watch.save(directory)
    dist.barrier()
    critics[1].update(build_data(Case(), 2))
    critics[1].watch.load(lambda: read_state(directory))
    return [critic.watch.gradloc.state_dict()["token_norms"] for critic in critics]


def without_a_tokenizer(directory: str) -> list[dict[str, Any]]:
    """The spikes of an update with a planted return, where no tokenizer can be read."""
    case = Case(planted=((1, 5, 1),))
    critic = Critic(
        case,
        tokenizer=BrokenTokenizer(),
        spike_detection=True,
        grad_norm_threshold=100.0,
        bisect_dump_dir=directory,
    )
    critic.update(build_data(case, 0))
    return critic.watch.lines()


def parameters_after(case: Case, directory: str, stock: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    """This rank's parameters after two updates with a spike in the first."""
    critic = Critic(case, stock, bisect_dump_dir=directory, **options)
    for seed in range(2):
        critic.update(build_data(case, seed))
    whole = [p.to_local() if hasattr(p, "to_local") else p for p in critic.module.parameters()]
    return [parameter.detach().clone() for parameter in whole]


def loss_of_ones_own(directory: str) -> list[dict[str, Any]]:
    """An update whose loss does not call verl's value loss: the figures of training alone."""
    critic = Critic(Case(), spike_detection=True, bisect_dump_dir=directory)
    batch = build_data(Case(), 0)
    critic.update(batch)
    watch = critic.watch
    watch.start_update(1)
    watch.begin_pass({}, [0], None)
    with watch.loss(None):
        pass  # no call of verl's `agg_loss`
    tokens = {name: torch.ones(1, 1) for name in ("response_mask", "value")}
    watch.observe({}, lambda: tokens, lambda: (1, 1))
    watch.step(0, 0, lambda: 1.0)
    return watch.lines()
