"""Tiny models in every wrapping, and the plain computation that LayerClip is held against.

Everything here runs inside the ranks of a cluster. The plain computation takes each rank's gradient on an unsharded
copy of the model, averages them, and clips layer by layer with layers told apart by this file's own patterns.
"""

import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import actor_cases
import actors
import pytest
import torch
import torch.distributed as dist
from actors import VOCABULARY, Case, events_of
from batches import build_batch
from oracle import layer_of, norms_of
from pass_cost_cases import Operations
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from verl.workers.config import LayerClipConfig as VerlLayerClipConfig
from verl.workers.config import TokenClipConfig

from gradloc import LayerClip, LayerClipConfig


def build_model(case: Case) -> nn.Module:
    if case.model != "moe":
        return actors.build_model(case)
    torch.manual_seed(1)
    # The shared expert's gate has one row: with Shard(0) all ranks but one hold nothing of it.
    sizes = actors.SIZES | {"hidden_size": 24, "intermediate_size": 36, "shared_expert_intermediate_size": 28}
    experts = {"moe_intermediate_size": 20, "num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    config = Qwen2MoeConfig(**sizes, **experts)
    return Qwen2MoeForCausalLM(config).to(actors.DEVICE)


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(seed)).to(actors.DEVICE)
    (factor * model(input_ids=ids, labels=ids).loss).backward()


def plain_gradients(case: Case) -> dict[str, Tensor]:
    """The data-parallel mean of the gradients, in double precision from one rank's data to the next."""
    model = build_model(case)
    # Without sharding nothing is averaged over the ranks.
    ranks = [dist.get_rank()] if case.wrap == "none" else range(dist.get_world_size())
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters() if p.requires_grad}
    for rank in ranks:
        model.zero_grad()
        backward(model, rank)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.double() / len(ranks)
    return total


def take_step(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient as an optimizer would use it: by what a step of size 1 makes of zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return {
        name.replace("_fsdp_wrapped_module.", ""): -value
        for name, value in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items()
    }


def compare(case: Case, all_gathers: int) -> tuple[dict[str, tuple[Any, Any]], float, float]:
    """Clips one gradient by the rule "fixed" and by hand.

    Returns:
        tuple: LayerClip's figures on one rank, with those of the plain computation; the largest relative error of a
            gradient; and the largest gradient of a frozen parameter.
    """
    gradients = plain_gradients(case)
    numels: dict[str, int] = {}
    for name, gradient in gradients.items():
        numels[layer_of(name)] = numels.get(layer_of(name), 0) + gradient.numel()
    whole, norms = norms_of(gradients)
    max_norm = 0.8 * whole
    factors = {
        layer: min(1.0, max_norm * math.sqrt(numels[layer] / sum(numels.values())) / norm)
        for layer, norm in norms.items()
    }

    if case.offload_policy and actors.DEVICE.type == "cpu":
        # FSDP1's offloading pins memory and waits for a stream, which this CPU has not.
        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
        torch.cpu.Stream.synchronize = lambda stream: None
    model = actors.wrap(case, build_model(case))
    if case.wrap == "fsdp2":  # as old log-probs are computed, before an engine of verl 0.9 builds the clip
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=actors.DEVICE))
    clip = LayerClip(model, LayerClipConfig(rule="fixed", max_norm=max_norm), actors.DEVICE)
    backward(model, dist.get_rank())
    with Operations() as operations:
        norm = clip.clip(clip.squared_norms()).item()
    assert operations.collectives == ["allgather_"] * all_gathers
    reduced = clip._reduced_norms
    found_squares = reduced.add_up(reduced.own_squares(of_weights=True))
    clipped = take_step(model)
    expected = {name: factors[layer_of(name)] * gradient for name, gradient in gradients.items()}
    errors = [float((clipped[name].double() - g).norm() / g.norm()) for name, g in expected.items()]
    weights = dict(build_model(case).named_parameters())
    frozen = [clipped[name].abs().max().item() for name in weights.keys() - gradients.keys()]
    figures = {
        "norm": (norm, whole),
        "norms": ({layer: figures["norm"] for layer, figures in clip.last_step.items()}, norms),
        "factors": ({layer: figures["factor"] for layer, figures in clip.last_step.items()}, factors),
        "norms of weights": (
            dict(zip(reduced.layers, found_squares.sqrt().tolist(), strict=True)),
            norms_of({name: weights[name] for name in gradients})[1],
        ),
    }
    return figures, max(errors), max(frozen, default=0.0)


