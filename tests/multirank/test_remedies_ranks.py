"""A replay's table of remedies, held against real updates with each remedy switched on."""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import remedy_cases
from actors import ENGINE, Case
from notation import Capsys, cases
from small_bundles import replayed
from test_actor import MODES, Launch, on_engine, on_ranks, same_events
from test_replay_ranks import TOLERANCE
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.gradloc.adapters.actor_config import LayerClipConfig

from gradloc_tools.bundles.opening import open_bundle

SPIKE = ((0, 2, 4),)
# They act on the step, not on a loss.
OF_THE_STEP = {"spike_action", "grad_clip", "layer_clip.enable", "token_clip.enable"}
# Some of each kind: corrections, masks, another loss, a setting of it.
BESIDE_OTHER_TERMS = {"token TIS", "sequence TIS", "token mask", "geometric mask", "GSPO", "clip_ratio 0.1, 0.1"}
# Of one rank and one micro-batch, whose gradient is the step's.
ALONE = Case("fsdp2", rows=8, mini_batch=4, micro_batch=4, planted=SPIKE)


def settings_of(override: str) -> dict[str, dict[str, Any]]:
    """The values of a table's overrides, by what they belong to."""
    found: dict[str, dict[str, Any]] = {"actor": {}, "correction": {}}
    for part in shlex.split(override):
        key, _, text = part.partition("=")
        value: Any = None if text == "null" else text
        try:
            value = value if value is None or "_" in text else float(text)
        except ValueError:
            pass
        for name, prefix in (("actor", "actor_rollout_ref.actor."), ("correction", "algorithm.rollout_correction.")):
            if key.startswith(prefix):
                found[name][key.removeprefix(prefix)] = value
    return found


@pytest.mark.slow
@on_ranks(
    on_engine(2, Case("fsdp2", mini_batch=4, planted=SPIKE)),
    on_engine(2, Case("fsdp2", mini_batch=4, planted=SPIKE, loss_mode="gspo", loss_agg_mode=MODES[2])),
    on_engine(
        2, Case("fsdp1", mini_batch=4, planted=SPIKE, kl=True, entropy=True, loss_mode="sapo", loss_agg_mode=MODES[2])
    ),
)
def test_a_remedy_leaves_what_a_run_with_it_has(
    launch: Launch, tmp_path: Path, capsys: Capsys, world: int, case: Case
) -> None:
    """Each remedy that is a loss or a rollout correction, by the overrides that the table gives."""
    results = launch(world, remedy_cases.recorded, case, str(tmp_path))
    event = same_events([run for *_, run in results])[0][0]
    bundle = tmp_path / "dump" / event["replay"]
    result = replayed(bundle, tmp_path / "model", capsys, "--remedies", "--only")
    (unit,) = result["units"]
    rows = {row["name"]: row for row in result["remedies"]}
    as_recorded = rows["as recorded"]
    assert as_recorded["left"] == pytest.approx(1, rel=TOLERANCE) and as_recorded["ordinary_moved"] < TOLERANCE
    _, plain_tokens = launch(2, remedy_cases.with_remedy, case)[0]
    by_tokens = ENGINE and case.loss_agg_mode == "token-mean"
    checked = set()
    for row in result["remedies"]:
        settings = settings_of(row["override"] or "")
        actor, correction = settings["actor"], settings["correction"]
        mode = actor.pop("policy_loss.loss_mode", None)
        if row["override"] is None or OF_THE_STEP & set(actor) or (case.kl and row["name"] not in BESIDE_OTHER_TERMS):
            continue
        norms, tokens = launch(2, remedy_cases.with_remedy, case, correction or None, mode, actor)[0]
        norm = norms.get((unit["rank"], unit["micro_batch"]), 0.0)
        # verl 0.9 takes the mean over the whole mini-batch, of which the bundle has a part.
        if by_tokens and mode != "sapo":
            norm *= tokens / plain_tokens
        assert row["norm"] == pytest.approx(norm, rel=TOLERANCE), row
        assert row["left"] * unit["replayed"] == pytest.approx(norm, rel=TOLERANCE)
        skips = row["ordinary_moved"] > 0.5
        assert ("skipped step" in (row["note"] or "")) == skips
        assert (row["note"] is not None) == (skips or (by_tokens and tokens != plain_tokens))
        checked.add(row["name"])
    assert {"token TIS", "sequence TIS", "token mask", "geometric mask"} <= checked
    if case.loss_mode != "vanilla":
        return
    assert {"GSPO", "CISPO", "SAPO", "GMPO"} <= checked
    assert ("DPPO (TV)" in checked) == ("dppo_tv" in POLICY_LOSS_REGISTRY)
    assert ("IcePop" in checked) == ENGINE
    assert {"clip_ratio 0.1, 0.1", "dual clip 1.5"} <= checked
    for name in ("clip_ratio 0.1, 0.1", "dual clip 1.5", "CISPO", "GSPO"):
        assert rows[name]["ordinary_moved"] > 1e-3, name
    # The rollout gave the culprit seven times the probability, so the mask takes it out, with every third token.
    mask = rows["token mask"]
    assert mask["under"] and mask["masked"]["culprits"] == 1 < mask["masked"]["tokens"]
    assert rows["token TIS"]["left"] < 0.2 and not rows["GSPO"]["under"]


