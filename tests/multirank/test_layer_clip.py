"""LayerClip's exactness under every wrapping, and the actor that uses it.

The plain computation that it is held against takes each rank's gradient on an unsharded copy of the model, averages
them, and clips layer by layer with layers told apart by the oracle's own patterns.
"""

import dataclasses
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import actor_cases
import actors
import pytest
import torch
import torch.distributed as dist
from actor_cases import Operations
from actors import VOCABULARY, Case, events_of
from batches import build_batch
from notation import cases
from oracle import layer_of, norms_of
from test_actor import ON_ENGINE, Launch, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from valid_events import valid_events
from verl.workers.config import LayerClipConfig as VerlLayerClipConfig
from verl.workers.config import TokenClipConfig

from gradloc import LayerClip, LayerClipConfig
from gradloc.layers.layer_clip import LayerStatistics


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(seed)).to(actors.DEVICE)
    (factor * model(input_ids=ids, labels=ids).loss).backward()


def plain_gradients(case: Case) -> dict[str, Tensor]:
    """The data-parallel mean of the gradients, in double precision from one rank's data to the next."""
    model = actors.build_model(case)
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


def learned(norm: float, over: bool) -> dict[str, Any]:
    """Statistics of a layer whose gradient has this norm, under which it is over its bound, or not."""
    return dataclasses.asdict(LayerStatistics(count=20, mean=norm * (0.5 if over else 1.0), deviation=0.1 * norm))


def all_over(layers: list[str]) -> dict[str, dict[str, Any]]:
    """Statistics by layer, under which every layer with a gradient is over its bound."""
    return {layer: learned(1e-6, over=True) for layer in layers}


# The part that `learned` leaves of a layer over its bound, with z = 2: 5 deviations over the mean.
Z, LEFT = 2.0, 0.5 + 2.0**2 / 5 * 0.1


