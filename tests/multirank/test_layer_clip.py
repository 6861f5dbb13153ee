"""LayerClip's rules on their own, its exactness under every wrapping, and the actor that uses it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import shutil
from pathlib import Path
from typing import Any

import layer_clip_cases
import pytest
import torch
from actors import ENGINE, Case
from cluster import RankFailed
from layer_clip_cases import Comparison
from test_actor import WRAPS, Launch, cases, on_engine
from valid_events import valid_events
from verl import DataProto
from verl.utils.metric import reduce_metrics

from gradloc import LayerClip, LayerClipConfig
from gradloc.layers.layer_clip import TARGETS, LayerStatistics
from gradloc.layers.layer_names import layer_name, layers_by_parameter
from gradloc.layers.reduced_norms import ReducedNorms

ON_ENGINE = (pytest.mark.target(version="0.9.1"),)
# Gradients of a few thousand float32 numbers each, summed in another order.
EXACT = 1e-6
RULES = [LayerClipConfig(rule="ratio"), LayerClipConfig(rule="zscore")]
both_rules = pytest.mark.parametrize("config", RULES, ids=lambda config: config.rule)


def statistics_of(norms: list[float], config: LayerClipConfig) -> LayerStatistics:
    """What LayerClip has learnt from a sequence of norms."""
    statistics = LayerStatistics()
    for norm in norms:
        step(statistics, norm, config)
    return statistics


def step(statistics: LayerStatistics, norm: float, config: LayerClipConfig) -> None:
    bound = statistics.bound(config)
    statistics.take_in(norm if bound is None else min(norm, bound), config)


def log_normal(count: int, spread: float = 0.3, seed: int = 0) -> list[float]:
    numbers = random.Random(seed)
    return [numbers.lognormvariate(0, spread) for _ in range(count)]


# The rules


def test_ratio_is_a_multiple_of_the_bias_corrected_average() -> None:
    config = LayerClipConfig(rule="ratio", ratio=1000.0, beta=0.9, warmup_steps=3)
    norms = [1.0, 3.0, 2.0, 5.0, 4.0, 6.0]
    # The average that starts at zero, with the warm-up's median in place of each of its norms.
    average = 0.0
    for norm in [2.0, 2.0, 2.0, 5.0, 4.0, 6.0]:
        average = 0.9 * average + 0.1 * norm
    average /= 1 - 0.9**6
    assert statistics_of(norms, config).bound(config) == pytest.approx(1000 * average, rel=1e-12)


def test_zscore_is_mean_plus_deviations() -> None:
    config = LayerClipConfig(rule="zscore", z=1000.0, beta=0.9, warmup_steps=5)
    statistics = statistics_of([1.0, 2.0, 3.0, 4.0, 5.0], config)
    assert statistics.bound(config) == pytest.approx(3 + 1000 * 1.4826)
    step(statistics, 4.0, config)
    weight = 0.1 / (1 - 0.9**6)
    deviation = (1 - weight) * 1.4826 + weight * math.sqrt(math.pi / 2)
    assert statistics.bound(config) == pytest.approx(3 + weight + 1000 * deviation)


def test_the_deviation_of_normal_norms_is_the_standard_one() -> None:
    numbers = random.Random(0)
    config = LayerClipConfig(beta=0.999, z=5)
    statistics = statistics_of([numbers.gauss(10, 1) for _ in range(20000)], config)
    # 2% off, since a distance of more than 2.5 deviations counts as 2.5, and a few percent by chance.
    assert statistics.bound(config) == pytest.approx(15, rel=0.05)


@both_rules
@pytest.mark.parametrize("spike", [100.0, 1e6])
def test_a_spike_in_the_warm_up_does_not_set_the_scale(config: LayerClipConfig, spike: float) -> None:
    norms = log_normal(20)
    clean = statistics_of(norms, config).bound(config)
    spiked = statistics_of([*norms[:7], spike, *norms[8:]], config).bound(config)
    assert 0.7 * clean < spiked < 1.4 * clean


@both_rules
@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_zeros_and_non_finite_norms_change_nothing(config: LayerClipConfig, odd: float) -> None:
    norms = log_normal(60)
    mixed = [norm for pair in zip(norms, [odd] * 60, strict=True) for norm in pair]
    statistics = LayerStatistics()
    for norm in mixed:
        statistics.take_in(norm, config)
    expected = LayerStatistics()
    for norm in norms:
        expected.take_in(norm, config)
    assert statistics == expected


@both_rules
@pytest.mark.parametrize("spread", [0.3, 0.5, 0.8])
def test_ten_spikes_in_a_row_raise_the_bound_little(config: LayerClipConfig, spread: float) -> None:
    statistics = statistics_of(log_normal(500, spread), config)
    for _ in range(10):
        before = statistics.bound(config)
        step(statistics, 100.0, config)
        assert statistics.bound(config) < 1.055 * before


@both_rules
@pytest.mark.parametrize("shift", [3, 100, 0.33])
@pytest.mark.parametrize("spread", [0.3, 0.8])
def test_a_lasting_shift_is_followed_within_300_steps(config: LayerClipConfig, shift: float, spread: float) -> None:
    norms = log_normal(1300, spread)
    statistics = statistics_of(norms[:500], config)
    old = statistics.mean
    for norm in norms[500:800]:
        step(statistics, shift * norm, config)
    clipped = sum(shift * norm > statistics.bound(config) for norm in norms[800:])
    assert clipped <= 0.12 * 500
    assert statistics.mean == pytest.approx(shift * old, rel=0.5)


@both_rules
@pytest.mark.parametrize(("shift", "steps"), [(0.1, 300), (0.01, 600)])
@pytest.mark.parametrize("spread", [0.3, 0.8])
def test_a_lasting_fall_is_followed(config: LayerClipConfig, shift: float, steps: int, spread: float) -> None:
    norms = log_normal(500 + steps, spread)
    statistics, usual = LayerStatistics(), []
    for norm in norms[:500]:
        step(statistics, norm, config)
        usual.append(statistics.bound(config))
    for norm in norms[500:]:
        step(statistics, shift * norm, config)
    assert statistics.bound(config) < 1.5 * shift * sum(usual[100:]) / 400


@both_rules
@pytest.mark.parametrize(("quiet", "closed_to"), [(50, 0.3), (100, 0.1), (200, 0.03), (5000, 0.0)])
def test_a_quiet_phase_does_not_close_the_bound(config: LayerClipConfig, quiet: int, closed_to: float) -> None:
    norms = log_normal(1100)
    statistics = statistics_of(norms[:500], config)
    before = statistics.bound(config)
    for _ in range(quiet):
        step(statistics, 1e-6, config)
    assert statistics.bound(config) > closed_to * before
    # From however far it has to come.
    for norm in norms[500:]:
        step(statistics, norm, config)
    assert statistics.bound(config) > 0.8 * before


@both_rules
def test_ordinary_norms_are_rarely_clipped(config: LayerClipConfig) -> None:
    statistics = LayerStatistics()
    clipped = 0
    for norm in log_normal(3000):
        clipped += norm > (statistics.bound(config) or math.inf)
        step(statistics, norm, config)
    assert clipped < 0.003 * 3000
    assert statistics.mean == pytest.approx(math.exp(0.3**2 / 2), rel=0.15)


@both_rules
def test_bounds_have_a_minimum(config: LayerClipConfig) -> None:
    config = LayerClipConfig(rule=config.rule)
    start = [1.0] * 20
    assert statistics_of([1.0] * 500, config).bound(config) >= 1.5  # not 1, though nothing deviates
    with_minimum = LayerClipConfig(rule=config.rule, min_bound=7.0)
    assert statistics_of(start, with_minimum).bound(with_minimum) == 7.0


def test_the_larger_the_norm_the_nearer_its_target_to_the_mean() -> None:
    # Median 3, median absolute deviation 1; z = 2, so that the bound is 3 + 2 * 1.4826 = 5.9652.
    config = LayerClipConfig(z=2.0, warmup_steps=5)
    statistics = statistics_of([1.0, 2.0, 3.0, 4.0, 5.0], config)
    bound = statistics.bound(config)
    assert bound == pytest.approx(5.9652)
    # z² / deviations * deviation = 4 * 1.4826² / (norm - 3)
    for norm, expected in ((5.9652, 5.9652), (7.0, 3 + 8.79241 / 4), (103.0, 3.0879241), (3e12, 3.0)):
        assert statistics.target(norm, bound, config) == pytest.approx(expected, rel=1e-6)
        assert statistics.target(norm, bound, dataclasses.replace(config, target="bound")) == bound
    # A lower limit of the bound is one of the target, too.
    for limit, norm, expected in ((4.0, 103.0, 4.0), (4.0, 7.0, 3 + 8.79241 / 4), (9.0, 103.0, 9.0)):
        limited = dataclasses.replace(config, min_bound=limit)
        limit_or_bound = statistics.bound(limited)
        assert statistics.target(norm, limit_or_bound, limited) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_a_layer_is_scaled_to_its_target(target: str) -> None:
    model = small_model()
    clip = LayerClip(model, LayerClipConfig(target=target, z=2.0, warmup_steps=5))
    for norm in (1.0, 2.0, 3.0, 4.0, 5.0):
        set_gradients(model, (norm, 1.0))
        clip.clip(clip.squared_norms())
    set_gradients(model, (103.0, 1.0))
    clip.clip(clip.squared_norms())
    expected = {"reciprocal": 3.0879241, "bound": 5.9652}[target]
    assert clip.last_step["0"] == {
        "norm": pytest.approx(103),
        "bound": pytest.approx(5.9652),
        "factor": pytest.approx(expected / 103),
    }
    assert math.sqrt(sum(p.grad.square().sum().item() for p in model[0].parameters())) == pytest.approx(expected)
    assert clip.last_step["2"]["factor"] == 1.0
    found = clip.metrics()
    assert found["actor/layer_clip/norm_max_ratio"] == pytest.approx(103 / 5.9652)
    assert found["actor/layer_clip/min_factor"] == pytest.approx(expected / 103)


@pytest.mark.parametrize("rule", ["zscore", "ratio", "fixed"])
def test_statistics_do_not_depend_on_the_target(rule: str) -> None:
    # So a checkpoint goes on under the other one, and a lasting hundredfold rise is followed under both.
    clips = []
    for target in TARGETS:
        model = small_model()
        clips.append(LayerClip(model, LayerClipConfig(rule=rule, target=target)))
        for norm in [*log_normal(100), *(100 * norm for norm in log_normal(300, seed=1)), 1e6]:
            set_gradients(model, (norm, 1.0))
            clips[-1].clip(clips[-1].squared_norms())
        assert rule == "fixed" or clips[-1].last_step["0"]["bound"] > 150
    reciprocal, bound = (clip.last_step["0"] for clip in clips)
    assert clips[0].state_dict() == clips[1].state_dict()
    # Only zscore's target is another.
    assert (reciprocal == bound) == (rule != "zscore")
    assert bound["factor"] * bound["norm"] == pytest.approx(bound["bound"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable": 1}, "layer_clip.enable must be True or False, got 1."),
        ({"rule": "median"}, "layer_clip.rule must be one of ['zscore', 'ratio', 'fixed'], got 'median'."),
        ({"target": "mean"}, "layer_clip.target must be one of ['reciprocal', 'bound'], got 'mean'."),
        ({"z": 0}, "layer_clip.z must be a positive number, got 0."),
        ({"ratio": 1.0}, "layer_clip.ratio must be a number over 1, got 1.0."),
        ({"beta": 1.0}, "layer_clip.beta must be a number between 0 and 1, got 1.0."),
        ({"warmup_steps": 0}, "layer_clip.warmup_steps must be an integer over 0, got 0."),
        ({"warmup_steps": True}, "layer_clip.warmup_steps"),
        ({"min_bound": -1}, "layer_clip.min_bound must be a number of at least 0, got -1."),
        ({"max_norm": 0.0}, "layer_clip.max_norm must be a positive number, got 0.0."),
        ({"log_layers": "yes"}, "layer_clip.log_layers must be True or False, got 'yes'."),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        LayerClipConfig(**values)
    assert message in str(error.value)


# One process


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def set_gradients(model: torch.nn.Module, norms: tuple[float, float]) -> None:
    for layer, norm in zip((model[0], model[2]), norms, strict=True):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        total = math.sqrt(sum(parameter.numel() for parameter in layer.parameters()))
        for parameter in layer.parameters():
            parameter.grad *= norm / total


def test_only_layers_over_their_bound_are_scaled() -> None:
    model = small_model()
    clip = LayerClip(model, LayerClipConfig(rule="ratio", warmup_steps=2))
    for _ in range(2):
        set_gradients(model, (1.0, 2.0))
        clip.clip(clip.squared_norms())
        assert clip.last_step["0"] == {"norm": pytest.approx(1.0), "bound": None, "factor": 1.0}
    set_gradients(model, (30.0, 0.001))
    calm = [parameter.grad.clone() for parameter in model[2].parameters()]
    assert clip.clip(clip.squared_norms()).item() == pytest.approx(30.0)
    assert clip.last_step["0"] == {"norm": pytest.approx(30), "bound": pytest.approx(3), "factor": pytest.approx(0.1)}
    assert clip.last_step["2"]["factor"] == 1.0
    assert all(torch.equal(p.grad, before) for p, before in zip(model[2].parameters(), calm, strict=True))
    assert math.sqrt(sum(p.grad.square().sum().item() for p in model[0].parameters())) == pytest.approx(3.0)


@both_rules
def test_the_statistics_take_in_the_clipped_norm(config: LayerClipConfig) -> None:
    model = small_model()
    clip = LayerClip(model, config)
    expected = LayerStatistics()
    for norm in [*log_normal(50), 1e6, 1.0, 1e6]:
        set_gradients(model, (norm, 1.0))
        clip.clip(clip.squared_norms())
        step(expected, clip.last_step["0"]["norm"], config)
    found = clip.state_dict()["0"]
    assert (found["mean"], found["deviation"]) == pytest.approx((expected.mean, expected.deviation), rel=1e-5)
    assert clip.last_step["0"]["bound"] < 10


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_non_finite_gradient_is_left_to_the_optimizer_step(broken: float) -> None:
    model = small_model()
    clip = LayerClip(model, LayerClipConfig(rule="ratio", warmup_steps=1))
    set_gradients(model, (1.0, 1.0))
    clip.clip(clip.squared_norms())
    before = clip.state_dict()
    set_gradients(model, (99.0, 1.0))
    model[2].weight.grad[0, 0] = broken
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    assert not math.isfinite(clip.clip(clip.squared_norms()).item())
    assert clip.state_dict() == before
    assert all(torch.equal(p.grad.nan_to_num(), k.nan_to_num()) for p, k in zip(model.parameters(), kept, strict=True))
    assert {step["factor"] for step in clip.last_step.values()} == {1.0}


def test_a_layer_without_a_gradient_is_left_alone() -> None:
    model = small_model()
    clip = LayerClip(model, LayerClipConfig(rule="fixed", max_norm=0.1))
    set_gradients(model, (1.0, 1.0))
    for parameter in model[2].parameters():
        parameter.grad = None
    clip.clip(clip.squared_norms())
    assert clip.last_step["2"] == {"norm": 0.0, "bound": pytest.approx(0.1 * math.sqrt(10 / 26)), "factor": 1.0}
    assert clip.last_step["0"]["factor"] == pytest.approx(0.1 * math.sqrt(16 / 26))


def test_norms_of_large_layers_are_exact_on_the_cpu() -> None:
    layer = torch.nn.Linear(1000, 3001, bias=False)
    layer.weight.grad = torch.randn(3001, 1000, generator=torch.Generator().manual_seed(0))
    (square,) = ReducedNorms(layer, torch.device("cpu")).squared_norms().tolist()
    assert square == pytest.approx(layer.weight.grad.double().square().sum().item(), rel=EXACT)


def test_metrics_sum_up_all_steps_since_the_last_time() -> None:
    model = small_model()
    clip = LayerClip(model, LayerClipConfig(rule="fixed", max_norm=2.0, log_layers=True))
    assert clip.metrics() == {}
    bounds = [2.0 * math.sqrt(16 / 26), 2.0 * math.sqrt(10 / 26)]
    for norms in ((0.1, 10.0), (0.2, 5.0)):
        set_gradients(model, norms)
        clip.clip(clip.squared_norms())
    expected = {
        "fraction": 0.5,
        "min_factor": bounds[1] / 10,
        "tightest_layer": 1,
        "norm_max_ratio": 10 / bounds[1],
        "norm/0": [0.1, 0.2],
        "norm/2": [10.0, 5.0],
        "bound/0": [bounds[0]] * 2,
        "bound/2": [bounds[1]] * 2,
    }
    found = clip.metrics()
    assert found.keys() == {f"actor/layer_clip/{name}" for name in expected}
    for name, value in expected.items():
        assert found[f"actor/layer_clip/{name}"] == pytest.approx(value)
    assert clip.metrics() == {}


def test_metrics_without_a_bound_invent_none() -> None:
    model = small_model()
    clip = LayerClip(model, LayerClipConfig(rule="ratio"))
    set_gradients(model, (1.0, 1.0))
    clip.clip(clip.squared_norms())
    assert clip.metrics() == {"actor/layer_clip/fraction": 0.0, "actor/layer_clip/min_factor": 1.0}


def test_statistics_are_saved_and_loaded(caplog: pytest.LogCaptureFixture) -> None:
    model, other = small_model(), small_model()
    config = LayerClipConfig(rule="zscore", warmup_steps=4)
    straight, resumed = LayerClip(model, config), LayerClip(other, config)
    norms = log_normal(30)
    for i in range(0, 30, 2):
        if i in (4, 20):  # during the warm-up and after it, as a file holds it
            resumed = LayerClip(other, config)
            resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        for clip, module in ((straight, model), (resumed, other)):
            set_gradients(module, (norms[i], norms[i + 1]))
            clip.clip(clip.squared_norms())
        assert straight.last_step == resumed.last_step
    assert caplog.text == ""
    resumed.load_state_dict(None)
    assert "No LayerClip statistics are loaded" in caplog.text
    assert resumed.state_dict() == LayerClip(other, config).state_dict()


def test_statistics_of_another_model_are_refused() -> None:
    clip = LayerClip(small_model(), LayerClipConfig())
    with pytest.raises(ValueError) as error:
        clip.load_state_dict({"layers.0": {}, "2": {}})
    assert str(error.value) == (
        "The checkpoint's LayerClip statistics belong to another model (layers only in the checkpoint: ['layers.0']; "
        "layers only in this model: ['0']): resume from a checkpoint of this model, or set "
        "actor_rollout_ref.actor.layer_clip.enable=False."
    )


# Layer groups


def family(name: str) -> tuple[torch.nn.Module, set[str]]:
    """A tiny model of a family, and the layer groups that it has to have."""
    import transformers

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    groups = {"embed_tokens", "layers.0", "layers.1", "norm", "lm_head"}
    routers = {"layers.0.router", "layers.1.router"}
    if name in ("Qwen3", "Llama"):
        config = getattr(transformers, f"{name}Config")(**sizes)
    elif name == "Gemma2":  # tied
        config, groups = getattr(transformers, f"{name}Config")(**sizes), groups - {"lm_head"}
    elif name in ("Qwen2Moe", "Qwen3Moe"):
        config = getattr(transformers, f"{name}Config")(
            **sizes,
            num_experts=3,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
        )
        groups |= routers
    elif name in ("Mixtral", "GptOss"):
        config = getattr(transformers, f"{name}Config")(**sizes, num_local_experts=3)
        groups |= routers
    else:
        vision = {"depth": 2, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "patch_size": 2}
        config = transformers.Qwen2VLConfig(**sizes, vision_config=vision)
        groups |= {f"visual.blocks.{i}" for i in range(2)} | {"visual.patch_embed.proj"}
        groups |= {"visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2"}
        return transformers.Qwen2VLForConditionalGeneration(config), groups
    return getattr(transformers, f"{name}ForCausalLM")(config), groups


# transformers 5, which verl 0.9 takes, has other modules for some of them.
FAMILIES = ["Qwen3", "Llama", "Gemma2", "Qwen2Moe", "Qwen3Moe", "Mixtral", "GptOss", "Qwen2VL"]


@pytest.mark.target(version="0.9.1")
@pytest.mark.parametrize("name", FAMILIES)
def test_layer_groups_of_model_families(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model, groups = family(name)
    model.tie_weights()
    gradients = ReducedNorms(model, torch.device("cpu"))
    assert set(gradients.layers) == groups
    assert sum(gradients.numels) == sum(parameter.numel() for parameter in model.parameters())
    assert "numbered block" not in caplog.text


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("model.layers.3.mlp.gate.weight", "layers.3.router"),
        ("base_model.model.model.layers.3.mlp.gate.lora_A.default.weight", "layers.3.router"),
        ("model.layers.3._fsdp_wrapped_module.mlp._fsdp_wrapped_module.gate.weight", "layers.3.router"),
        ("model.layers.3.block_sparse_moe.gate.weight", "layers.3.router"),
        ("model.layers.3.mlp.gate_proj.weight", "layers.3"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "layers.3"),
        ("model.layers.3.mlp.experts.7.gate_proj.weight", "layers.3"),
        ("model.layers.3.self_attn.gate.weight", "layers.3"),
    ],
)
def test_a_router_is_a_group_of_its_own(parameter: str, layer: str) -> None:
    assert layer_name(parameter) == layer


def test_top_level_modules_are_the_layers_where_no_name_fits(caplog: pytest.LogCaptureFixture) -> None:
    names = ["model.trunk.first.weight", "model.trunk.second.bias", "head.weight", "scale"]
    assert layers_by_parameter(names) == dict(zip(names, ["trunk", "trunk", "head", "scale"], strict=True))
    assert "top-level modules are used as layers: trunk, head, scale." in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    assert layers_by_parameter(["trunk.0.weight", "head.inner.weight"]) == {
        "trunk.0.weight": "trunk.0",
        "head.inner.weight": "head.inner",
    }
    assert caplog.text == ""


# Several processes


@cases(
    *[(size, Case(wrap)) for size in (1, 2, 3) for wrap in ("fsdp1", "fsdp2")],
    (2, Case("fsdp1-orig")),
    *[(size, Case("none")) for size in (1, 2)],
    (4, Case("fsdp2")),
    *[(4, Case(wrap, hsdp=True)) for wrap in ("fsdp1", "fsdp1-orig")],
    on_engine(4, Case("fsdp2", hsdp=True)),
    *[(2, Case(wrap, model)) for wrap in WRAPS for model in ("frozen", "lora")],
    *[(2, Case(wrap, "moe")) for wrap in ("fsdp1", "fsdp1-orig")],
    on_engine(2, Case("fsdp2", "moe")),
    *[(2, Case(wrap, tied=True)) for wrap in WRAPS],
    *[(2, Case(wrap, offload_policy=True)) for wrap in ("fsdp1", "fsdp2")],
)
def test_norms_and_clipped_gradients_are_those_of_one_process(launch: Launch, world: int, case: Case) -> None:
    all_gathers = 0 if world == 1 or case.wrap == "none" else 1
    results: list[Comparison] = launch(world, layer_clip_cases.compare, case, all_gathers)
    for result in results:
        assert list(result.norms) == list(result.expected_norms)
        assert result.norms == pytest.approx(result.expected_norms, rel=EXACT)
        assert result.factors == pytest.approx(result.expected_factors, rel=EXACT)
        assert result.weight_norms == pytest.approx(result.expected_weight_norms, rel=EXACT)
        assert 0 < sum(factor < 1 for factor in result.factors.values()) < len(result.factors)
        total = math.sqrt(sum(norm**2 for norm in result.expected_norms.values()))
        assert result.unclipped_norm == pytest.approx(total, rel=EXACT)
        worst = max(result.gradient_errors, key=result.gradient_errors.__getitem__)
        assert result.gradient_errors[worst] < EXACT, worst
        assert result.frozen_changes == 0
    if case.wrap != "none":
        assert all(result.norms == results[0].norms for result in results)  # bit for bit: no rank decides otherwise


def test_statistics_do_not_depend_on_the_number_of_ranks(launch: Launch, tmp_path: Path) -> None:
    """verl names a checkpoint's files by the number of ranks; for another one they are copied to its names."""
    steps = layer_clip_cases.gradient_steps
    whole = launch(2, steps, "fsdp2", range(8))[0]
    launch(2, steps, "fsdp2", range(4), str(tmp_path))
    assert any(layer["factor"] < 1 for layer in whole[5].values())
    for size, wrap in ((2, "fsdp2"), (1, "fsdp2"), (3, "fsdp1"), (4, "fsdp2")):
        for rank in range(size):
            target = tmp_path / f"extra_state_world_size_{size}_rank_{rank}.pt"
            if size != 2:
                shutil.copy(tmp_path / f"extra_state_world_size_2_rank_{rank % 2}.pt", target)
        for resumed in launch(size, steps, wrap, range(4, 8), None, str(tmp_path)):
            assert {name: layer["bound"] for name, layer in resumed[0].items()} == {
                name: layer["bound"] for name, layer in whole[4].items()
            }
            for found, expected in zip(resumed, whole[4:], strict=True):
                for name in expected:
                    assert found[name] == pytest.approx(expected[name], rel=EXACT)


