"""The watch over verl's critics, against plain autograd on an unsharded copy."""

import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from actors import (
    DEVICE,
    ENGINE,
    LEARNING_RATE,
    RESPONSE,
    SIZES,
    Case,
    gathered,
    local,
    settings_of,
    stock_module,
    wrap,
)
from batches import Words, build_batch, with_columns
from jsonschema import Draft202012Validator
from mini_batches import loss_factor, split_rows, token_weights, whole_mini_batch
from notation import cases
from oracle import norms_of
from test_actor import ON_ENGINE, Launch, near, on_engine, on_ranks
from transformers import LlamaConfig, LlamaForTokenClassification
from valid_events import lines_in
from verl import DataProto
from verl.workers.config import FSDPCriticConfig, FSDPCriticModelCfg, FSDPEngineConfig

from gradloc.judge import judged
from gradloc.report.summary import summarize
from gradloc.tools.reading import read
from gradloc.tools.schema import CRITIC

CLIP, WORDS = 0.5, Words()
# The planted return; ordinary ones are about 1.
RETURN = 1e4


def build_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(2)
    options = {"attn_implementation": "sdpa", "torch_dtype": "float32", "num_labels": 1, "classifier_dropout": 0.0}
    model = LlamaForTokenClassification(LlamaConfig(**SIZES, **options))
    return model.to(DEVICE).train()


def build_config(case: Case, **options: Any) -> FSDPCriticConfig:
    if ENGINE:
        own = {"fsdp": FSDPEngineConfig(dtype="float32", use_torch_compile=False)}
    else:
        model = FSDPCriticModelCfg(path="none", tokenizer_path="no/such/folder", use_remove_padding=case.packed)
        own = {"model": model, "model_config": types.SimpleNamespace()}  # verl would read the tokenizer for the latter
    return FSDPCriticConfig(**settings_of(case), cliprange_value=CLIP, **own, **options)


class Critic:
    """What the tests know of a critic, whatever the verl: `update`, the model's `module`, and the `watch`."""

    def __init__(self, case: Case, stock: bool = False, tokenizer: Any = WORDS, **options: Any) -> None:
        self.case, self.config, self.tokenizer = case, build_config(case, **options), tokenizer
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
    if critic.tokenizer is not None:  # in place of one on the disk, which the critic reads where there is a spike
        verls.__dict__["_tokenizer"] = critic.tokenizer
    critic.watch = getattr(verls, "watch", None)
    return verls.update_critic


def _engine_update(critic: Critic, optimizer: Any, stock: bool) -> Any:
    from engine_actor import built, data_of, metrics_of, with_given_parts
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import value_loss

    # The registered one is the watched one.
    (registered, *_) = set(EngineRegistry._engines["value_model"]["fsdp2"].values())
    assert registered is not FSDPEngineWithValueHead and issubclass(registered, FSDPEngineWithValueHead)

    parts = types.SimpleNamespace(actor_module=critic.module, actor_optimizer=optimizer, scaler=None)
    given = with_given_parts(FSDPEngineWithValueHead if stock else registered, watched=False)
    worker = built(given, critic.config, critic.case.packed, value_loss, critic.tokenizer, actor=parts)
    engine = worker.engine
    parts._forward_micro_batch = engine.ordinary_forward_step

    def update(batch: DataProto) -> dict[str, Any]:
        data = data_of(batch, worker, critic.case.nested, temperature=1.0, dataloader_kwargs={"shuffle": False})
        output = TrainingWorker.train_mini_batch.__wrapped__(worker, data)
        critic.watch = getattr(engine, "watch", None)
        return metrics_of(output, "critic")

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
    config, model = build_config(case), build_model(case)
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
    for gradient in total.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gathered(found), norms_of(total)[1]


def trained(
    case: Case, directory: str, seeds: Sequence[int] = (0,), threshold: float | None = None, **options: Any
) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Updates with these data, of which those of 0 have planted returns: their metrics, and this rank's parameters."""
    detection = {} if threshold is None else {"spike_detection": True, "grad_norm_threshold": threshold}
    critic = Critic(case, bisect_dump_dir=directory, **detection, **options)
    metrics = [critic.update(build_data(case, seed)) for seed in seeds]
    dist.barrier()
    return metrics, [local(parameter) for parameter in critic.module.parameters()]


def lines(folder: Path) -> list[dict[str, Any]]:
    found = lines_in(folder, "critic.jsonl")
    for line in found:
        VALIDATOR.validate(line)
    return found


VALIDATOR = Draft202012Validator(CRITIC)
PLANTED = ((1, 5, 1),)