@pytest.mark.every_target
def test_what_acts_on_the_step_leaves_what_the_optimizer_gets(launch: Launch, tmp_path: Path, capsys: Capsys) -> None:
    """A tighter global clip, LayerClip, and the step without culprits."""
    clip = LayerClipConfig(enable=True, rule="fixed", max_norm=0.5)
    (result_of_run,) = launch(1, remedy_cases.recorded, ALONE, str(tmp_path))
    _, threshold, run = result_of_run
    event = json.loads(run.events[0])[0]
    result = replayed(tmp_path / "dump" / event["replay"], tmp_path / "model", capsys, "--remedies", "--only")
    rows = {row["name"]: row for row in result["remedies"]}

    def optimizer_gets(**settings: Any) -> float:
        return launch(1, remedy_cases.step_norm, ALONE, settings)[0]

    assert optimizer_gets(grad_clip=0.1) == pytest.approx(rows["grad_clip 0.1"]["norm"], rel=TOLERANCE)
    assert rows["grad_clip 0.1"]["ordinary_moved"] == pytest.approx(1 - rows["grad_clip 0.1"]["left"])
    searching = {"spike_detection": True, "grad_norm_threshold": threshold, "bisect_budget_steps": 500}
    dropped = optimizer_gets(grad_clip=1e9, spike_action="drop", **searching)
    assert dropped == pytest.approx(rows["spike_action=drop"]["norm"], rel=TOLERANCE)
    assert rows["spike_action=drop"]["masked"] == {"tokens": 1, "culprits": 1}

    (tmp_path / "clipped").mkdir()
    ((_, _, run),) = launch(1, remedy_cases.recorded, ALONE, str(tmp_path / "clipped"), clip)
    event = json.loads(run.events[0])[0]
    bundle = tmp_path / "clipped" / "dump" / event["replay"]
    result = replayed(bundle, tmp_path / "clipped" / "model", capsys, "--remedies", "--only")
    (row,) = [row for row in result["remedies"] if row["name"] == "LayerClip, as it was set"]
    assert optimizer_gets(grad_clip=1e9, layer_clip=clip) == pytest.approx(row["norm"], rel=TOLERANCE)
    assert row["override"] is None and 0 < row["ordinary_moved"] < 1