# The actor


@pytest.mark.parametrize(
    ("wrap", "rollout"), [("fsdp1", True), ("fsdp1-orig", True), pytest.param("fsdp2", False, marks=ON_ENGINE)]
)
def test_layer_clip_off_is_the_unpatched_actor(launch: Launch, wrap: str, rollout: bool) -> None:
    for result in launch(2, layer_clip_cases.off_and_stock, wrap, rollout):
        assert all(result.values()), result


@pytest.mark.parametrize("wrap", ["fsdp1", pytest.param("fsdp2", marks=ON_ENGINE)])
def test_the_host_waits_for_the_device_as_often_as_without(launch: Launch, wrap: str) -> None:
    for stock, ours in launch(2, layer_clip_cases.host_reads, wrap):
        # verl 0.9's step reads the norm before LayerClip returns its own.
        assert len(ours) - ENGINE == len(stock) > 0, (stock, ours)
        assert ours.count("tolist") == 1  # all layers' norms at once


def run_actor(launch: Launch, case: dict[str, Any], options: dict[str, Any], *others: Any) -> dict[str, Any]:
    """What two ranks found, after checking that they found the same."""
    return same(launch(2, layer_clip_cases.run_actor, case, options, *others))


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


@pytest.mark.parametrize("wrap", ["fsdp1", pytest.param("fsdp2", marks=ON_ENGINE)])
def test_the_global_clip_sees_the_clipped_gradient(launch: Launch, wrap: str) -> None:
    stock = launch(2, layer_clip_cases.stock_norms, {"wrap": wrap})[0]
    for max_norm in (0.01, 3.0):
        result = run_actor(launch, {"wrap": wrap}, {"layer_clip": {"rule": "fixed", "max_norm": max_norm}})
        (metrics,) = result["metrics"]
        assert metrics["actor/grad_norm"] == pytest.approx(stock, rel=EXACT)
        if wrap == "fsdp2":
            check_seen(result)
        ratios = [layer["norm"] / layer["bound"] for layer in result["last_step"].values()]
        assert metrics["actor/layer_clip/norm_max_ratio"] == pytest.approx(max(ratios))
        assert metrics["actor/layer_clip/tightest_layer"] == ratios.index(max(ratios))
        assert metrics["actor/layer_clip/min_factor"] == pytest.approx(min(1.0, 1 / max(ratios)))
        assert metrics["actor/layer_clip/fraction"] == sum(ratio > 1 for ratio in ratios) / len(ratios)


