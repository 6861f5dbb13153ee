"""What a replay says of gradients that were scaled, of the temperature of the rollout, and of single layers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from notation import Capsys, cases
from small_bundles import (
    NAME,
    PROMPT,
    RESPONSE,
    ROWS,
    bundle,
    kept,
    printed,
    random_ids,
    replayed,
    resave,
    resign,
    save_other_weights,
    small_model,
    spike,
    writer_of,
)

from gradloc.replay.scale import LEFT
from gradloc.replay.verdict import layers_apart_in_words
from gradloc.tools.opening import open_bundle

__all__ = ["bundle", "kept"]

MICRO_BATCHES = 3


def scaled(
    directory: Path, of_loss: float = 1.0, of_gradient: float = 1.0, of_reduced: float = 1.0, of_layer: float = 1.0
) -> list[str]:
    """The arguments to replay a mini-batch that was kept as a spike, with what is scaled wrongly."""
    model = small_model()
    model.save_pretrained(directory / "model")
    for name, parameter in model.named_parameters():
        factor = of_gradient * (of_layer if ".layers.1." in name else 1.0)
        parameter.register_hook(lambda gradient, factor=factor: factor * gradient)

    writer = writer_of(model, directory, actor={"ppo_mini_batch_size": 7})
    torch.manual_seed(1)
    ids = [random_ids() for _ in range(MICRO_BATCHES)]
    advantages = [torch.randn(ROWS, RESPONSE) for _ in range(MICRO_BATCHES)]
    event = spike(model, writer, 1e-6, 1, ids, advantages, of_loss, old=True, of_reduced=of_reduced)
    return [str(directory / event["replay"]), "--model", str(directory / "model"), "--json"]


def nothing_is_said(arguments: list[str], capsys: Capsys, *options: str) -> None:
    result = printed([*arguments, "--only", *options], capsys)
    assert result["scale"] is None and not any("times what" in sentence for sentence in result["sentences"])


FITS = {8.0: "2^3", 3.0: "the number of micro-batches (3)", 1 / 7: "1 / the number of responses"}


@pytest.mark.target(version="0.9.1")
@cases("factors", *({name: factor} for name in ("loss", "gradient", "reduced") for factor in FITS), ids=str)
def test_wrong_factors_are_named(tmp_path: Path, capsys: Any, factors: dict[str, float]) -> None:
    wrong = {f"of_{name}": factor for name, factor in factors.items()}
    result = printed([*scaled(tmp_path, **wrong), "--only"], capsys)
    assert {name for name, found in result["scale"].items() if found} == factors.keys()
    for name, factor in factors.items():
        found, fits = result["scale"][name], FITS.get(factor, "")
        assert found["factor"] == pytest.approx(factor, rel=1e-4)
        assert not fits or any(fits in text for text in found["could_be"])
        assert any(f"{factor:.4g} times what" in sentence and fits in sentence for sentence in result["sentences"])


def test_layers_with_other_factors_are_no_scale(tmp_path: Path, capsys: Any) -> None:
    """Nor has a run as it should be a factor. A layer can be really different, as with a kernel's bug."""
    arguments = scaled(tmp_path)
    for dtype in ("float32", "bfloat16"):
        nothing_is_said(arguments, capsys, "--dtype", dtype)

    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["micro_batches"]:
            entry["layer_norms"] = {layer: 8 * norm for layer, norm in entry["layer_norms"].items()}
            entry["layer_norms"]["layers.1"] *= 1.1

    resign(Path(arguments[0]), change)
    nothing_is_said(arguments, capsys)
    # Nor have other weights a factor.
    arguments = scaled(tmp_path, of_gradient=8.0)
    save_other_weights(tmp_path / "model")
    nothing_is_said(arguments, capsys)


@pytest.mark.parametrize("of_gradient", [1.0, 8.0])
def test_a_spike_in_one_layer_is_no_factor_of_the_reduction(tmp_path: Path, capsys: Any, of_gradient: float) -> None:
    nothing_is_said(scaled(tmp_path, of_gradient=of_gradient, of_layer=100.0), capsys)