def gradient_steps(
    wrap_as: str, steps: range, saved_to: str | None = None, loaded_from: str | None = None
) -> list[dict[str, Any]]:
    """Clips the same gradients whatever the number of ranks; returns what each step found.

    Args:
        steps (range): Which gradients.
        saved_to (str, optional): Where verl's checkpoint manager puts a checkpoint in the end.
        loaded_from (str, optional): Where it finds the extra state, to begin with.
    """
    case = Case(wrap_as)
    model = actors.wrap(case, build_model(case))
    config = actors.build_config(case, layer_clip=VerlLayerClipConfig(enable=True, rule="zscore", warmup_steps=3))
    actor = actors.dp_actor.DataParallelPPOActor(config, model, torch.optim.SGD(model.parameters(), lr=0.0))
    clip = actor.layer_clip
    if loaded_from is not None or saved_to is not None:
        manager = actors.checkpoints(actor, checkpoint_config={"load_contents": ["extra"]})
    if loaded_from is not None:
        manager.load_checkpoint(loaded_from)
    found = []
    for step in steps:
        model.zero_grad()
        backward(model, step, 50.0 if step == 5 else 1.0)
        clip.clip(clip.squared_norms())
        found.append(clip.last_step)
    if saved_to is not None:
        manager.save_checkpoint(saved_to)
    return found


