"""LayerClip's rules on their own, in one process, and the layers that names of parameters give."""

import logging
import math
import random
from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers
from notation import Caplog, cases

from gradloc import LayerClip, LayerClipConfig
from gradloc.layers.layer_clip import LayerStatistics
from gradloc.layers.reduced_norms import ReducedNorms, layer_name, layers_by_parameter

DEFAULTS = LayerClipConfig()


def statistics_of(norms: list[float], config: LayerClipConfig = DEFAULTS) -> LayerStatistics:
    """What LayerClip has learnt from a sequence of norms."""
    statistics = LayerStatistics()
    for norm in norms:
        step(statistics, norm, config)
    return statistics


def step(statistics: LayerStatistics, norm: float, config: LayerClipConfig = DEFAULTS) -> None:
    bound = statistics.bound(config)
    statistics.take_in(norm if bound is None else min(norm, bound), config)


def log_normal(count: int, spread: float = 0.3, seed: int = 0) -> list[float]:
    numbers = random.Random(seed)
    return [numbers.lognormvariate(0, spread) for _ in range(count)]


def test_bounds_are_the_formula() -> None:
    config = LayerClipConfig(z=1000.0, beta=0.9, warmup_steps=3)
    # The average that starts at zero, with the warm-up's median in place of each of its norms.
    average = 0.0
    for norm in [2.0, 2.0, 2.0, 5.0, 4.0, 6.0]:
        average = 0.9 * average + 0.1 * norm
    average /= 1 - 0.9**6
    assert statistics_of([1.0, 3.0, 2.0, 5.0, 4.0, 6.0], config).mean == pytest.approx(average, rel=1e-12)
    # The mean, and deviations of it.
    config = LayerClipConfig(z=1000.0, beta=0.9, warmup_steps=5)
    statistics = statistics_of([1.0, 2.0, 3.0, 4.0, 5.0], config)
    assert statistics.bound(config) == pytest.approx(3 + 1000 * 1.4826)
    step(statistics, 4.0, config)
    weight = 0.1 / (1 - 0.9**6)
    deviation = (1 - weight) * 1.4826 + weight * math.sqrt(math.pi / 2)
    assert statistics.bound(config) == pytest.approx(3 + weight + 1000 * deviation)


def test_a_spike_in_the_warm_up_does_not_set_the_scale() -> None:
    norms = log_normal(20)
    clean = statistics_of(norms).bound(DEFAULTS)
    spiked = statistics_of([*norms[:7], 1e6, *norms[8:]]).bound(DEFAULTS)
    assert 0.7 * clean < spiked < 1.4 * clean


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_zeros_and_non_finite_norms_change_nothing(odd: float) -> None:
    statistics, expected = LayerStatistics(), LayerStatistics()
    for norm in log_normal(60):
        statistics.take_in(norm, DEFAULTS)
        statistics.take_in(odd, DEFAULTS)
        expected.take_in(norm, DEFAULTS)
    assert statistics == expected


def test_ten_spikes_in_a_row_raise_the_bound_little() -> None:
    statistics = statistics_of(log_normal(500, 0.8))
    for _ in range(10):
        before = statistics.bound(DEFAULTS)
        step(statistics, 100.0)
        assert statistics.bound(DEFAULTS) < 1.055 * before


@pytest.mark.parametrize(("shift", "steps"), [(3, 300), (100, 300), (0.1, 300), (0.01, 600)])
def test_a_lasting_shift_is_followed(shift: float, steps: int) -> None:
    norms = log_normal(1000 + steps, 0.8)
    statistics, usual = LayerStatistics(), []
    for norm in norms[:500]:
        step(statistics, norm)
        usual.append(statistics.bound(DEFAULTS))
    mean = statistics.mean
    for norm in norms[500:-500]:
        step(statistics, shift * norm)
    assert sum(shift * norm > statistics.bound(DEFAULTS) for norm in norms[-500:]) <= 0.12 * 500
    assert statistics.mean == pytest.approx(shift * mean, rel=0.5)
    assert statistics.bound(DEFAULTS) < 1.5 * shift * sum(usual[100:]) / 400