def with_rollout(kept: Path, folder: Path, temperature: float, noise: float = 0.0, training: float = 1.0) -> Path:
    """The bundle with log-probs of a rollout at a temperature."""
    shutil.copytree(kept, folder)
    bundle = folder / "replay" / NAME
    (saved,) = open_bundle(bundle).micro_batches.values()
    ids = torch.stack([row.input_ids for row in saved.rows])
    with torch.no_grad():
        every = small_model()(input_ids=ids).logits[:, PROMPT - 1 : -1] / temperature
    rollout = every.log_softmax(-1).gather(-1, ids[:, PROMPT:].unsqueeze(-1)).squeeze(-1)
    rollout = rollout + noise * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(1))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["tokens.rollout_log_prob"] = rollout.float()
        tensors["temperature"][:] = training

    resave(bundle, change)
    return bundle


@pytest.mark.parametrize(("temperature", "training"), [(0.62, 1.0), (1.7, 1.0), (0.5, 0.9)])
def test_temperature_is_found(temperature: float, training: float, kept: Path, tmp_path: Path, capsys: Capsys) -> None:
    bundle = with_rollout(kept, tmp_path / "folder", temperature, 0.002, training)
    result = replayed(bundle, kept / "model", capsys, "--only")
    found = result["temperature"]
    assert found["fits"] == pytest.approx(temperature, rel=0.006) and found["training"] == pytest.approx(training)
    assert found["left"] < LEFT * found["gap"]
    said = f"another temperature: {found['fits']:.2f} fits, and training computes them at {training:g} (mean "
    assert said in result["sentences"][-1]


@pytest.mark.parametrize(("temperature", "noise"), [(1.0, 0.0), (1.0, 0.5), (1.01, 0.0)])
def test_noise_is_no_temperature(temperature: float, noise: float, kept: Path, tmp_path: Path, capsys: Capsys) -> None:
    result = replayed(with_rollout(kept, tmp_path / "folder", temperature, noise), kept / "model", capsys, "--only")
    assert result["temperature"] is None
    assert not any("temperature" in sentence for sentence in result["sentences"])


NAMES = ("embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm")


def layers(
    *factors: float | None, replayed: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0, 1.0, 0.5)
) -> list[dict[str, Any]]:
    """Those of a result, with how much larger the recorded norms are than the replayed ones; None: not recorded."""
    return [
        {"layer": name, "norm": None if factor is None else factor * norm, "replayed": norm}
        for name, norm, factor in zip(NAMES, replayed, factors, strict=True)
    ]


@cases(
    "found names factor",
    (layers(20.0, 100.0, 30.0, 1.0, 1.0, 1.0), "3 of 6 layers: embed_tokens, layers.0, layers.1", "100"),
    (layers(9.0, 9.5, 9.0, 9.0, 1.0, 1.0), "4 of 6 layers: the last ones are layers.0, layers.1, layers.2", "9.5"),
    (layers(2.0, 2.0, 1.0, None, None, 1.0), "2 of 4 layers: embed_tokens, layers.0", "2"),
    (layers(1.0, 1.4, 0.7, 1.0, 1.0, 1.0), None, "rounding"),
    (layers(3.0, 3.0, 3.0, 3.0, 3.0, 3.0), None, "all"),
    (layers(1.0, 1.0, 1.0, 1.0, 1.0, 2.0, replayed=(4.0, 3.0, 2.0, 1.0, 1.0, 1e-3)), None, "small"),
)
def test_layers_with_other_norms_are_named(found: list[dict[str, Any]], names: str | None, factor: str) -> None:
    """But not if norms differ in all layers, or in none."""
    said = layers_apart_in_words(found)
    assert len(said) == (names is not None)
    for sentence in said:
        assert f"in {names} (" in sentence and f": {factor} times as large in training)" in sentence
        assert f"at {names.split()[-1]} first" in sentence and "`--switches`" in sentence
