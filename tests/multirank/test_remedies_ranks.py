"""A replay's table of remedies, held against real updates with each remedy switched on."""

import dataclasses
import json
import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from actor_cases import train
from actors import ENGINE, Case
from notation import Capsys
from omegaconf import OmegaConf
from replay_cases import save_model, spiked
from test_actor import MODES, Launch, on_engine, on_ranks, only_engine, same_events
from test_replay_ranks import TOLERANCE, replayed
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import LayerClipConfig, TokenClipConfig

from gradloc.threshold import Threshold
from gradloc.tools.opening import open_bundle

# The culprit's probability in training over that in the rollout, as a logarithm; and those of some ordinary tokens.
CULPRIT_LOG_RATIO, OTHER_LOG_RATIO = -2.0, 1.0
# Wherever a run has a spike at all.
EVERY = 1e-6
# Nowhere.
NEVER = 1e30
# The step of batch 0.
STEP = 7


def mismatch(batch: DataProto) -> None:
    """Data that most remedies change.

    The rollout disagrees with training about the culprit, and about each third token of the even rows. In the odd rows,
    training has moved from the old policy, also where that raises the probability of what had a low reward.
    """
    places = torch.arange(batch.batch["old_log_probs"].shape[1])
    moved = torch.where(places % 2 == 0, 0.15, -0.15) + 0.45 * (places % 4 == 0)
    batch.batch["old_log_probs"][1::2] -= moved * batch.batch["response_mask"][1::2]
    advantages = batch.batch["advantages"][1::2]
    low = (places % 4 == 0) & (advantages > 0) & (advantages < 100)
    advantages[low] = -advantages[low]
    difference = torch.zeros_like(batch.batch["old_log_probs"])
    difference[::2, ::3] = OTHER_LOG_RATIO
    difference[batch.batch["advantages"].abs() > 100] = CULPRIT_LOG_RATIO
    rollout = batch.batch["old_log_probs"] - difference * batch.batch["response_mask"]
    batch.batch["rollout_log_probs"] = rollout


def with_remedy(
    case: Case,
    correction: dict[str, Any] | None = None,
    loss_mode: str | None = None,
    settings: dict[str, Any] | None = None,
) -> tuple[dict[tuple[int, int], float], float]:
    """The real update with a remedy, and with these settings of the actor.

    Returns:
        tuple: Of its first mini-batch, the norm of each micro-batch's gradient by (rank, index), and how many response
            tokens it has on all ranks.
    """
    case = dataclasses.replace(case, loss_mode=loss_mode or case.loss_mode)
    tokens = torch.zeros(())

    def change(batch: DataProto) -> None:
        mismatch(batch)
        if correction is not None:  # as verl's trainer does with algorithm.rollout_correction
            compute_rollout_correction_and_add_to_batch(batch, RolloutCorrectionConfig(**correction))
        tokens.copy_(batch.batch["response_mask"][: case.mini_batch].sum())

    detection = {"spike_detection": True, "grad_norm_threshold": EVERY, "bisect_budget_steps": 2}
    run = train(case, change_batch=change, **detection, **(settings or {}))
    dist.all_reduce(tokens)
    # Without any gradient there is no event.
    events = [event for event in json.loads(run.events[0]) if (event["epoch"], event["mini_batch"]) == (0, 0)]
    norms = {(unit["rank"], unit["micro_batch"]): float(unit["norm"]) for event in events for unit in event["units"]}
    return norms, float(tokens)


# A run with a spike, and its bundle.
recorded = partial(spiked, change_batch=mismatch)


def after_warm_up(case: Case, directory: str) -> list[tuple[dict[str, Any], float]]:
    """Runs with TokenClip's action log, with TokenClip, and with LayerClip, which have learned from 20 updates.

    The first keeps a bundle. The planted token is its response's only one. The weights stay as they are.

    Returns:
        list: Of each, the event of the spiked update, with every micro-batch, and the norm that the optimizer gets.
    """
    save_model(case, Path(directory))
    actors: list[Any] = []

    def prepare(actor: Any) -> None:
        actors.append(actor)
        for group in actor.actor_optimizer.param_groups:
            group["lr"] = 0.0

    def change(batch: DataProto) -> None:
        if batch.meta_info["global_steps"] == STEP:
            actors[-1].gradloc._threshold = Threshold(EVERY)
            ((_, row, position),) = case.planted
            batch.batch["response_mask"][row] = 0.0
            batch.batch["response_mask"][row, position] = 1.0

    training = {"calls": (*range(1, 21), 0), "prepare": prepare, "change_batch": change}
    limits = {"grad_norm_threshold": NEVER, "bisect_budget_steps": 2, "grad_clip": 1e9}
    found = []
    for options in (
        {"bisect_dump_dir": f"{directory}/dump", "spike_replay": 1, "token_clip": TokenClipConfig(True, "log")},
        {"token_clip": TokenClipConfig(enable=True)},
        {"layer_clip": LayerClipConfig(enable=True)},
    ):
        run = train(case, **training, spike_detection=True, **limits, **options)
        norm = torch.stack([gradient.norm() for gradient in run.gradients[-1]]).norm().item()
        found.append((json.loads(run.events[-1])[0], norm))
    return found