@pytest.mark.parametrize(("quiet", "closed_to"), [(50, 0.3), (100, 0.1), (200, 0.03), (5000, 0.0)])
def test_a_quiet_phase_does_not_close_the_bound(quiet: int, closed_to: float) -> None:
    norms = log_normal(1100)
    statistics = statistics_of(norms[:500])
    before = statistics.bound(DEFAULTS)
    for _ in range(quiet):
        step(statistics, 1e-6)
    assert statistics.bound(DEFAULTS) > closed_to * before
    # From however far it has to come.
    for norm in norms[500:]:
        step(statistics, norm)
    assert statistics.bound(DEFAULTS) > 0.8 * before


def test_ordinary_norms_are_rarely_clipped() -> None:
    statistics = LayerStatistics()
    clipped = 0
    for norm in log_normal(3000):
        clipped += norm > (statistics.bound(DEFAULTS) or math.inf)
        step(statistics, norm)
    assert clipped < 0.003 * 3000
    assert statistics.mean == pytest.approx(math.exp(0.3**2 / 2), rel=0.15)
    # Bounds have a minimum.
    assert statistics_of([1.0] * 500).bound(DEFAULTS) >= 1.5  # not 1, though nothing deviates
    with_minimum = LayerClipConfig(min_bound=7.0)
    assert statistics_of([1.0] * 20, with_minimum).bound(with_minimum) == 7.0


# Median 3, median absolute deviation 1; z = 2, so that the bound is 3 + 2 * 1.4826 = 5.9652. The target is 3 and
# z² / deviations * deviation = 4 * 1.4826² / (norm - 3).
@cases(
    "min_bound norm expected",
    (0.0, 7.0, 3 + 8.79241 / 4),
    (0.0, 3e12, 3.0),
    # A lower limit of the bound is one of the target, too.
    (4.0, 103.0, 4.0),
    (9.0, 103.0, 9.0),
)
def test_a_layer_is_scaled_to_its_target(min_bound: float, norm: float, expected: float) -> None:
    model, norms = small_model(), [1.0, 2.0, 3.0, 4.0, 5.0]
    config = LayerClipConfig(min_bound=min_bound, z=2.0, warmup_steps=5)
    clip, bound = LayerClip(model, config), max(5.9652, min_bound)
    take(clip, model, *((each, 1.0) for each in norms))
    assert clip.last_step["0"] == {"norm": pytest.approx(5.0), "bound": None, "factor": 1.0}
    assert take(clip, model, (norm, 0.001)) == pytest.approx(norm)
    assert clip.state_dict()["0"]["mean"] == pytest.approx(statistics_of([*norms, norm], config).mean)
    assert clip.last_step["0"] == pytest.approx({"norm": norm, "bound": bound, "factor": expected / norm})
    assert norm_of(model[0]) == pytest.approx(expected)
    assert clip.last_step["2"]["factor"] == 1.0 and norm_of(model[2]) == pytest.approx(0.001)
    found = clip.metrics()
    assert found["actor/layer_clip/norm_max_ratio"] == pytest.approx(norm / bound)
    assert found["actor/layer_clip/min_factor"] == pytest.approx(expected / norm)


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def set_gradients(model: torch.nn.Module, norms: tuple[float, float]) -> None:
    for layer, norm in zip((model[0], model[2]), norms, strict=True):
        count = sum(parameter.numel() for parameter in layer.parameters())
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, norm / math.sqrt(count))


def take(clip: LayerClip, model: torch.nn.Module, *norms: tuple[float, float]) -> float:
    """Steps with these norms of the two layers; the last one's norm before it is clipped."""
    for each in norms:
        set_gradients(model, each)
        found = clip.clip(clip.squared_norms()).item()
    return found


def learned(model: torch.nn.Module, **options: Any) -> LayerClip:
    """A clip that has learned norms of 1 with a deviation of 0.1, so that both bounds are 1.5."""
    clip = LayerClip(model, LayerClipConfig(**options))
    clip.load_state_dict({layer: asdict(LayerStatistics(count=20, mean=1.0, deviation=0.1)) for layer in clip.layers})
    return clip


def norm_of(layer: torch.nn.Module) -> float:
    return math.sqrt(sum(p.grad.square().sum().item() for p in layer.parameters()))


