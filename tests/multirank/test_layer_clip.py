"""LayerClip's exactness under every wrapping, and the actor that uses it."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import layer_clip_cases
import pytest
from actors import ENGINE, Case
from cluster import RankFailed
from test_actor import Launch, on_ranks
from valid_events import valid_events
from verl import DataProto
from verl.utils.metric import reduce_metrics

ON_ENGINE = (pytest.mark.target(version="0.9.1"),)
# Gradients of a few thousand float32 numbers each, summed in another order.
EXACT = 1e-6


@on_ranks(
    (1, Case("fsdp1")),
    *[(size, Case("fsdp2", tied=size == 2)) for size in (2, 3)],
    (3, Case("fsdp1-orig")),
    (2, Case("none")),
    (4, Case("fsdp1", hsdp=True)),
    (4, Case("fsdp2", hsdp=True)),
    (2, Case("fsdp1", "frozen")),
    (2, Case("fsdp2", "frozen")),
    *[(2, Case(wrap, "lora")) for wrap in ("fsdp1-orig", "fsdp2")],
    (2, Case("fsdp1-orig", "moe")),
    (2, Case("fsdp2", "moe")),
    (2, Case("fsdp1", tied=True, offload_policy=True)),
    (2, Case("fsdp2", offload_policy=True)),
)
def test_norms_and_clipped_gradients_are_those_of_one_process(launch: Launch, world: int, case: Case) -> None:
    all_gathers = 0 if world == 1 or case.wrap == "none" else 1
    results = launch(world, layer_clip_cases.compare, case, all_gathers)
    for figures, error, of_frozen in results:
        for name, (found, expected) in figures.items():
            assert found == pytest.approx(expected, rel=EXACT), name
        norms, factors = figures["norms"], figures["factors"][0].values()
        assert list(norms[0]) == list(norms[1])
        assert 0 < sum(factor < 1 for factor in factors) < len(factors)
        assert error < EXACT and of_frozen == 0
        if case.wrap != "none":
            assert norms[0] == results[0][0]["norms"][0]  # bit for bit: no rank decides otherwise


def test_statistics_do_not_depend_on_the_number_of_ranks(launch: Launch, tmp_path: Path) -> None:
    """verl names a checkpoint's files by the number of ranks; for another one they are copied to its names."""
    steps = layer_clip_cases.gradient_steps
    whole = launch(2, steps, "fsdp2", range(8))[0]
    launch(2, steps, "fsdp2", range(4), str(tmp_path))
    assert any(layer["factor"] < 1 for layer in whole[5].values())
    for size, wrap in ((1, "fsdp2"), (3, "fsdp1")):
        for rank in range(size):
            target = tmp_path / f"extra_state_world_size_{size}_rank_{rank}.pt"
            shutil.copy(tmp_path / f"extra_state_world_size_2_rank_{rank % 2}.pt", target)
        for resumed in launch(size, steps, wrap, range(4, 8), None, str(tmp_path)):
            assert {name: layer["bound"] for name, layer in resumed[0].items()} == {
                name: layer["bound"] for name, layer in whole[4].items()
            }
            for found, expected in zip(resumed, whole[4:], strict=True):
                for name in expected:
                    assert found[name] == pytest.approx(expected[name], rel=EXACT)


@pytest.mark.parametrize(("wrap", "rollout"), [("fsdp1", True), pytest.param("fsdp2", False, marks=ON_ENGINE)])
def test_layer_clip_off_is_the_unpatched_actor(launch: Launch, wrap: str, rollout: bool) -> None:
    for result in launch(2, layer_clip_cases.off_and_stock, wrap, rollout):
        assert all(result.values()), result


