"""A replayed search names what the search in training named: held against it, and against the brute force."""

import contextlib
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import replay_cases
import test_faults
import torch
import torch.distributed as dist
from actor_cases import Run
from actors import ENGINE, IDENTITY_THRESHOLD, Case
from batches import build_batch
from notation import Capsys, cases
from oracle import Unit, brute_force
from stripped_bundles import strip
from test_actor import MODES, ONE, THREE, Launch, on_engine, on_ranks, same_events, tokens_over
from test_replay_ranks import TOLERANCE, check_replayed, replayed
from verl import DataProto

from gradloc.measure.passes import Passes
from gradloc.replay import search_command
from gradloc.tools.opening import open_bundle
from gradloc.tools.reading import read

# With a KL and an entropy term, and without; shares of the largest norm that leave few units over τ, and most of them.
NATURAL = [(Case("fsdp2"), 0.95), (Case("fsdp1", kl=True, entropy=True), 0.6)]


def places(tokens: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    return [(token["rank"], token["micro_batch"], token["row"], token["position"]) for token in tokens]


def search(bundle: Path, folder: Path, capsys: Capsys, *options: str) -> dict[str, Any]:
    """The event after a search in this process."""
    return replayed(bundle, folder, capsys, "--search", *options)


def check_same(found: dict[str, Any], trained: dict[str, Any]) -> None:
    """The same findings as those of training."""
    assert found["search"] == "replayed" and found["error"] is None
    assert places(found["culprits"]) == places(trained["culprits"])
    for culprit, before in zip(found["culprits"], trained["culprits"], strict=True):
        assert float(culprit["grad_norm"]) == pytest.approx(before["grad_norm"], rel=TOLERANCE, nan_ok=True)
        for layer, norm in before["layer_norms"].items():
            scale = max((n for n in before["layer_norms"].values() if math.isfinite(n)), default=0)
            of_layer = float(culprit["layer_norms"][layer])
            assert of_layer == pytest.approx(norm, rel=TOLERANCE, abs=TOLERANCE * scale, nan_ok=True)
    for name in ("diagnosis", "explained", "complete"):
        assert found[name] == trained[name], name


@on_ranks(
    on_engine(2, Case("fsdp2", kl=True, entropy=True, rollout=True, planted=THREE)),
    (2, Case("fsdp1", tied=True, dynamic=True, entropy=True, loss_agg_mode=MODES[1], planted=THREE)),
    on_engine(2, Case("fsdp2", packed=True, checkpointing=True, nested=ENGINE, deferred=True, planted=ONE)),
    (2, Case("fsdp1", model="lora", dynamic=True, loss_mode="cispo", rollout_weights=True, planted=ONE)),
    (2, Case("fsdp2", mini_batch=4, loss_mode="bypass_mode", kl=True, planted=ONE)),
    (2, Case("fsdp2", model="moe", micro_batch=8, loss_mode="sapo", loss_agg_mode=MODES[3], planted=ONE)),
    # Training measures the gradient after its reduction alone, so the ranks send what the bundle needs.
    (2, Case("fsdp2", model="tiled", planted=ONE)),
)
def test_planted_tokens_are_replayed_and_found_again(
    launch: Launch, tmp_path: Path, capsys: Capsys, world: int, case: Case
) -> None:
    results = launch(world, replay_cases.spiked, case, str(tmp_path))
    units, threshold, _ = results[0]
    units = [unit for unit in units if unit.mini_batch == 0]
    ((trained,),) = same_events([run for *_, run in results])
    dump = tmp_path / "dump"
    bundle = dump / trained["replay"]
    result = replayed(bundle, tmp_path, capsys, "--remedies")
    check_replayed(result, units, threshold, len(case.planted))
    # The recorded coefficients are those of verl's loss: otherwise other losses would not be comparable with them.
    left = {row["name"]: row["left"] for row in result["remedies"]}
    assert left["as recorded"] == pytest.approx(1, rel=TOLERANCE), result["remedy_notes"]
    assert json.loads((bundle.parent / f"{bundle.name}.result.json").read_text()) == result

    found = search(bundle, tmp_path, capsys)
    check_same(found, trained)
    assert found["verdict"] == trained["verdict"]
    check_brute_force(found, units, threshold, len(case.planted))
    if ENGINE:  # the actor of verl 0.7 leaves the evidence to its worker, which is not here
        (shown,) = read(str(dump)).events
        assert shown["search"] == "replayed" and places(shown["culprits"]) == places(found["culprits"])
    assert json.loads((bundle.parent / f"{bundle.name}.event.json").read_text()) == found

    # A converted spike has the same micro-batches, without what was measured of them.
    stripped = strip(bundle, tmp_path / "converted")
    of_converted = search(stripped, tmp_path, capsys)
    is_whole = not open_bundle(stripped).missing  # both ranks have some
    check_same(of_converted, {**trained, "complete": is_whole, "explained": trained["explained"] if is_whole else None})
    assert of_converted["suspected"] == []


@pytest.mark.every_target
def test_a_bundle_says_whose_log_probs_are_of_other_positions(launch: Launch, tmp_path: Path, capsys: Capsys) -> None:
    case = Case("fsdp2", rows=16, mini_batch=8, micro_batch=8, kl=True, rollout=True, planted=ONE)

    def change(batch: DataProto) -> None:
        old = batch.batch["old_log_probs"]
        batch.batch["rollout_log_probs"] = torch.cat([old[:, :1], old[:, :-1]], 1)

    results = launch(2, partial(replay_cases.spiked, change_batch=change), case, str(tmp_path))
    ((event,), *_) = same_events([run for *_, run in results])
    bundle = tmp_path / "dump" / event["replay"]
    said = "Rollout log-probs belong to other tokens: they fit training's 1 position earlier"
    sentences = replayed(bundle, tmp_path, capsys)["sentences"]
    first = next(i for i, sentence in enumerate(sentences) if sentence.startswith("The spike comes back: "))
    assert any(sentence.startswith(said) for sentence in sentences[:first])
    found = search(bundle, tmp_path, capsys)
    (warning,) = [each for each in found["warnings"] if each["identity"] == "rollout_log_probs"]
    assert (warning["name"], warning["column"]) == ("misaligned", "rollout") and warning["claim"].startswith(said)
    # The loss does not read them.
    assert found["verdict"]["cause"] is None and "advantage" in [fact["source"] for fact in found["verdict"]["facts"]]


def check_brute_force(event: dict[str, Any], units: list[Unit], threshold: float, planted: int) -> None:
    tokens = tokens_over(units, threshold)
    assert len(event["culprits"]) == planted
    for place, culprit in zip(places(event["culprits"]), event["culprits"], strict=True):
        assert culprit["grad_norm"] == pytest.approx(tokens[place][1].norm, rel=TOLERANCE)
    norms = {(unit.rank, unit.micro_batch): unit.norm for unit in units}
    for unit in event["units"]:
        assert unit["norm"] == pytest.approx(norms[unit["rank"], unit["micro_batch"]], rel=TOLERANCE)


@pytest.mark.parametrize(("case", "share"), [pytest.param(*pair, id=pair[0].id) for pair in NATURAL])
def test_the_search_of_a_natural_spike_takes_the_same_decisions(
    launch: Launch, tmp_path: Path, capsys: Capsys, case: Case, share: float
) -> None:
    """τ is a share of the largest unit's norm."""

    def natural() -> tuple[list[Unit], Run]:
        units, _ = brute_force(case, build_batch(case, dist.get_rank()), tokens=False)
        threshold = share * max(unit.norm / unit.weight for unit in units if unit.weight)
        return units, replay_cases.kept(case, str(tmp_path), threshold)

    results = launch(2, natural)
    ((trained,),) = same_events([run for *_, run in results])
    assert trained["diagnosis"] == ("tokens" if share > 0.9 else "diffuse")
    bundle = tmp_path / "dump" / trained["replay"]
    alone = search(bundle, tmp_path, capsys)
    check_same(alone, trained)
    for part, before in zip(alone["diffuse"], trained["diffuse"], strict=True):
        assert (part["rank"], part["rows"], part["tokens"]) == (before["rank"], before["rows"], before["tokens"])
        assert part["norm"] == pytest.approx(before["norm"], rel=TOLERANCE)
    assert alone["passes"] == trained["passes"]
    units = {(unit.rank, unit.micro_batch): unit.norm for unit in results[0][0]}
    for unit in alone["units"]:
        assert unit["norm"] == pytest.approx(units[unit["rank"], unit["micro_batch"]], rel=TOLERANCE)


@cases(
    "case diagnosis",
    (Case("fsdp2", nan=((1, 3, 0),), planted=((0, 0, 4),)), "tokens"),
    (Case("fsdp2", precision="bfloat16", planted=ONE), "tokens"),
    (Case("fsdp2", precision="float16", loss_scale=2.0**4, planted=ONE), "tokens"),
    # The loss scale makes the planted token's coefficient overflow: it is not what is wrong.
    (Case("fsdp2", precision="float16", loss_scale=2.0**12, planted=ONE), "overflow"),
    ids=["NaN", "bfloat16", "float16", "overflow"],
)
def test_what_is_not_finite_or_in_half_precision_is_found_again(
    launch: Launch, tmp_path: Path, capsys: Capsys, case: Case, diagnosis: str
) -> None:
    """With the loss scale."""
    ((trained,),) = same_events(launch(2, replay_cases.kept, case, str(tmp_path), IDENTITY_THRESHOLD))
    found = search(tmp_path / "dump" / trained["replay"], tmp_path, capsys)
    assert found["diagnosis"] == trained["diagnosis"] == diagnosis
    before = dict(zip(places(trained["culprits"]), trained["culprits"], strict=True))
    assert sorted(places(found["culprits"])) == sorted(before)
    assert {(rank, row, position) for rank, _, row, position in before} >= {*case.nan}
    for place, culprit in zip(places(found["culprits"]), found["culprits"], strict=True):
        assert culprit["sources"] == before[place]["sources"]
        norm = float(before[place]["grad_norm"])
        assert float(culprit["grad_norm"]) == pytest.approx(norm, rel=case.tolerance * 10, nan_ok=True)


def test_a_failure_of_one_process_ends_all(launch: Launch, tmp_path: Path) -> None:
    runs = launch(2, replay_cases.kept, Case("fsdp2", planted=ONE), str(tmp_path), IDENTITY_THRESHOLD)
    ((trained,),) = same_events(runs)
    bundle, model = tmp_path / "dump" / trained["replay"], tmp_path / "model"

    def failing() -> list[tuple[int, str]]:
        """The exit codes of searches in which rank 1 alone fails: while it loads, and in either of its passes."""
        found = []
        for owner, name, at in ((search_command, "load", 1), *((Passes, "_forward_backward", at) for at in (1, 2))):
            errors = io.StringIO()
            failure = test_faults.failing(owner, name, at, [1], RuntimeError("planted failure"))
            with failure, contextlib.redirect_stderr(errors):
                found.append((replay_cases.searched(str(bundle), str(model)), errors.getvalue()))
        return found

    first, second = launch(2, failing)
    assert [code for code, _ in first] == [code for code, _ in second] == [2, 2, 2]
    for _, error in first:
        *progress, sentence = error.splitlines()
        assert "planted failure" in sentence and all("min  loading the model " in line for line in progress), error
    assert [error for _, error in second] == ["", "", ""]
    assert not list(bundle.parent.glob("*.event.json"))