@on_ranks(
    on_engine(2, Case("fsdp1", mini_batch=4)),
    (2, Case("fsdp1-orig", dynamic=True)),
    on_engine(2, Case(loss_agg_mode="seq-mean-token-mean", nested=ENGINE)),
    (1, Case("none")),
)
def test_norms_and_errors_are_those_of_plain_autograd(launch: Launch, tmp_path: Path, world: int, case: Case) -> None:
    """A τ of nearly zero makes every micro-batch a spike."""
    by_rank, reduced = launch(world, lambda: brute_force(case, build_data(case, 0)))[0]
    (metrics,), _ = launch(world, partial(trained, threshold=1e-6), case, str(tmp_path))[0]
    spike, *_ = lines(tmp_path)
    tolerance = case.tolerance
    expected = {
        (rank, index): unit
        for rank, of_rank in enumerate(by_rank)
        for index, unit in enumerate(of_rank)
        if unit["weight"]
    }
    assert len(expected) > 1
    found = {(unit["rank"], unit["micro_batch"]): unit for unit in spike["micro_batches"]}
    # All of them, or the largest eight.
    assert found.keys() <= expected.keys() and len(found) == min(len(expected), 8)
    for name, unit in found.items():
        of = expected[name]
        assert (unit["rows"], unit["tokens"]) == (of["rows"], of["tokens"])
        assert unit["norm"] == near(of["norm"], tolerance)
        assert unit["token_equivalent"] == near(of["norm"] / of["weight"], tolerance)
        assert unit["threshold"] == near(1e-6 * of["weight"], tolerance)
        assert unit["error"] == near(of["error"], tolerance)
        assert unit["layer_norms"] == {
            layer: pytest.approx(norm, rel=tolerance, abs=1e-6 * of["norm"])
            for layer, norm in of["layer_norms"].items()
        }
    assert spike["layer_norms"] == {layer: near(norm, tolerance) for layer, norm in reduced.items()}
    assert spike["global_norm"] == near(sum(norm**2 for norm in reduced.values()) ** 0.5, tolerance)
    largest = max(unit["norm"] / unit["weight"] for unit in expected.values())
    assert spike["token_norm"] == near(largest, tolerance)
    assert metrics["critic/gradloc/token_norm_max"] >= largest * (1 - tolerance)
    assert metrics["critic/gradloc/triggered"] == case.rows // case.mini_batch


@ON_ENGINE
def test_a_planted_return_is_found(launch: Launch, tmp_path: Path) -> None:
    case = Case("fsdp1", nested=ENGINE, epochs=2, mini_batch=4, planted=PLANTED)
    metrics, _ = launch(2, partial(trained, seeds=(1, 0, 2), threshold=100.0), case, str(tmp_path))[0]
    assert [of["critic/gradloc/triggered"] for of in metrics][::2] == [0, 0]
    spike, *later = lines(tmp_path)
    assert metrics[1]["critic/gradloc/triggered"] == 1 + len(later)
    ((rank, row, position),) = PLANTED
    mini_batch, row_in = divmod(row, case.mini_batch)
    assert (spike["global_step"], spike["epoch"], spike["mini_batch"]) == (7, 0, mini_batch)
    (unit,) = spike["micro_batches"]
    assert unit["rank"] == rank
    value, *others = spike["values"]
    assert (value["rank"], value["row"], value["position"]) == (rank, row_in, position)
    assert value["return"] == RETURN
    assert value["uid"] == f"{rank}/{row}" and value["data_source"] == "sums"
    assert value["token"] and f"«{value['token']}»" in value["context"]
    assert value["error"] > 100 * max(other["error"] for other in others)
    assert spike["cause"] == "errors" and judged(spike) == spike
    assert "look at the returns" in spike["summary"] and f"row {row_in}, position {position}" in spike["summary"]
    assert f"token {value['token']!r} of rank" in spike["summary"]
    assert len(later) == case.epochs - 1
    (warning,) = summarize(read(str(tmp_path)), 5)["warnings"]
    assert (warning["name"], warning["first_step"], warning["sentence"]) == ("critic", 7, later[-1]["summary"])


@pytest.mark.every_target
def test_training_is_that_of_the_released_verl(launch: Launch, tmp_path: Path) -> None:
    """Also where no tokenizer can be read, without which a value has no text."""
    case = Case(dynamic=True, planted=PLANTED)
    runs = [
        [parameters for _, parameters in launch(2, partial(trained, seeds=(0, 1), **options), case, str(tmp_path))]
        for options in ({"stock": True}, {}, {"threshold": 10.0, "tokenizer": None})
    ]
    for released, *ours in zip(*runs, strict=True):
        for parameters in ours:
            assert all(map(torch.equal, parameters, released))
    value = lines(tmp_path)[0]["values"][0]
    assert value["return"] == RETURN and "token" not in value


@pytest.mark.every_target
def test_learned_norms_come_back_with_a_checkpoint(launch: Launch, tmp_path: Path) -> None:
    from gradloc.adapters.watch import read_state

    def resumed() -> list[list[float]]:
        critics = [Critic(Case(), spike_detection=True, bisect_dump_dir=str(tmp_path)) for _ in range(2)]
        critics[0].update(build_data(Case(), 1))
        critics[0].watch.save(str(tmp_path))
        dist.barrier()
        critics[1].update(build_data(Case(), 2))
        critics[1].watch.load(lambda: read_state(str(tmp_path)))
        return [critic.watch.gradloc.state_dict()["token_norms"] for critic in critics]

    for saved, loaded in launch(2, resumed):
        assert saved == loaded and len(saved) == 1


@cases(
    "fields expected",
    ({}, "network"),
    ({"ordinary_token_norm": 10.0}, "errors"),
    ({"ordinary_error": None}, None),
    ({"micro_batches": [], "layer_norms": {}, "error": float("nan")}, "errors"),
)
def test_the_cause_is_what_has_grown(fields: dict[str, Any], expected: str | None) -> None:
    unit = {"rank": 0, "micro_batch": 1, "token_equivalent": 50.0, "error": 2.0, "layer_norms": {"a": 3.0, "b": 1.0}}
    spike = {
        "threshold": 10.0,
        "token_norm": 50.0,
        "ordinary_token_norm": 1.0,
        "ordinary_layer_norms": {"a": 1.0, "b": 1.0},
        "error": 2.0,
        "ordinary_error": 1.0,
        "micro_batches": [unit],
        "values": [],
        **fields,
    }
    found = judged(spike)
    assert found["cause"] == expected
    if expected == "network":
        said = "5 times its threshold in micro-batch 1 of rank 0. The values' errors have hardly grown, so the model"
        assert found["summary"] == f"The critic's gradient norm is {said} amplifies them."