SPIKE = ((0, 2, 4),)
# They act on the step, not on a loss.
OF_THE_STEP = {"spike_action", "grad_clip", "layer_clip", "token_clip"}
# Some of each kind: corrections, masks, another loss, a setting of it.
BESIDE_OTHER_TERMS = {"token TIS", "sequence TIS", "token mask", "geometric mask", "GSPO", "clip_ratio 0.1, 0.1"}


@pytest.mark.slow
@on_ranks(
    on_engine(2, Case("fsdp2", mini_batch=4, planted=SPIKE)),
    only_engine(2, Case("fsdp2", mini_batch=4, planted=SPIKE, loss_mode="gspo", loss_agg_mode=MODES[2])),
    (2, Case("fsdp1", mini_batch=4, planted=SPIKE, kl=True, entropy=True, loss_mode="sapo", loss_agg_mode=MODES[2])),
)
def test_a_remedy_leaves_what_a_run_with_it_has(
    launch: Launch, tmp_path: Path, capsys: Capsys, world: int, case: Case
) -> None:
    """Each remedy that is a loss or a rollout correction, by the overrides that the table gives."""
    results = launch(world, recorded, case, str(tmp_path))
    event = same_events([run for *_, run in results])[0][0]
    bundle = tmp_path / "dump" / event["replay"]
    result = replayed(bundle, tmp_path, capsys, "--remedies", "--only")
    (unit,) = result["units"]
    rows = {row["name"]: row for row in result["remedies"]}
    as_recorded = rows["as recorded"]
    assert as_recorded["left"] == pytest.approx(1, rel=TOLERANCE) and as_recorded["ordinary_moved"] < TOLERANCE
    _, plain_tokens = launch(2, with_remedy, case)[0]
    by_tokens = ENGINE and case.loss_agg_mode == "token-mean"
    checked = set()
    for row in result["remedies"]:
        settings: Any = OmegaConf.to_container(OmegaConf.from_dotlist(shlex.split(row["override"] or "")))
        actor = settings.get("actor_rollout_ref", {}).get("actor", {})
        correction = settings.get("algorithm", {}).get("rollout_correction")
        mode = actor.pop("policy_loss", {}).get("loss_mode")
        if row["override"] is None or OF_THE_STEP & set(actor) or (case.kl and row["name"] not in BESIDE_OTHER_TERMS):
            continue
        norms, tokens = launch(2, with_remedy, case, correction, mode, actor)[0]
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
    # The rollout gave the culprit seven times the probability, so the mask takes it out, with every third token.
    mask = rows["token mask"]
    assert mask["under"] and mask["masked"]["culprits"] == 1 < mask["masked"]["tokens"]


@pytest.mark.every_target
def test_clips_leave_what_a_run_with_them_has(launch: Launch, tmp_path: Path, capsys: Capsys) -> None:
    """TokenClip and LayerClip have learned their bounds in 20 updates, LayerClip also while it was off."""
    case = Case("fsdp2", rows=4, mini_batch=4, micro_batch=4, planted=SPIKE)
    (runs,) = launch(1, after_warm_up, case, str(tmp_path))
    (recorded, _), (with_tokens, norm_with_tokens), (with_layers, norm_with_layers) = runs
    bundle = tmp_path / "dump" / recorded["replay"]
    result = replayed(bundle, tmp_path, capsys, "--remedies", "--only")
    rows = {row["name"]: row for row in result["remedies"]}
    with_cut, unit = (of["units"][0] for of in (with_tokens, with_layers))
    row = rows["TokenClip"]
    assert row["norm"] == pytest.approx(float(with_cut["norm"]), rel=TOLERANCE) and row["left"] < 0.5
    assert row["norm"] == pytest.approx(norm_with_tokens, rel=TOLERANCE)  # the micro-batch is the step
    assert row["override"].endswith("token_clip.action=drop")
    row, step = rows["LayerClip"], with_layers["layer_clip"]
    expected = math.hypot(*(float(norm) * step[layer]["factor"] for layer, norm in unit["layer_norms"].items()))
    assert row["norm"] == pytest.approx(expected, rel=TOLERANCE)
    assert row["left"] < 0.9
    assert row["norm"] == pytest.approx(norm_with_layers, rel=TOLERANCE)
    known = open_bundle(bundle).manifest["clips"]["layer_clip"]
    for layer, figures in step.items():
        assert known[layer] == pytest.approx(figures, rel=TOLERANCE)