def run_actor(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Runs the actor with LayerClip; returns metrics, events, statistics and what the optimizer has seen.

    Args:
        case (dict): Of `actors.Case`.
        options (dict): `layer_clip` as a dict, and whatever else the actor's configuration takes.
    """
    options = {**options, "layer_clip": VerlLayerClipConfig(enable=True, **options.get("layer_clip", {}))}
    found: dict[str, Any] = {"measured": 0}

    def counted(measure: Callable[[bool], Tensor], of_weights: bool = False) -> Tensor:
        found["measured"] += not of_weights
        return measure(of_weights)

    def prepare(actor: Any) -> None:
        found["actor"] = actor
        for norms in [actor.layer_clip._reduced_norms] + (
            [actor.gradloc._model.reduced_norms] if actor.gradloc else []
        ):
            norms.own_squares = functools.partial(counted, norms.own_squares)

    of_case = Case(**case)
    run = actor_cases.train(of_case, prepare=prepare, **options)
    actor = found.pop("actor")
    replicas = 2 if of_case.hsdp else 1
    shards = torch.zeros((), dtype=torch.float64, device=actors.DEVICE)
    for gradient in run.gradients[-1] if run.gradients else []:
        shards += gradient.double().square().sum() / replicas
    dist.all_reduce(shards)
    seen = []
    # FSDP1's optimizer sees flat parameters, which are no layers.
    for gradients in run.gradients if of_case.wrap in ("fsdp2", "none") else []:
        names = [layer_of(name) for name, p in actor.actor_module.named_parameters() if p.requires_grad]
        squares = dict.fromkeys(names, 0.0)
        for name, gradient in zip(names, gradients, strict=True):
            squares[name] += gradient.double().square().sum().item() / replicas
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, squares)
        seen.append({name: math.sqrt(sum(part[name] for part in everywhere)) for name in squares})
    return {
        **found,
        "metrics": run.metrics,
        "events": run.events,
        "statistics": actor.layer_clip.state_dict(),
        "last_step": actor.layer_clip.last_step,
        "layers": actor.layer_clip.layers,
        "steps": len(run.gradients),
        "seen": seen,
        "seen_norm": shards.sqrt().item(),
    }


def off_and_stock(wrap_as: str, rollout: bool) -> dict[str, bool]:
    """Whether the actor with all off leaves everything that the stock actor does, with the same calls and host reads.

    Args:
        rollout (bool): Whether the batch holds the rollout's log-probs.
    """
    case = Case(wrap=wrap_as, mini_batch=4, rollout=rollout)
    for seed in range(2):
        build_batch(case, dist.get_rank(), seed)  # made once, before what is counted
    helper = "verl.trainer.ppo.rollout_corr_helper"
    runs, collectives, reads = [], [], []
    for module, modules, options in (
        (actors.stock_dp_actor(), {helper: actors.stock_module(helper.replace(".", "/") + ".py")}, {}),
        (actors.dp_actor, {}, {"layer_clip": VerlLayerClipConfig()}),
    ):
        reads.append([])
        with pytest.MonkeyPatch.context() as patch:
            for name in modules:
                patch.setitem(sys.modules, name, modules[name])
            watch_reads(patch, reads[-1])
            with Operations() as operations:
                runs.append(actor_cases.train(case, module, calls=2, **options))
        collectives.append(operations.collectives)
    stock, off = runs
    return {
        "metrics": stock.metrics == off.metrics,
        # Those of verl 0.9 are computed elsewhere.
        "rollout metrics": (rollout and not actors.ENGINE)
        == any(name.startswith("rollout_corr/") for name in stock.metrics[0]),
        "parameters": all(torch.equal(a, b) for a, b in zip(stock.parameters, off.parameters, strict=True)),
        "random state": torch.equal(stock.rng, off.rng),
        "collectives": collectives[0] == collectives[1],
        "host reads": reads[0] == reads[1] != [],
    }


def watch_reads(patch: pytest.MonkeyPatch, reads: list[str], on_host: Sequence[Tensor] = ()) -> None:
    """Notes how the host reads tensors, but for those that are on the host already."""

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *arguments: Any) -> Any:
            if tensor.data_ptr() not in [other.data_ptr() for other in on_host]:
                reads.append(name)
            return original(tensor, *arguments)

        return read

    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
        patch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))


def host_reads(wrap_as: str) -> tuple[list[str], list[str]]:
    """Where the host waits for the device to step and to log the norm: in the stock actor, and with LayerClip."""
    case = Case(wrap=wrap_as)
    # All layers are clipped, so that scaling them is counted, too.
    options = VerlLayerClipConfig(enable=True, rule="fixed", max_norm=1e-3)
    both = [
        actors.build_actor(case, actors.stock_dp_actor()),
        actors.build_actor(case, layer_clip=options),
    ]
    for actor in both:
        actor.update_policy(build_batch(case, dist.get_rank()))  # what is done only once
        backward(actor.actor_module, dist.get_rank())
    stock, ours = map(reads_of_a_step, both)
    assert {layer["factor"] < 1 for layer in both[1].layer_clip.last_step.values()} == {True}
    return stock, ours


def reads_of_a_step(actor: Any) -> list[str]:
    """How the host reads tensors, but for the norm that LayerClip returns, which is on the host already."""
    reads: list[str] = []
    on_host: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        watch_reads(patch, reads, on_host)
        if getattr(actor, "layer_clip", None) is not None:
            clip = actor.layer_clip.clip
            patch.setattr(actor.layer_clip, "clip", lambda *arguments: on_host.append(clip(*arguments)) or on_host[0])
        if actors.ENGINE:
            actor.engine._watching = True  # as within `train_batch`
            actor.engine.optimizer_step()
        else:
            actor._watching = True  # as within `update_policy`
            norm = actor._optimizer_step()
            if getattr(actor, "watch", None) is not None:
                on_host.append(norm)
            norm.detach().item()
    return reads


def clip_to_parts(case: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """The stock actor's norms, and `run_actor` whose layers may have the first of them together."""
    norms = actor_cases.train(Case(**case), actors.stock_dp_actor()).metrics[0]["actor/grad_norm"]
    layer_clip = {"rule": "fixed", "max_norm": norms[0]}
    return norms, run_actor(case, {**options, "layer_clip": layer_clip})


def resume(
    folder: str,
    wrap_as: str = "fsdp2",
    before: Sequence[int] = (1,),
    after: Sequence[int] = (4,),
    change: Callable[[dict[str, Any]], None] | None = None,
    shared: bool = True,
    checkpoint_config: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """What updates show after a checkpoint: of the run that went on, and of one that was started from it.

    An automatic threshold, LayerClip and TokenClip have learned from those before it. Batch 0 has a spike.

    Args:
        folder (str): Where the checkpoint goes.
        wrap_as (str): How the model is wrapped.
        before (Sequence[int]): The batches before the checkpoint.
        after (Sequence[int]): Those after it.
        change (Callable, optional): Changes what the checkpoint holds of LayerClip first.
        shared (bool): Whether rank 1 loads from the same folder: its own lacks what rank 0 alone has written.
        checkpoint_config (dict, optional): The manager's.

    Returns:
        tuple: Both, and what the loading has warned of.
    """
    # In the last mini-batch, of which the engine of verl 0.9 still has TokenClip's lines.
    case = Case(wrap=wrap_as, mini_batch=2, planted=((1, 7, 6),))
    clip = TokenClipConfig(enable=True, action="log", warmup_steps=2)
    options = {"spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50, "token_clip": clip}
    start = functools.partial(with_checkpoints, case, checkpoint_config, **options)

    def update(actor: Any, seeds: Sequence[int]) -> list[dict[str, Any]]:
        found = []
        for seed in seeds:
            metrics = actor.update_policy(build_batch(case, dist.get_rank(), seed))
            clips = getattr(actor, "engine", actor).watch.clips
            shown = {"layers": actor.layer_clip.last_step, "clips": [{**line, "time": None} for line in clips]}
            found.append({**shown, "threshold": metrics.get("actor/gradloc/threshold"), "events": events_of(actor)})
        return found

    actor, manager = start()
    update(actor, before)
    manager.save_checkpoint(folder)
    straight = update(actor, after)
    dist.barrier()
    if change is not None and dist.get_rank() == 0:
        state = torch.load(f"{folder}/gradloc_state.pt", weights_only=True)
        change(state)
        torch.save(state, f"{folder}/gradloc_state.pt")
    dist.barrier()
    if not shared and dist.get_rank() == 1:
        folder = shutil.copytree(folder, f"{folder}, other node")
        os.remove(f"{folder}/gradloc_state.pt")
    with actor_cases.warnings_of("") as warnings:
        actor, manager = start()
        manager.load_checkpoint(folder)
    return straight, update(actor, after), [text for text in warnings if "warm-up" in text]


def with_checkpoints(
    case: Any, checkpoint_config: dict[str, Any] | None = None, enable: bool = True, **options: Any
) -> tuple[Any, Any]:
    """An actor with LayerClip, and what saves and loads its checkpoints."""
    layer_clip = VerlLayerClipConfig(enable=enable, warmup_steps=5, rule="ratio", ratio=1.05)
    actor = actors.build_actor(case, layer_clip=layer_clip, **options)
    scheduler = torch.optim.lr_scheduler.ConstantLR(actor.actor_optimizer, factor=1.0)
    return actor, actors.checkpoints(actor, scheduler, checkpoint_config)


def load_unreadable(folder: str) -> str:
    """The error of a load whose state file, which only rank 0 reads, holds something else."""
    _, manager = with_checkpoints(Case(rows=4, mini_batch=2))
    manager.save_checkpoint(folder)
    if dist.get_rank() == 0:
        Path(folder, "gradloc_state.pt").write_bytes(b"not a state")
    dist.barrier()
    try:
        manager.load_checkpoint(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def learned_while_off(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What LayerClip has learned for the bundles of a run that has it off: when it is saved, and after it is loaded."""
    case = Case(rows=4, mini_batch=2)
    detection = {"spike_detection": True, "grad_norm_threshold": 1e30, "spike_replay": 1, "bisect_dump_dir": folder}
    actor, manager = with_checkpoints(case, enable=False, **detection)
    actor.update_policy(build_batch(case, dist.get_rank(), 1))
    manager.save_checkpoint(folder)
    resumed, manager = with_checkpoints(case, enable=False, **detection)
    manager.load_checkpoint(folder)
    return actor.watch.layer_clip.state_dict(), resumed.watch.layer_clip.state_dict()


def without_statistics(state: dict[str, Any]) -> None:
    """Makes an older checkpoint of it."""
    del state["layer_clip"]


def of_another_model(state: dict[str, Any]) -> None:
    """Makes the checkpoint of a model with other layers of it."""
    state["layer_clip"]["layers.7"] = state["layer_clip"].pop("layers.1")
