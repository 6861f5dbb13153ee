"""Bundles of sharded runs, replayed in one process and held against the brute force."""

from pathlib import Path
from typing import Any

import pytest
import replay_cases
from actors import Case
from oracle import Unit
from small_bundles import printed
from test_actor import ONE, Launch, same_events, tokens_over

from gradloc_tools.bundles.opening import open_bundle

# Between an unsharded forward of single rows and a sharded one of padded micro-batches lies rounding alone; the brute
# force's own tolerance is a tenth of this.
TOLERANCE = 1e-4


def replayed(bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What a replay prints, or a search; the folder has the model, and of a LoRA model the adapter."""
    adapter = ["--adapter", str(folder / "adapter")] if (folder / "adapter").exists() else []
    return printed([bundle, "--model", folder / "model", *adapter, "--json", *options], capsys)


def check_replayed(result: dict[str, Any], units: list[Unit], threshold: float, planted: int) -> None:
    """Compares a replay of a sharded spike in one process with the brute force."""
    spiked = {(unit.rank, unit.micro_batch): unit for unit in units if unit.norm > threshold * unit.weight}
    assert {(unit["rank"], unit["micro_batch"]) for unit in result["units"]} == set(spiked)
    for found in result["units"]:
        unit = spiked[found["rank"], found["micro_batch"]]
        assert found["replayed"] == pytest.approx(unit.norm, rel=TOLERANCE)
        assert found["norm"] == pytest.approx(unit.norm, rel=TOLERANCE)
        assert found["rest"] <= found["threshold"] < found["replayed"]
    tokens = tokens_over(units, threshold)
    culprits = [token for token in result["tokens"] if token["culprit"]]
    assert len(culprits) == len(tokens) == planted
    for culprit in culprits:
        _, token = tokens[tuple(culprit[name] for name in ("rank", "micro_batch", "row", "position"))]
        assert culprit["replayed"] == pytest.approx(culprit["grad_norm"], rel=TOLERANCE)
        assert culprit["replayed"] == pytest.approx(token.norm, rel=TOLERANCE)
        assert culprit["replayed_layer_norm"] == pytest.approx(token.layer_norms[culprit["layer"]], rel=TOLERANCE)
        assert culprit["others"] == [pytest.approx(token.norm, rel=TOLERANCE)]
    first = spiked[result["units"][0]["rank"], result["units"][0]["micro_batch"]]
    for layer in result["layers"]:
        expected = first.layer_norms.get(layer["layer"], 0.0)
        assert layer["replayed"] == pytest.approx(expected, rel=TOLERANCE)
    assert result["log_probs"]["max"] < TOLERANCE
    assert result["sentences"][0].startswith("The spike comes back: ")
    assert any("these are the weights of training" in sentence for sentence in result["sentences"])


@pytest.mark.every_target
def test_a_bundle_has_what_was_recorded(launch: Launch, tmp_path: Path) -> None:
    case = Case("fsdp2", kl=True, entropy=True, rollout=True, planted=ONE)
    checkpoints = [tmp_path / f"global_step_{step}" / "actor" for step in (4, 6)]
    for checkpoint in checkpoints:
        checkpoint.mkdir(parents=True)
    results = launch(2, replay_cases.spiked, case, str(tmp_path))
    ((event,),) = same_events([run for *_, run in results])
    bundle = open_bundle(tmp_path / "dump" / event["replay"])
    # What is only known once the bundle is written: its folder, and what the trainer knows of a culprit.
    later = {"replay", "culprits", "summary"}
    assert {**bundle.event, **{name: event[name] for name in later}} == event
    (as_kept,), (culprit,) = bundle.event["culprits"], event["culprits"]
    assert as_kept.items() <= culprit.items()
    manifest = bundle.manifest
    assert manifest["checkpoint"] == str(checkpoints[1])
    assert (manifest["dtype"], manifest["model"]["attention"]) == ("float32", "sdpa")
    assert manifest["actor"]["use_kl_loss"] is True and manifest["actor"]["spike_detection"] is True
    assert {"gradloc", "torch", "python", "verl", "transformers"} <= set(manifest["versions"])
    saved = bundle.micro_batches[culprit["rank"], culprit["micro_batch"]]
    (entry,) = manifest["micro_batches"]
    row, position = entry["rows"].index(culprit["row"]), culprit["position"]
    for name in ("log_prob", "old_log_prob", "rollout_log_prob", "ref_log_prob", "advantage", "weight", "coefficient"):
        assert saved.tokens[name][row, position].item() == culprit[name]
    sample = saved.rows[row]
    assert sample.input_ids[sample.prompt_length + position].item() == culprit["token_id"]
    assert sample.temperature == pytest.approx(0.9)
    assert len(saved.rng_state[0]) > 0


def test_a_full_or_broken_disk_changes_no_bit_of_training(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made here")
    for kept, broken, events in launch(2, replay_cases.identical, str(tmp_path)):
        assert all(kept.values()), kept
        assert all(broken.values()), broken
        assert events["kept"] == ["replay/step7-epoch0-mini_batch0", None]
        assert events["broken"] == [None, None]
    found = sorted(path.name for path in (tmp_path / "dump" / "replay").iterdir())
    assert found == ["step7-epoch0-mini_batch0"]


@pytest.mark.parametrize("function", ["write_bundle", "last_checkpoint"])
def test_training_goes_on_if_the_disk_does_not_answer(launch: Launch, tmp_path: Path, function: str) -> None:
    """The other ranks would wait for rank 0 in a collective call, whose timeout ends the run."""
    for same, replays in launch(2, replay_cases.stalled, str(tmp_path), function):
        assert all(same.values()), same
        assert replays == [None, None]