def every_other(norms: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Statistics by layer, under which every other layer is over its bound."""
    return {layer: learned(norm, over=i % 2 == 0) for i, (layer, norm) in enumerate(norms.items())}


def compare(case: Case, all_gathers: int) -> tuple[dict[str, tuple[Any, Any]], float, float]:
    """Clips every other layer of one gradient, and does the same by hand.

    Returns:
        tuple: LayerClip's figures on one rank, with those of the plain computation; the largest relative error of a
            gradient; and the largest gradient of a frozen parameter.
    """
    gradients = plain_gradients(case)
    whole, norms = norms_of(gradients)
    factors = {layer: LEFT if i % 2 == 0 else 1.0 for i, layer in enumerate(norms)}

    model = actors.wrap(case, actors.build_model(case))
    if case.wrap == "fsdp2":  # as old log-probs are computed, before an engine of verl 0.9 builds the clip
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=actors.DEVICE))
    clip = LayerClip(model, LayerClipConfig(z=Z), actors.DEVICE)
    clip.load_state_dict(every_other(norms))
    backward(model, dist.get_rank())
    with Operations() as operations:
        norm = clip.clip(clip.squared_norms()).item()
    assert operations.collectives == ["_allgather_base_"] * all_gathers
    reduced = clip._reduced_norms
    found_squares = reduced.add_up(reduced.own_squares(with_weights=True))[: len(reduced.layers)]
    clipped = take_step(model)
    expected = {name: factors[layer_of(name)] * gradient for name, gradient in gradients.items()}
    errors = [float((clipped[name].double() - g).norm() / g.norm()) for name, g in expected.items()]
    weights = dict(actors.build_model(case).named_parameters())
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


def run_actor(
    case: Case, options: dict[str, Any], statistics: Callable[[list[str]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Runs the actor with LayerClip; returns metrics, events, statistics and the norm that the optimizer has seen last.

    Args:
        case (Case): What it trains.
        options (dict): `layer_clip` as a dict, and whatever else the actor's configuration takes.
        statistics (Callable, optional): Returns what it has learned before, from the names of layers.
    """
    options = {**options, "layer_clip": VerlLayerClipConfig(enable=True, **options.get("layer_clip", {}))}
    made: list[Any] = []

    def prepare(actor: Any) -> None:
        made.append(actor)
        if statistics is not None:
            actor.layer_clip.load_state_dict(statistics(actor.layer_clip.layers))

    run = actor_cases.train(case, prepare=prepare, **options)
    clip, replicas = made[0].layer_clip, 2 if case.hsdp else 1
    squares = [float(gradient.double().square().sum()) / replicas for gradient in (run.gradients or [[]])[-1]]
    by_layer: dict[str, float] = {}
    if squares and case.wrap in ("fsdp2", "none"):  # FSDP1's optimizer sees flat parameters, which are no layers
        names = [layer_of(name) for name, p in made[0].actor_module.named_parameters() if p.requires_grad]
        for name, square in zip(names, squares, strict=True):
            by_layer[name] = by_layer.get(name, 0.0) + square
    everywhere = actors.gathered((by_layer, sum(squares)))
    return {
        "metrics": run.metrics,
        "events": run.events,
        "statistics": clip.state_dict(),
        "last_step": clip.last_step,
        "layers": clip.layers,
        "steps": len(run.gradients),
        "seen": math.sqrt(sum(total for _, total in everywhere)),
        "seen_by_layer": {name: math.sqrt(sum(part[name] for part, _ in everywhere)) for name in by_layer},
    }


def resume(
    folder: str,
    wrap_as: str = "fsdp2",
    before: Sequence[int] = (1,),
    after: Sequence[int] = (4,),
    change: Callable[[dict[str, Any]], Any] | None = None,
    shared: bool = True,
    fails: bool = False,
    checkpoint_config: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """What updates show after a checkpoint: of the run that went on, and of one that was started from it.

    An automatic threshold, LayerClip and TokenClip have learned from those before it. Batch 0 has a spike.

    Args:
        folder (str): Where the checkpoint goes.
        wrap_as (str): How the model is wrapped.
        before (Sequence[int]): The batches before the checkpoint.
        after (Sequence[int]): Those after it.
        change (Callable, optional): Gives what the checkpoint has instead of its state.
        shared (bool): Whether rank 1 loads from the same folder: its own lacks what rank 0 alone has written.
        fails (bool): Whether rank 1, and no other, cannot take in LayerClip's statistics.
        checkpoint_config (dict, optional): The manager's.

    Returns:
        tuple: Both, and what the loading has warned of.
    """
    # In the last mini-batch, of which the engine of verl 0.9 still has TokenClip's lines.
    case = Case(wrap=wrap_as, mini_batch=2, planted=((1, 7, 6),))
    clip = TokenClipConfig(enable=True, action="log", warmup_steps=2)
    options = {"spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50, "token_clip": clip}
    start = partial(with_checkpoints, case, checkpoint_config, **options)

    def update(actor: Any, seeds: Sequence[int]) -> list[dict[str, Any]]:
        found = []
        for seed in seeds:
            metrics = actor.update_policy(build_batch(case, dist.get_rank(), seed))
            watch = getattr(actor, "engine", actor).watch
            shown = {"layers": actor.layer_clip.last_step, "clips": [{**line, "time": None} for line in watch.clips]}
            shown["norms"] = len(watch.gradloc.state_dict()["token_norms"])
            found.append({**shown, "threshold": metrics.get("actor/gradloc/threshold"), "events": events_of(actor)})
        return found

    actor, manager = start()
    update(actor, before)
    manager.save_checkpoint(folder)
    straight = update(actor, after)
    dist.barrier()
    if change is not None and dist.get_rank() == 0:
        path = f"{folder}/gradloc_state.pt"
        torch.save(change(torch.load(path, weights_only=True)), path)
    dist.barrier()
    if not shared and dist.get_rank() == 1:
        folder = shutil.copytree(folder, f"{folder}, other node")
        os.remove(f"{folder}/gradloc_state.pt")
    with actor_cases.warnings_of("") as warnings:
        actor, manager = start()
        faults = iter([MemoryError("a planted one")] if fails and dist.get_rank() == 1 else [])
        load = LayerClip.load_state_dict

        def load_or_fail(clip: LayerClip, state: Any) -> None:
            for fault in faults:
                raise fault
            load(clip, state)

        with mock.patch.object(LayerClip, "load_state_dict", load_or_fail):
            manager.load_checkpoint(folder)
            resumed = update(actor, after)  # the engine of verl 0.9 may take it in there
    return straight, resumed, [text for text in warnings if "warm-up" in text]


def with_checkpoints(
    case: Any, checkpoint_config: dict[str, Any] | None = None, enable: bool = True, **options: Any
) -> tuple[Any, Any]:
    """An actor with LayerClip, and what saves and loads its checkpoints."""
    layer_clip = VerlLayerClipConfig(enable=enable, warmup_steps=5, z=0.5)
    actor = actors.build_actor(case, layer_clip=layer_clip, **options)
    scheduler = torch.optim.lr_scheduler.ConstantLR(actor.actor_optimizer, factor=1.0)
    return actor, actors.checkpoints(actor, scheduler, checkpoint_config)


def without_statistics(state: dict[str, Any]) -> dict[str, Any]:
    """As an older checkpoint's."""
    return {name: part for name, part in state.items() if name != "layer_clip"}


def of_another_model(state: dict[str, Any]) -> dict[str, Any]:
    """With other layers."""
    return {**state, "layer_clip": {name.replace(".1", ".7"): layer for name, layer in state["layer_clip"].items()}}


def of_no_model(_state: dict[str, Any]) -> str:
    return "not a state"


# Gradients of a few thousand float32 numbers each, summed in another order.
EXACT = 1e-6


@on_ranks(
    (1, Case("fsdp1")),
    (2, Case("fsdp2", tied=True)),
    (3, Case("fsdp1-orig")),
    (2, Case("none")),
    (4, Case("fsdp1", hsdp=True)),
    (4, Case("fsdp2", hsdp=True)),
    (2, Case("fsdp1", "frozen")),
    (2, Case("fsdp2", "frozen")),
    *[(2, Case(wrap, "lora")) for wrap in ("fsdp1-orig", "fsdp2")],
    (2, Case("fsdp1-orig", "moe")),
    (2, Case("fsdp2", "moe")),
    (2, Case("fsdp2", offload_policy=True)),
)
def test_norms_and_clipped_gradients_are_those_of_one_process(launch: Launch, world: int, case: Case) -> None:
    all_gathers = 0 if world == 1 or case.wrap == "none" else 1
    results = launch(world, compare, case, all_gathers)
    for figures, error, of_frozen in results:
        for name, (found, expected) in figures.items():
            assert found == pytest.approx(expected, rel=EXACT), name
        norms, factors = figures["norms"], figures["factors"][0].values()
        assert list(norms[0]) == list(norms[1])
        assert 0 < sum(factor < 1 for factor in factors) < len(factors)
        assert error < EXACT and of_frozen == 0
        if case.wrap != "none":
            assert norms[0] == results[0][0]["norms"][0]  # bit for bit: no rank decides otherwise


@pytest.mark.parametrize("wrap", ["fsdp1", pytest.param("fsdp2", marks=ON_ENGINE)])
def test_the_host_waits_for_the_device_as_often_as_without(launch: Launch, wrap: str) -> None:
    """In an update in which LayerClip scales all layers, and in one that is watched for spikes."""

    def reads(micro_batch: int) -> list[Counter[str]]:
        case, found = Case(wrap=wrap, micro_batch=micro_batch), []
        clip = VerlLayerClipConfig(enable=True)
        watch = {"spike_detection": True, "grad_norm_threshold": 1e9}
        kinds = (actors.stock_dp_actor(), {}), (actors.dp_actor, watch), (actors.dp_actor, {"layer_clip": clip})
        for module, options in kinds:
            actor = actors.build_actor(case, module, **options)
            actor.update_policy(build_batch(case, dist.get_rank()))  # what is done only once
            if options.get("layer_clip"):
                actor.layer_clip.load_state_dict(all_over(actor.layer_clip.layers))
            batch = build_batch(case, dist.get_rank())
            with actor_cases.host_reads() as of_update:
                actor.update_policy(batch)
            found.append(Counter(of_update))
        assert {layer["factor"] < 1 for layer in actor.layer_clip.last_step.values()} == {True}
        return found

    few, many = launch(2, reads, 4), launch(2, reads, 2)
    for stock, _, ours in many:
        # All layers' norms at once, and the norm that LayerClip returns, which is on the host already.
        assert stock and ours - stock == Counter(["tolist", "__float__"]) and not stock - ours
    for (stock, ours, _), (stock_of_many, ours_of_many, _) in zip(few, many, strict=True):
        of_each_micro_batch = (ours_of_many - stock_of_many) - (ours - stock)
        # verl 0.9's engine has lengths on the host, which become lists.
        assert of_each_micro_batch.keys() <= ({"tolist"} if actors.ENGINE else set())


def of_two_ranks(launch: Launch, case: Case, options: dict[str, Any], *statistics: Any) -> dict[str, Any]:
    """What two ranks found, after checking that they found the same."""
    return same(launch(2, run_actor, case, options, *statistics))


def same(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What ranks found, after checking that they found the same."""
    for name in ("events", "statistics", "last_step", "seen"):
        assert len({repr(result[name]) for result in results}) == 1  # NaN included
    ours = [
        [{k: v for k, v in metrics.items() if "layer_clip" in k or "norm" in k} for metrics in result["metrics"]]
        for result in results
    ]
    assert len({repr(of_rank) for of_rank in ours}) == 1
    for events in results[0]["events"]:
        valid_events(events)
    return results[0]


def check_seen(result: dict[str, Any]) -> float:
    """The optimizer has seen what LayerClip left of the last step's gradient, after the global clip at norm 1."""
    clipped = math.sqrt(sum((layer["norm"] * layer["factor"]) ** 2 for layer in result["last_step"].values()))
    scale = min(1.0, 1 / (clipped + 1e-6))
    assert result["seen"] == pytest.approx(scale * clipped, rel=1e-5)
    if result["seen_by_layer"]:
        by_layer = {name: scale * layer["norm"] * layer["factor"] for name, layer in result["last_step"].items()}
        assert result["seen_by_layer"] == pytest.approx(by_layer, rel=EXACT)
    return clipped


HALF = {"precision": "float16", "loss_scale": 2.0**10}


@on_ranks(
    (1, Case("none"), True),
    (2, Case("fsdp1", **HALF), False),
    (2, Case("fsdp1-orig", **HALF), True),
    (2, Case("fsdp2", precision="bfloat16"), True),
    (4, Case("fsdp1", hsdp=True), True),
    # With the engine of verl 0.9, which may defer the reduction, too.
    (2, Case("fsdp1-orig", deferred=True, model="lora"), False, ON_ENGINE),
    (2, Case("fsdp2", deferred=True, **HALF), True, ON_ENGINE),
    names="world case with_gradloc",
)
def test_layers_are_clipped_in_every_configuration(launch: Launch, world: int, case: Case, with_gradloc: bool) -> None:
    """Every other layer, by statistics from an update in which nothing is clipped yet."""
    # With GradLoc they are measured before the gradient is unscaled, without it afterwards.
    gradloc = {"spike_detection": True, "spike_trigger": "global", "grad_norm_threshold": 1e6}

    def clip_every_other() -> tuple[list[float], dict[str, Any]]:
        norms = actor_cases.train(case, actors.stock_dp_actor()).metrics[0]["actor/grad_norm"]
        options = {"layer_clip": {"z": Z}, **(gradloc if with_gradloc else {})}
        unclipped = {layer: of["norm"] for layer, of in run_actor(case, options)["last_step"].items()}
        return norms, run_actor(case, options, lambda _: every_other(unclipped))

    results = launch(world, clip_every_other)
    (norm,) = results[0][0]
    result = same([of_rank for _, of_rank in results])
    layers = result["last_step"].values()
    # verl adds up squares in float32, of gradients that are the same.
    assert math.sqrt(sum(layer["norm"] ** 2 for layer in layers)) == pytest.approx(norm, rel=1e-5)
    (metrics,) = result["metrics"]
    assert metrics["actor/grad_norm"] == [pytest.approx(norm, rel=1e-5)]
    ratios = [layer["norm"] / layer["bound"] for layer in layers]
    assert 0 < sum(ratio > 1 for ratio in ratios) < len(layers)
    assert metrics["actor/layer_clip/norm_max_ratio"] == pytest.approx(max(ratios))
    assert metrics["actor/layer_clip/min_factor"] == pytest.approx(LEFT)
    assert check_seen(result) < 0.95 * norm


SPIKE = Case(planted=((1, 3, 6),))
DETECT = {"spike_detection": True, "grad_norm_threshold": 100.0}


@pytest.mark.parametrize("trigger", ["unit", pytest.param("global", marks=ON_ENGINE)])
def test_events_hold_bounds_of_the_gradient_that_is_taken(launch: Launch, trigger: str) -> None:
    """A dropped gradient is neither in it nor in the statistics."""
    options = {**DETECT, "spike_trigger": trigger, "layer_clip": {"warmup_steps": 5}}
    spiked = of_two_ranks(launch, SPIKE, options)
    (event,) = json.loads(spiked["events"][0])
    layers = event["layer_clip"]
    assert layers.keys() == set(spiked["layers"]) == event["units"][0]["layer_norms"].keys()
    assert layers.keys() == event["culprits"][0]["layer_norms"].keys()
    assert all(layer["bound"] is None and layer["factor"] == 1.0 for layer in layers.values())
    assert math.sqrt(sum(layer["norm"] ** 2 for layer in layers.values())) == pytest.approx(event["global_norm"])
    dropped = of_two_ranks(launch, SPIKE, {**options, "spike_action": "drop"})
    (event,) = json.loads(dropped["events"][0])
    assert event["applied"] and event["layer_clip"] == dropped["last_step"]
    for name, layer in dropped["last_step"].items():
        assert layer["norm"] < 0.5 * spiked["last_step"][name]["norm"]
    check_seen(dropped)


@ON_ENGINE
def test_an_overflow_and_a_skipped_step_update_no_statistics(launch: Launch) -> None:
    overflow = Case(precision="float16", loss_scale=2.0**40)
    result = of_two_ranks(launch, overflow, {"layer_clip": {"warmup_steps": 1}})
    assert {layer["count"] for layer in result["statistics"].values()} == {0}
    assert result["steps"] == 0  # the scaler left it out
    options = {**DETECT, "spike_action": "skip", "layer_clip": {"warmup_steps": 1}}
    result = of_two_ranks(launch, SPIKE, options)
    assert {layer["count"] for layer in result["statistics"].values()} == {0}
    assert "actor/layer_clip/fraction" not in result["metrics"][0]
    # Its factors are in the evidence all the same.
    taken = of_two_ranks(launch, SPIKE, DETECT, all_over)
    skipped = of_two_ranks(launch, SPIKE, {**DETECT, "spike_action": "skip"}, all_over)
    (would_be,), (done,) = (json.loads(run["events"][0]) for run in (skipped, taken))
    assert would_be["applied"] and would_be["layer_clip"] == done["layer_clip"] == taken["last_step"]
    assert any(layer["factor"] < 1 for layer in taken["last_step"].values())
    # After a skipped mini-batch, the next one's own gradient is measured.
    result = of_two_ranks(launch, dataclasses.replace(SPIKE, mini_batch=4), {**options, "spike_trigger": "global"})
    assert {layer["count"] for layer in result["statistics"].values()} == {1}
    check_seen(result)


@pytest.mark.parametrize(("wrap", "shared"), [("fsdp1", True), pytest.param("fsdp2", False, marks=ON_ENGINE)])
def test_resuming_from_a_checkpoint_is_like_never_stopping(
    launch: Launch, tmp_path: Path, wrap: str, shared: bool
) -> None:
    batches = range(1, 7), (7, 8, 0)
    results = launch(2, partial(resume, shared=shared), str(tmp_path / "checkpoint"), wrap, *batches)
    for straight, resumed, warnings in results:
        for step, other in zip(straight, resumed, strict=True):
            assert other["threshold"] == pytest.approx(step["threshold"], rel=1e-12)
            assert (other["layers"], other["clips"]) == (step["layers"], step["clips"])
        assert any(layer["factor"] < 1 for step in straight for layer in step["layers"].values())
        assert straight[-1]["clips"] and warnings == []
        (event,), (of_resumed,) = straight[-1]["events"], resumed[-1]["events"]
        assert [(c["rank"], c["micro_batch"], c["position"]) for c in event["culprits"]] == [(1, 0, 6)]
        assert event["trigger"]["threshold"] < event["trigger"]["norm"]
        assert (event["steps_since_resume"], of_resumed["steps_since_resume"]) == (None, 3)
        assert straight[-1]["events"] == results[0][0][-1]["events"]


def test_a_run_without_it_resumes_with_what_it_has_learned(launch: Launch, tmp_path: Path) -> None:
    """For the bundles of a run that has LayerClip off."""
    case, folder = Case(rows=4, mini_batch=2), str(tmp_path)
    detection = {"spike_detection": True, "grad_norm_threshold": 1e30, "spike_replay": 1, "bisect_dump_dir": folder}

    def learned_while_off() -> tuple[dict[str, Any], dict[str, Any]]:
        actor, manager = with_checkpoints(case, enable=False, **detection)
        actor.update_policy(build_batch(case, dist.get_rank(), 1))
        manager.save_checkpoint(folder)
        resumed, manager = with_checkpoints(case, enable=False, **detection)
        manager.load_checkpoint(folder)
        return actor.watch.layer_clip.state_dict(), resumed.watch.layer_clip.state_dict()

    for saved, loaded in launch(2, learned_while_off):
        assert saved == loaded and {layer["count"] for layer in saved.values()} == {2}


NOT_LOADED = (
    "No LayerClip statistics are loaded (there is no gradloc_state.pt beside the checkpoint, or "
    "checkpoint.load_contents is without 'extra'); the warm-up starts over."
)

UNREADABLE = (
    "{}/gradloc_state.pt cannot be read (ValueError: its form is None, and this release knows 3): all warm-ups start "
    "over"
)
NOT_USED = "layer_clip in gradloc_state.pt is not used, and its warm-up starts over:"
OTHER = "layers only in the checkpoint: ['layers.7']; only in this model: ['layers.1']"


def test_a_checkpoint_without_its_statistics_is_warned_of(launch: Launch, tmp_path: Path) -> None:
    """One that has none, or from which the extra state is not loaded."""
    folder = str(tmp_path)
    results = launch(2, partial(resume, change=without_statistics), folder)
    for (straight,), (resumed,), warnings in results:
        assert warnings == [NOT_LOADED]
        assert None not in {layer["bound"] for layer in straight["layers"].values()}
        assert {layer["bound"] for layer in resumed["layers"].values()} == {None}
    contents = {"load_contents": ["model", "optimizer"], "save_contents": ["model", "optimizer", "extra"]}
    for *_, warnings in launch(2, partial(resume, checkpoint_config=contents), folder):
        first, second, third = sorted(warnings)
        assert first == NOT_LOADED and second == NOT_LOADED.replace("Layer", "Token")
        assert third.startswith("No norms are loaded for grad_norm_threshold=auto")


@pytest.mark.every_target
@cases(
    "options warning",
    ({"change": of_no_model}, UNREADABLE),
    ({"change": of_another_model}, f"{NOT_USED} rank 0: ForeseenError: it belongs to another model ({OTHER})"),
    ({"fails": True}, f"{NOT_USED} rank 1: MemoryError: a planted one"),
    ids=["unreadable", "of another model", "one rank fails"],
)
def test_a_state_that_cannot_be_used_costs_all_ranks_a_warm_up(
    launch: Launch, tmp_path: Path, options: dict[str, Any], warning: str
) -> None:
    for (straight,), (resumed,), warnings in launch(2, partial(resume, **options), str(tmp_path)):
        assert warnings == [warning.format(tmp_path)]
        assert None not in {layer["bound"] for layer in straight["layers"].values()}
        assert {layer["bound"] for layer in resumed["layers"].values()} == {None}
        # Other parts that can be read have what they learned.
        assert (resumed["norms"] == straight["norms"]) == (warning != UNREADABLE)