@on_ranks(
    on_engine(2, Case("fsdp2", planted=SPIKE, kl=True, nested=ENGINE, rollout_weights=True)),
    (2, Case("fsdp2", mini_batch=4, planted=SPIKE, loss_mode="bypass_mode", kl=True)),
    (2, Case("fsdp1", dynamic=True, tied=True, planted=SPIKE, entropy=True, loss_agg_mode="seq-mean-token-sum")),
    (2, Case("fsdp2", mini_batch=4, planted=SPIKE, precision="bfloat16", loss_mode="gspo")),
    (2, Case("fsdp2", mini_batch=4, planted=SPIKE, model="lora", loss_mode="cispo", rollout_weights=True)),
    (2, Case("fsdp2", micro_batch=8, planted=SPIKE, model="moe", loss_mode="sapo", loss_agg_mode=MODES[3])),
)
def test_the_recorded_coefficients_come_from_verls_loss(
    launch: Launch, tmp_path: Path, capsys: Capsys, world: int, case: Case
) -> None:
    """Otherwise other losses would not be comparable with them."""
    results = launch(world, remedy_cases.recorded, case, str(tmp_path))
    event = same_events([run for *_, run in results])[0][0]
    bundle = tmp_path / "dump" / event["replay"]
    assert "rollout_is_weight" not in event["culprits"][0]
    adapter = ["--adapter", str(tmp_path / "adapter")] if case.model == "lora" else []
    result = replayed(bundle, tmp_path / "model", capsys, "--remedies", "--only", *adapter)
    rows = {row["name"]: row for row in result["remedies"]}
    assert "as recorded" in rows, result["remedy_notes"]
    assert rows["as recorded"]["left"] == pytest.approx(1, rel=case.tolerance)
    assert ("token TIS" in rows) and ("GSPO" in rows) == (case.loss_mode not in ("gspo", "bypass_mode"))


@pytest.mark.every_target
@pytest.mark.parametrize("world", [1, 2])
def test_clips_leave_what_a_run_with_them_has(launch: Launch, tmp_path: Path, capsys: Capsys, world: int) -> None:
    compare_clips(launch, tmp_path, capsys, dataclasses.replace(ALONE, rows=4), world)


@pytest.mark.slow
@cases(
    "changes",
    {"loss_agg_mode": "seq-mean-token-mean", "kl": True, "entropy": True},
    {"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "gspo"},
    {"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "sapo"},
    ids=["KL", "gspo", "sapo"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_clips_leave_the_same_with_other_losses(
    launch: Launch, tmp_path: Path, capsys: Capsys, changes: dict[str, Any], world: int
) -> None:
    """Whose weights of tokens differ, by which signals are divided."""
    compare_clips(launch, tmp_path, capsys, dataclasses.replace(ALONE, rows=4, **changes), world)


def compare_clips(launch: Launch, tmp_path: Path, capsys: Capsys, case: Case, world: int = 1) -> None:
    """TokenClip and LayerClip have learned their bounds in 20 updates, LayerClip also while it was off."""
    of_ranks = launch(world, remedy_cases.after_warm_up, case, str(tmp_path))
    (recorded, _), (with_tokens, _), (with_layers, _) = of_ranks[0]
    norm_with_tokens, norm_with_layers = (math.hypot(*(runs[i][1] for runs in of_ranks)) for i in (1, 2))
    bundle = tmp_path / "dump" / recorded["replay"]
    result = replayed(bundle, tmp_path / "model", capsys, "--remedies", "--only")
    rows = {row["name"]: row for row in result["remedies"]}
    with_cut, unit = (next(unit for unit in of["units"] if unit["rank"] == 0) for of in (with_tokens, with_layers))
    row = rows["TokenClip"]
    assert row["norm"] == pytest.approx(float(with_cut["norm"]), rel=TOLERANCE) and row["left"] < 0.5
    if world == 1:  # the micro-batch is the step
        assert row["norm"] == pytest.approx(norm_with_tokens, rel=TOLERANCE)
    assert row["override"].endswith("token_clip.action=drop")
    row, step = rows["LayerClip"], with_layers["layer_clip"]
    expected = math.hypot(*(float(norm) * step[layer]["factor"] for layer, norm in unit["layer_norms"].items()))
    assert row["norm"] == pytest.approx(expected, rel=TOLERANCE)
    assert row["left"] < 0.9
    if world == 1:
        assert row["norm"] == pytest.approx(norm_with_layers, rel=TOLERANCE)
    known = open_bundle(bundle).clips["layer_clip"]
    for layer, figures in step.items():
        assert known[layer] == pytest.approx(figures, rel=TOLERANCE)