HALF = {"precision": "float16", "loss_scale": 2.0**10}
# The number of ranks, the case, and whether GradLoc is on as well.
CONFIGURATIONS: list[tuple[int, dict[str, Any], bool]] = [
    (1, {"wrap": "none"}, True),
    (1, {"wrap": "fsdp1"}, False),
    (2, {"wrap": "fsdp1", "model": "lora"}, False),
    (2, {"wrap": "fsdp2", "precision": "bfloat16"}, True),
    (4, {"wrap": "fsdp1", "hsdp": True}, True),
]
# With the engine of verl 0.9, which may defer the reduction, too.
WITH_ENGINE: list[tuple[int, dict[str, Any], bool]] = [
    (2, {"wrap": "fsdp1", **HALF}, False),
    (2, {"wrap": "fsdp2", "deferred": True, "model": "lora"}, False),
    (2, {"wrap": "fsdp1-orig", "deferred": True}, False),
    (2, {"wrap": "fsdp2", "deferred": True, **HALF}, True),
    (4, {"wrap": "fsdp2", "hsdp": True}, True),
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
    options = {"spike_detection": True, "grad_norm_threshold": 1e6} if with_gradloc else {}
    results = launch(size, layer_clip_cases.clip_to_parts, case, options)
    (norm,) = results[0][0]
    result = same([of_rank for _, of_rank in results])
    layers = result["last_step"].values()
    # verl adds up squares in float32, of gradients that are the same.
    assert math.sqrt(sum(layer["norm"] ** 2 for layer in layers)) == pytest.approx(norm, rel=1e-5)
    assert result["metrics"][0]["actor/grad_norm"] == [pytest.approx(norm, rel=1e-5)]
    assert 0 < sum(layer["factor"] < 1 for layer in layers) < len(layers)
    for layer in layers:
        assert layer["factor"] == pytest.approx(min(1.0, layer["bound"] / layer["norm"]))
    clipped = math.sqrt(sum((layer["norm"] * layer["factor"]) ** 2 for layer in layers))
    assert clipped < 0.95 * norm
    assert result["seen_norm"] == pytest.approx(clipped * min(1.0, 1 / (clipped + 1e-6)), rel=1e-5)
    if case["wrap"] in ("fsdp2", "none"):
        check_seen(result)


@pytest.mark.parametrize(
    ("wrap", "detection"), [("fsdp1", False), ("fsdp2", False), pytest.param("fsdp2", True, marks=ON_ENGINE)]
)
def test_fp16_norms_are_those_without_the_loss_scale(launch: Launch, wrap: str, detection: bool) -> None:
    # With the detection they are measured before the gradient is unscaled, without it afterwards.
    options = {
        "spike_detection": detection,
        "spike_trigger": "global",
        "layer_clip": {"rule": "fixed", "max_norm": 0.1},
    }
    plain = run_actor(launch, {"wrap": wrap}, options)
    scaled = run_actor(launch, {"wrap": wrap}, options, 1024.0)
    for name, layer in plain["last_step"].items():
        assert scaled["last_step"][name] == pytest.approx(layer, rel=EXACT)
    if wrap == "fsdp2":
        assert scaled["seen"][0] == pytest.approx(plain["seen"][0], rel=EXACT)
    assert scaled["seen_norm"] == pytest.approx(plain["seen_norm"], rel=EXACT)


@pytest.mark.target(version="0.9.1")
def test_an_overflow_under_fp16_updates_nothing(launch: Launch) -> None:
    # A scale at which float32 gradients overflow.
    result = run_actor(launch, {}, {"layer_clip": {"rule": "ratio", "warmup_steps": 1}}, 3e38)
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


@pytest.mark.parametrize("wrap", ["fsdp1", pytest.param("fsdp2", marks=ON_ENGINE)])
def test_resuming_from_a_checkpoint_is_like_never_stopping(launch: Launch, tmp_path: Path, wrap: str) -> None:
    for straight, resumed, warnings in launch(2, layer_clip_cases.resume, str(tmp_path), wrap):
        assert straight == resumed
        assert any(layer["factor"] < 1 for step in straight for layer in step.values())
        assert warnings == []


def test_a_run_without_it_resumes_with_what_it_has_learned(launch: Launch, tmp_path: Path) -> None:
    for saved, loaded in launch(2, layer_clip_cases.learned_while_off, str(tmp_path)):
        assert saved == loaded and {layer["count"] for layer in saved.values()} == {2}


NOT_LOADED = (
    "No LayerClip statistics are loaded (there is no gradloc_state.pt beside the checkpoint, or "
    "checkpoint.load_contents is without 'extra'); the warm-up starts over."
)


@pytest.mark.target(version="0.9.1")
def test_a_checkpoint_without_its_statistics_is_warned_of(launch: Launch, tmp_path: Path) -> None:
    """One that has none, or from which the extra state is not loaded. Of another model, they are refused."""
    change = layer_clip_cases.without_statistics
    for _, resumed, warnings in launch(2, layer_clip_cases.resume, str(tmp_path), "fsdp2", change):
        assert warnings == [NOT_LOADED]
        assert {layer["bound"] for layer in resumed[0].values()} == {None}
    for warnings in launch(2, layer_clip_cases.resume_without_extra, str(tmp_path)):
        first, second = sorted(warnings)
        assert first == NOT_LOADED and second.startswith("No norms are loaded for grad_norm_threshold=auto")
    other = r"layers only in the checkpoint: \['layers.7'\]; layers only in this model: \['layers.2'\]"
    with pytest.raises(RankFailed, match=f"ValueError: The checkpoint's LayerClip statistics .*{other}"):
        launch(2, layer_clip_cases.resume, str(tmp_path), "fsdp2", layer_clip_cases.of_another_model)


@pytest.mark.every_target
def test_a_state_that_cannot_be_read_is_an_error_on_every_rank(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "gradloc_state.pt"
    for error in launch(2, layer_clip_cases.load_unreadable, str(tmp_path)):
        assert error.startswith(f"RankFailedError: rank 0: ValueError: {path} cannot be read (")
        assert error.endswith("; restore it, or remove it, and all warm-ups start over")
