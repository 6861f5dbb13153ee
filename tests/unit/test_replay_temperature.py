"""The temperature that a replay finds for the rollout's log-probs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from small_bundles import NAME, PROMPT, bundle, kept, replayed, resave, small_model

from gradloc_tools.bundles.opening import open_bundle
from gradloc_tools.bundles.results import read_results
from gradloc_tools.replay.temperature import LEFT, _least

__all__ = ["bundle", "kept"]


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


@pytest.mark.parametrize(("temperature", "training"), [(0.62, 1.0), (1.7, 1.0), (1.0, 0.6), (0.5, 0.9)])
def test_the_temperature_of_the_rollouts_log_probs_is_found(
    temperature: float, training: float, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = with_rollout(kept, tmp_path / "folder", temperature, 0.002, training)
    result = replayed(bundle, kept / "model", capsys, "--only")
    found = result["temperature"]
    assert found["fits"] == pytest.approx(temperature, rel=0.02) and found["training"] == pytest.approx(training)
    assert found["left"] < LEFT * found["gap"]
    assert (
        f"another temperature: {found['fits']:.2f} fits, and training computes them at {training:g} (mean difference "
        f"{found['gap']:.2g}, and {found['left']:.2g} at {found['fits']:.2f})." in result["sentences"][-1]
    )
    (read,) = read_results(str(tmp_path / "folder"))
    assert read["temperature"] == found


@pytest.mark.parametrize(("temperature", "noise"), [(1.0, 0.0), (1.0, 0.5), (1.0, 0.01), (1.03, 0.0)])
def test_noise_and_small_differences_are_no_other_temperature(
    temperature: float, noise: float, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replayed(with_rollout(kept, tmp_path / "folder", temperature, noise), kept / "model", capsys, "--only")
    assert result["temperature"] is None
    assert not any("temperature" in sentence for sentence in result["sentences"])


def test_without_log_probs_of_the_rollout_nothing_is_said(
    bundle: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed(bundle, kept / "model", capsys, "--only")["temperature"] is None


def test_the_search_ends_at_the_bottom_of_a_valley() -> None:
    for bottom in (-1.3, -0.2, 0.0, 0.5, 1.37):
        assert _least(lambda x, bottom=bottom: abs(x - bottom) ** 1.5, -1.4, 1.4) == pytest.approx(bottom, abs=0.005)
