"""Bundles of sharded runs, replayed in one process and held against the brute force."""

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import replay_cases
from actor_cases import Run, compare_runs, stock_run, train
from actors import IDENTITY_THRESHOLD, Case
from oracle import Unit
from small_bundles import printed
from test_actor import ONE, THREE, Launch, same_events, tokens_over

from gradloc import guarded, judging
from gradloc.adapters import replay_bundles
from gradloc.bundles import bundle_writer
from gradloc.tools.opening import open_bundle

# Between an unsharded forward of single rows and a sharded one of padded micro-batches lies rounding alone; the brute
# force's own tolerance is a tenth of this.
TOLERANCE = 1e-4
OVER = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD}


def replayed(bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What a replay prints, or a search; the folder has the model, and of a LoRA model the adapter."""
    adapter = ["--adapter", str(folder / "adapter")] if (folder / "adapter").exists() else []
    return printed([bundle, "--model", folder / "model", *adapter, "--json", *options], capsys)


def replays(run: Run) -> list[str | None]:
    return [event["replay"] for events in run.events for event in json.loads(events)]


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
    # Before it, only what is wrong with random tokens: some are after an end.
    assert any(sentence.startswith("The spike comes back: ") for sentence in result["sentences"][:2])
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
    # Known only once the bundle is written: its folder, and the trainer's facts of a culprit.
    later = {"replay", "culprits", "summary"}
    assert {**bundle.event, **{name: event[name] for name in later}} == event
    (as_kept,), (culprit,) = bundle.event["culprits"], event["culprits"]
    assert as_kept.items() <= culprit.items()
    manifest = bundle.manifest
    assert manifest["checkpoint"] == str(checkpoints[1])
    assert manifest["actor"]["use_kl_loss"] is True
    assert {"gradloc", "torch", "python", "verl", "transformers"} <= set(manifest["versions"])
    saved = bundle.micro_batches[culprit["rank"], culprit["micro_batch"]]
    (entry,) = manifest["micro_batches"]
    row, position = entry["rows"].index(culprit["row"]), culprit["position"]
    for name in ("log_prob", "old_log_prob", "rollout_log_prob", "ref_log_prob", "advantage", "weight", "coefficient"):
        assert saved.tokens[name][row, position].item() == culprit[name]
    sample = saved.rows[row]
    assert sample.input_ids[sample.prompt_length + position].item() == culprit["token_id"]


def test_a_full_or_broken_disk_changes_no_bit_of_training(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made here")
    case = Case(mini_batch=4, optimizer="adamw", planted=THREE)

    def with_folder(name: str) -> tuple[dict[str, bool], list[str | None]]:
        run = train(case, bisect_dump_dir=str(tmp_path / name), spike_replay=1, **OVER)
        return compare_runs(run, stock_run(case)), replays(run)

    # There is space for one bundle, and for none.
    for name, replays_of in (("dump", ["replay/step7-epoch0-mini_batch0", None]), ("file", [None, None])):
        for same, found in launch(2, with_folder, name):
            assert all(same.values()), same
            assert found == replays_of
    found = sorted(path.name for path in (tmp_path / "dump" / "replay").iterdir())
    assert found == ["step7-epoch0-mini_batch0"]


@pytest.mark.parametrize("function", ["write_bundle", "last_checkpoint"])
def test_training_goes_on_if_the_disk_does_not_answer(launch: Launch, tmp_path: Path, function: str) -> None:
    """The other ranks would wait for rank 0 in a collective call, whose timeout ends the run."""
    case = Case(mini_batch=4, planted=THREE)
    module = bundle_writer if hasattr(bundle_writer, function) else replay_bundles

    def stalled() -> tuple[dict[str, bool], list[str | None]]:
        answers = threading.Event()
        stall = mock.patch.object(module, function, lambda *_: answers.wait())
        # Nor may the judge, in so short a time.
        of_judge = mock.patch.object(judging, "_thread", guarded.PatientThread("the judge"))
        with mock.patch.object(guarded, "PATIENCE", 0.1), of_judge, stall:
            run = train(case, bisect_dump_dir=str(tmp_path), spike_replay=4, **OVER)
        answers.set()
        return compare_runs(run, stock_run(case)), replays(run)

    for same, found in launch(2, stalled):
        assert all(same.values()), same
        assert found == [None, None]