def test_a_layer_without_a_gradient_is_left_alone() -> None:
    model = small_model()
    clip = learned(model)
    set_gradients(model, (6.0, 6.0))
    for parameter in model[2].parameters():
        parameter.grad = None
    clip.clip(clip.squared_norms())
    assert clip.last_step["2"] == {"norm": 0.0, "bound": 1.5, "factor": 1.0}
    assert clip.last_step["0"]["factor"] == pytest.approx((1 + 25 / 50 * 0.1) / 6)


def test_metrics_sum_up_all_steps_since_the_last_time() -> None:
    model = small_model()
    clip = learned(model, log_layers=True)
    assert clip.metrics() == {}
    take(clip, model, (0.1, 11.0))
    first = clip.last_step
    take(clip, model, (0.2, 6.0))
    bounds = {layer: [step[layer]["bound"] for step in (first, clip.last_step)] for layer in ("0", "2")}
    assert bounds["0"][0] == bounds["2"][0] == 1.5
    expected = {"fraction": 0.5, "min_factor": (1 + 25 / 100 * 0.1) / 11, "tightest_layer": 1}
    expected |= {"norm_max_ratio": 11 / 1.5, "norm/0": [0.1, 0.2], "norm/2": [11.0, 6.0]}
    expected |= {"bound/0": bounds["0"], "bound/2": bounds["2"]}
    found = clip.metrics()
    assert found.keys() == {f"actor/layer_clip/{name}" for name in expected}
    for name, value in expected.items():
        assert found[f"actor/layer_clip/{name}"] == pytest.approx(value)
    assert clip.metrics() == {}


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
VISION = {"depth": 2, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "patch_size": 2}
GROUPS = {"embed_tokens", "layers.0", "layers.1", "norm", "lm_head"}
ROUTERS = {"layers.0.router", "layers.1.router"}
VISUAL = {f"visual.{name}" for name in ("blocks.0", "blocks.1", "patch_embed.proj")} | {
    f"visual.merger.{name}" for name in ("ln_q", "mlp.0", "mlp.2")
}


# transformers 5, which verl 0.9 takes, has other modules for some of them.
@pytest.mark.target(version="0.9.1")
@cases(
    "family sizes groups",
    ("Qwen3", {}, GROUPS),
    ("Gemma2", {}, GROUPS - {"lm_head"}),  # tied
    ("Qwen3Moe", EXPERTS, GROUPS | ROUTERS),
    ("GptOss", {"num_local_experts": 3}, GROUPS | ROUTERS),
    ("Qwen2VL", {"vision_config": VISION}, GROUPS | VISUAL),
)
def test_layer_groups_of_model_families(family: str, sizes: dict[str, Any], groups: set[str], caplog: Caplog) -> None:
    kind = "ConditionalGeneration" if family == "Qwen2VL" else "CausalLM"
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(**SIZES, **sizes)
        model = getattr(transformers, f"{family}For{kind}")(config)
    model.tie_weights()
    gradients = ReducedNorms(model, torch.device("cpu"))
    assert set(gradients.layers) == groups
    assert sum(gradients.numels) == sum(parameter.numel() for parameter in model.parameters())
    assert "numbered block" not in caplog.text


@cases(
    "parameter layer",
    ("_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.self_attn.q_proj.weight", "layers.3"),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "layers.0"),
    ("transformer.h.7.attn.c_attn.weight", "h.7"),
    # A router is a group of its own.
    ("model.layers.3._fsdp_wrapped_module.mlp._fsdp_wrapped_module.gate.weight", "layers.3.router"),
    ("model.layers.3.self_attn.gate.weight", "layers.3"),
)
def test_layer_names_beside_those_of_the_families(parameter: str, layer: str) -> None:
    assert layer_name(parameter) == layer


def test_top_level_modules_are_the_layers_where_no_name_fits(caplog: Caplog) -> None:
    names = ["model.trunk.first.weight", "model.trunk.second.bias", "head.weight", "scale"]
    assert layers_by_parameter(names) == dict(zip(names, ["trunk", "trunk", "head", "scale"], strict=True))
    assert "top-level modules are used as layers: trunk, head, scale." in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    names = ["trunk.0.weight", "head.inner.weight"]
    assert layers_by_parameter(names) == dict(zip(names, ["trunk.0", "head.inner"], strict=True))
    assert caplog.text == ""