@pytest.mark.parametrize("wrap", ["fsdp1", pytest.param("fsdp2", marks=ON_ENGINE)])
def test_the_host_waits_for_the_device_as_often_as_without(launch: Launch, wrap: str) -> None:
    for stock, ours in launch(2, layer_clip_cases.host_reads, wrap):
        # verl 0.9's step reads the norm before LayerClip returns its own.
        assert len(ours) - ENGINE == len(stock) > 0, (stock, ours)
        assert ours.count("tolist") == 1  # all layers' norms at once


def run_actor(launch: Launch, case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What two ranks found, after checking that they found the same."""
    return same(launch(2, layer_clip_cases.run_actor, case, options))


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


def check_seen(result: dict[str, Any]) -> None:
    """The optimizer has seen what LayerClip made of the last step's gradient, after the global clip at norm 1."""
    clipped = {name: layer["norm"] * layer["factor"] for name, layer in result["last_step"].items()}
    # as torch computes it
    scale = min(1.0, 1 / (math.sqrt(sum(norm**2 for norm in clipped.values())) + 1e-6))
    assert result["seen"][-1] == pytest.approx({name: scale * norm for name, norm in clipped.items()}, rel=EXACT)


HALF = {"precision": "float16", "loss_scale": 2.0**10}
# The number of ranks, the case, and whether GradLoc is on as well.
CONFIGURATIONS: list[tuple[int, dict[str, Any], bool]] = [
    (1, {"wrap": "none"}, True),
    (2, {"wrap": "fsdp1", **HALF}, False),
    (2, {"wrap": "fsdp1-orig", **HALF}, True),
    (2, {"wrap": "fsdp2", "precision": "bfloat16"}, True),
    (4, {"wrap": "fsdp1", "hsdp": True}, True),
]
# With the engine of verl 0.9, which may defer the reduction, too.
WITH_ENGINE: list[tuple[int, dict[str, Any], bool]] = [
    (2, {"wrap": "fsdp1-orig", "deferred": True, "model": "lora"}, False),
    (2, {"wrap": "fsdp2", "deferred": True, **HALF}, True),
]


@pytest.mark.parametrize(
    ("size", "case", "with_gradloc"),
    [
        pytest.param(*row, id="-".join([str(row[0]), Case(**row[1]).id, *["with_gradloc"] * row[2]]), marks=marks)
        for rows, marks in ((CONFIGURATIONS, ()), (WITH_ENGINE, ON_ENGINE))
        for row in rows
    ],
)
def test_layers_are_clipped_in_every_configuration(
    launch: Launch, size: int, case: dict[str, Any], with_gradloc: bool
) -> None:
    """The norm that the stock actor measures is divided among the layers: not all can be over their part, nor under."""
    # With GradLoc they are measured before the gradient is unscaled, without it afterwards.
    gradloc = {"spike_detection": True, "spike_trigger": "global", "grad_norm_threshold": 1e6}
    results = launch(size, layer_clip_cases.clip_to_parts, case, gradloc if with_gradloc else {})
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
    assert metrics["actor/layer_clip/tightest_layer"] == ratios.index(max(ratios))
    assert metrics["actor/layer_clip/min_factor"] == pytest.approx(1 / max(ratios))
    assert metrics["actor/layer_clip/fraction"] == sum(ratio > 1 for ratio in ratios) / len(layers)
    for layer in layers:
        assert layer["factor"] == pytest.approx(min(1.0, layer["bound"] / layer["norm"]))
    clipped = math.sqrt(sum((layer["norm"] * layer["factor"]) ** 2 for layer in layers))
    assert clipped < 0.95 * norm
    assert result["seen_norm"] == pytest.approx(clipped * min(1.0, 1 / (clipped + 1e-6)), rel=1e-5)
    if case["wrap"] in ("fsdp2", "none"):
        check_seen(result)


@pytest.mark.target(version="0.9.1")
def test_an_overflow_under_fp16_updates_nothing(launch: Launch) -> None:
    case = {"precision": "float16", "loss_scale": 2.0**40}
    result = run_actor(launch, case, {"layer_clip": {"rule": "ratio", "warmup_steps": 1}})
    assert {layer["count"] for layer in result["statistics"].values()} == {0}
    assert result["steps"] == 0  # the scaler left it out


SPIKE = {"planted": ((1, 3, 6),)}
DETECT = {"spike_detection": True, "grad_norm_threshold": 100.0}


@pytest.mark.parametrize("trigger", ["unit", pytest.param("global", marks=ON_ENGINE)])
def test_events_hold_bounds_and_a_gradient_is_measured_once(launch: Launch, trigger: str) -> None:
    options = {**DETECT, "spike_trigger": trigger, "layer_clip": {"rule": "ratio", "warmup_steps": 2}}
    result = run_actor(launch, {**SPIKE, "mini_batch": 4}, options)
    (event,) = json.loads(result["events"][0])
    assert event["mini_batch"] == 0
    layers = event["layer_clip"]
    assert set(layers) == set(result["layers"]) == set(event["units"][0]["layer_norms"])
    assert set(layers) == set(event["culprits"][0]["layer_norms"])
    assert all(layer["bound"] is None and layer["factor"] == 1.0 for layer in layers.values())
    assert math.sqrt(sum(layer["norm"] ** 2 for layer in layers.values())) == pytest.approx(event["global_norm"])
    assert result["measured"] == 2  # mini-batches
    result = run_actor(launch, {**SPIKE, "mini_batch": 4}, {**options, "layer_clip": {"rule": "fixed"}})
    (event,) = json.loads(result["events"][0])
    for layer in event["layer_clip"].values():
        assert layer["factor"] == pytest.approx(min(1.0, layer["bound"] / layer["norm"]))


@pytest.mark.every_target
def test_metrics_have_their_names_in_the_log(launch: Launch) -> None:
    options = {**DETECT, "layer_clip": {"rule": "fixed", "log_layers": True}}
    ranks = launch(2, layer_clip_cases.run_actor, {**SPIKE, "mini_batch": 4, "rollout": True}, options)
    together = DataProto.concat([DataProto(meta_info={"metrics": rank["metrics"][0]}) for rank in ranks])
    metrics = reduce_metrics(together.meta_info["metrics"])
    names = {name for name in metrics if "gradloc" in name or "layer_clip" in name}
    gradloc = ["token_norm_max", "threshold", "triggered", "culprits", "passes", "seconds", "out_of_time", "skipped"]
    gradloc += ["spike_margin", "ratio_max", "rollout_ratio_max", "unlikely_share", "misplaced_share"]
    layer_clip = ["fraction", "min_factor", "tightest_layer", "norm_max_ratio"]
    layer_clip += [f"{figure}/{layer}" for figure in ("norm", "bound") for layer in ranks[0]["layers"]]
    assert names == {f"actor/gradloc/{name}" for name in [*gradloc, "misaligned_share"]} | {
        f"actor/layer_clip/{name}" for name in layer_clip
    }


@pytest.mark.target(version="0.9.1")
def test_a_skipped_step_updates_no_statistics(launch: Launch) -> None:
    options = {**DETECT, "spike_action": "skip", "layer_clip": {"rule": "ratio", "warmup_steps": 1}}
    result = run_actor(launch, SPIKE, options)
    (event,) = json.loads(result["events"][0])
    assert event["applied"]
    assert {layer["count"] for layer in result["statistics"].values()} == {0}
    assert "actor/layer_clip/fraction" not in result["metrics"][0]
    # What it would have done is told all the same.
    assert set(event["layer_clip"]) == set(result["layers"]) and result["last_step"] == {}
    assert {(layer["bound"], layer["factor"]) for layer in event["layer_clip"].values()} == {(None, 1.0)}
    assert result["measured"] == 1
    taken = run_actor(launch, SPIKE, {**DETECT, "layer_clip": {"rule": "fixed"}})
    skipped = run_actor(launch, SPIKE, {**DETECT, "spike_action": "skip", "layer_clip": {"rule": "fixed"}})
    (would_be,), (done,) = (json.loads(run["events"][0]) for run in (skipped, taken))
    assert would_be["layer_clip"] == done["layer_clip"] == taken["last_step"]
    assert any(layer["factor"] < 1 for layer in taken["last_step"].values())
    # After a skipped mini-batch, the next one's own gradient is measured.
    result = run_actor(launch, {**SPIKE, "mini_batch": 4}, {**options, "spike_trigger": "global"})
    assert {layer["count"] for layer in result["statistics"].values()} == {1}
    check_seen(result)


@pytest.mark.parametrize("trigger", ["unit", "global"])
def test_a_dropped_gradient_is_not_in_the_statistics(launch: Launch, trigger: str) -> None:
    options = {**DETECT, "spike_trigger": trigger, "layer_clip": {"rule": "ratio", "warmup_steps": 5}}
    spiked = run_actor(launch, SPIKE, options)["last_step"]
    result = run_actor(launch, SPIKE, {**options, "spike_action": "drop"})
    (event,) = json.loads(result["events"][0])
    assert event["applied"] and event["layer_clip"] == result["last_step"]
    for name, layer in result["last_step"].items():
        assert layer["norm"] < 0.5 * spiked[name]["norm"]
    check_seen(result)


@pytest.mark.parametrize(("wrap", "shared"), [("fsdp1", True), pytest.param("fsdp2", False, marks=ON_ENGINE)])
def test_resuming_from_a_checkpoint_is_like_never_stopping(
    launch: Launch, tmp_path: Path, wrap: str, shared: bool
) -> None:
    batches = range(1, 7), (7, 8, 0)
    resume = partial(layer_clip_cases.resume, shared=shared)
    results = launch(2, resume, str(tmp_path / "checkpoint"), wrap, *batches)
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
    for saved, loaded in launch(2, layer_clip_cases.learned_while_off, str(tmp_path)):
        assert saved == loaded and {layer["count"] for layer in saved.values()} == {2}


NOT_LOADED = (
    "No LayerClip statistics are loaded (there is no gradloc_state.pt beside the checkpoint, or "
    "checkpoint.load_contents is without 'extra'); the warm-up starts over."
)


def test_a_checkpoint_without_its_statistics_is_warned_of(launch: Launch, tmp_path: Path) -> None:
    """One that has none, or from which the extra state is not loaded. Of another model, they are refused."""
    resume, folder = layer_clip_cases.resume, str(tmp_path)
    results = launch(2, partial(resume, change=layer_clip_cases.without_statistics), folder)
    for (straight,), (resumed,), warnings in results:
        assert warnings == [NOT_LOADED]
        assert None not in {layer["bound"] for layer in straight["layers"].values()}
        assert {layer["bound"] for layer in resumed["layers"].values()} == {None}
    contents = {"load_contents": ["model", "optimizer"], "save_contents": ["model", "optimizer", "extra"]}
    for *_, warnings in launch(2, partial(resume, checkpoint_config=contents), folder):
        first, second, third = sorted(warnings)
        assert first == NOT_LOADED and second == NOT_LOADED.replace("Layer", "Token")
        assert third.startswith("No norms are loaded for grad_norm_threshold=auto")
    other = r"layers only in the checkpoint: \['layers.7'\]; layers only in this model: \['layers.1'\]"
    with pytest.raises(RankFailed, match=f"ValueError: The checkpoint's LayerClip statistics .*{other}"):
        launch(2, partial(resume, change=layer_clip_cases.of_another_model), folder)


@pytest.mark.every_target
def test_a_state_that_cannot_be_read_is_an_error_on_every_rank(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "gradloc_state.pt"
    for error in launch(2, layer_clip_cases.load_unreadable, str(tmp_path)):
        assert error.startswith(f"RankFailedError: rank 0: ValueError: {path} cannot be read (")
        assert error.endswith("; restore it, or remove it, and all warm-ups start over")
