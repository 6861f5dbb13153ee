"""Gradients that were scaled after their loss, or with it, in replays of bundles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_bundles import (
    RESPONSE,
    ROWS,
    forward,
    passes,
    random_ids,
    resign,
    save_other_weights,
    small_model,
    writer_of,
)

from gradloc import GradLoc, GradLocConfig
from gradloc_tools.bundles.opening import open_bundle
from gradloc_tools.bundles.results import RESULT
from gradloc_tools.replay.command import main
from gradloc_tools.replay.measuring import Measured, Norms
from gradloc_tools.replay.scale import find_scale
from gradloc_tools.replay.verdict import scale_in_words
from gradloc_tools.schema import conforms

MICRO_BATCHES = 3


def bundle(
    directory: Path, of_loss: float = 1.0, of_gradient: float = 1.0, of_reduced: float = 1.0, of_layer: float = 1.0
) -> list[str]:
    """The arguments to replay a mini-batch that was kept as a spike, with what is scaled wrongly."""
    model = small_model()
    model.save_pretrained(directory / "model")
    for name, parameter in model.named_parameters():
        factor = of_gradient * (of_layer if ".layers.1." in name else 1.0)
        parameter.register_hook(lambda gradient, factor=factor: factor * gradient)

    def run(inputs: dict[str, Any], rows: list[int], length: int) -> Any:
        return forward(model, inputs, rows, length)

    writer = writer_of(model, directory, actor={"ppo_mini_batch_size": 7})
    gradloc = GradLoc(model, GradLocConfig(grad_norm_threshold=1e-6), run, bundle_writer=writer)
    torch.manual_seed(1)
    ids = [random_ids() for _ in range(MICRO_BATCHES)]
    advantages = [torch.randn(ROWS, RESPONSE) for _ in range(MICRO_BATCHES)]
    passes(gradloc, run, 1, ids, advantages, of_loss, old=True)
    for parameter in model.parameters():
        parameter.grad *= of_reduced
    gradloc.locate(0, 0)
    (event,) = gradloc.events
    return [str(directory / event["replay"]), "--model", str(directory / "model"), "--json"]


def replayed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(arguments) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert conforms(result, RESULT)
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_as_it_should_be_has_no_factor(tmp_path: Path, capsys: Any, dtype: str) -> None:
    result = replayed([*bundle(tmp_path), "--dtype", dtype, "--only"], capsys)
    assert result["scale"] is None and not any("times what" in sentence for sentence in result["sentences"])


@pytest.mark.target(version="0.9.1")
@pytest.mark.parametrize("name", ["loss", "gradient", "reduced"])
@pytest.mark.parametrize(
    ("factor", "fits"), [(8.0, "2^3"), (3.0, "the number of micro-batches (3)"), (1 / 7, "1 / the number of responses")]
)
def test_a_wrong_factor_is_named(tmp_path: Path, capsys: Any, name: str, factor: float, fits: str) -> None:
    result = replayed([*bundle(tmp_path, **{f"of_{name}": factor}), "--only"], capsys)
    others = {"loss", "gradient", "reduced"} - {name}
    found = result["scale"][name]
    assert found["factor"] == pytest.approx(factor, rel=1e-4) and found["spread"] < 1e-3
    assert any(fits in text for text in found["could_be"])
    assert {result["scale"][other] for other in others} == {None}
    assert any(f"{factor:.4g} times what" in sentence and fits in sentence for sentence in result["sentences"])


def test_two_wrong_factors_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    result = replayed([*bundle(tmp_path, of_loss=4.0, of_gradient=5.0, of_reduced=16.0), "--only"], capsys)
    found = {name: factor["factor"] for name, factor in result["scale"].items()}
    assert found == pytest.approx({"loss": 4.0, "gradient": 5.0, "reduced": 16.0}, rel=1e-4)


def test_other_weights_have_no_factor(tmp_path: Path, capsys: Any) -> None:
    arguments = bundle(tmp_path, of_gradient=8.0)
    save_other_weights(tmp_path / "model")
    assert replayed([*arguments, "--only"], capsys)["scale"] is None


def test_layers_with_other_factors_are_no_scale(tmp_path: Path, capsys: Any) -> None:
    """A layer that was really different, as with a kernel's bug, is not called a scale."""
    arguments = bundle(tmp_path)
    assert replayed([*arguments, "--only"], capsys)["scale"] is None

    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["micro_batches"]:
            entry["layer_norms"] = {layer: 8 * norm for layer, norm in entry["layer_norms"].items()}
            entry["layer_norms"]["layers.1"] *= 1.1

    resign(Path(arguments[0]), change)
    assert replayed([*arguments, "--only"], capsys)["scale"] is None


@pytest.mark.parametrize("of_gradient", [1.0, 8.0])
def test_a_spike_in_one_layer_is_no_factor_of_the_reduction(tmp_path: Path, capsys: Any, of_gradient: float) -> None:
    result = replayed([*bundle(tmp_path, of_gradient=of_gradient, of_layer=100.0), "--only"], capsys)
    (layer,) = [layer for layer in result["layers"] if layer["layer"] == "layers.1"]
    assert layer["norm"] == pytest.approx(100 * of_gradient * layer["replayed"], rel=1e-3)
    assert result["scale"] is None and not any("times what" in sentence for sentence in result["sentences"])


def test_a_layer_that_is_small_in_the_replay_counts_if_it_was_large_in_training(tmp_path: Path) -> None:
    found = open_bundle(bundle(tmp_path)[0])
    units = {}
    for entry in found.manifest["micro_batches"]:
        norms = dict(entry["layer_norms"])
        units[entry["rank"], entry["micro_batch"]] = Norms(math.hypot(*norms.values()), norms)
    whole = Norms(found.event["global_norm"] / 5, {})
    (reduced,) = [
        factor for factor in (find_scale(found, Measured(units, whole=whole), True, "float32") or {}).values() if factor
    ]
    assert reduced["factor"] == pytest.approx(5.0)
    for norms in units.values():
        norms.layers["layers.1"] *= 1e-6
    assert find_scale(found, Measured(units, whole=whole), True, "float32") is None


def test_nothing_is_said_without_a_factor() -> None:
    assert scale_in_words(None) == []
    only = {"gradient": {"factor": 2.0, "spread": 0.0, "could_be": ["a", "b"]}, "reduced": None, "loss": None}
    first, check = scale_in_words(only)
    assert first == ("The gradient is 2 times what its coefficients give, in every layer alike; it could be a or b.")
    assert check.count("`") == 2
