"""Runs that keep a bundle of their spike, with the brute force that its replay is held against."""

import contextlib
import io
import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import test_faults
import torch.distributed as dist
from actor_cases import Run, compare_runs, stock_run, threshold_between, train
from actors import IDENTITY_THRESHOLD, Case, build_model
from batches import build_batch
from oracle import Unit, brute_force
from verl import DataProto
from verl.utils.gradloc import guarded
from verl.utils.gradloc.adapters import replay_bundles
from verl.utils.gradloc.bundles import bundle_writer

from gradloc.measure.passes import Passes
from gradloc_tools.replay import search_command
from gradloc_tools.replay.command import main


def save_model(case: Case, directory: Path) -> None:
    """The model's weights at the start, in the form that transformers loads; of a LoRA model, its parts."""
    model = build_model(case)
    if case.model == "lora":
        model.save_pretrained(directory / "adapter")
        model = model.unload()
    model.save_pretrained(directory / "model")


def kept(case: Case, directory: str, threshold: float, **options: Any) -> Run:
    """A run that keeps bundles, and the model."""
    path = Path(directory)
    if dist.get_rank() == 0:
        save_model(case, path)
    detection = {"spike_detection": True, "grad_norm_threshold": threshold, "bisect_budget_steps": 500}
    run = train(case, bisect_dump_dir=str(path / "dump"), spike_replay=4, **detection, **options)
    dist.barrier()
    return run


def spiked(case: Case, directory: str, **options: Any) -> tuple[list[Unit], float, Run]:
    """Every unit and token by brute force, a threshold that planted tokens exceed, and a run that keeps bundles."""
    units, _ = brute_force(case, build_batch(case, dist.get_rank()), tokens=True)
    threshold = threshold_between(case, units)
    return units, threshold, kept(case, directory, threshold, **options)


def events_of(run: Run) -> list[dict[str, Any]]:
    return [event for events in run.events for event in json.loads(events)]


def identical(directory: str) -> tuple[dict[str, bool], dict[str, bool], dict[str, list[str | None]]]:
    """Runs of two events, one with space for one bundle and one that can write none, against the unpatched actor."""
    case = Case(mini_batch=4, optimizer="adamw", planted=((0, 0, 4), (1, 3, 0), (1, 6, 9)))
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD}
    stock = stock_run(case)
    kept, broken = (
        train(case, bisect_dump_dir=f"{directory}/{name}", spike_replay=1, **options) for name in ("dump", "file")
    )
    events = {name: [event["replay"] for event in events_of(run)] for name, run in (("kept", kept), ("broken", broken))}
    return compare_runs(kept, stock), compare_runs(broken, stock), events


def stalled(directory: str, function: str) -> tuple[dict[str, bool], list[str | None]]:
    """A run of two events whose disk answers no more when a bundle's function needs it, against the unpatched actor."""
    case = Case(mini_batch=4, planted=((0, 0, 4), (1, 3, 0), (1, 6, 9)))
    answers = threading.Event()
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "spike_replay": 4}
    module = bundle_writer if hasattr(bundle_writer, function) else replay_bundles
    try:
        with (
            mock.patch.object(guarded, "PATIENCE", 0.1),
            mock.patch.object(module, function, lambda *_: answers.wait()),
        ):
            run = train(case, bisect_dump_dir=directory, **options)
    finally:
        answers.set()
    return compare_runs(run, stock_run(case)), [event["replay"] for event in events_of(run)]


def spiked_and_late(case: Case, directory: str) -> tuple[list[Unit], float, Run]:
    """As `spiked`, with rollout log-probs that are one position late."""

    def change(batch: DataProto) -> None:
        batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].roll(1, 1)

    return spiked(case, directory, change_batch=change)


def spiked_and_recorded(case: Case, directory: str) -> tuple[list[Unit], float, Run]:
    """As `spiked`, and the same run once more, whose spike is only recorded."""
    found = spiked(case, directory)
    detection = {"spike_detection": True, "grad_norm_threshold": found[1], "spike_search": "replay", "spike_replay": 4}
    train(case, bisect_dump_dir=f"{directory}/recorded", **detection)
    dist.barrier()
    return found


def natural(case: Case, directory: str, share: float) -> tuple[list[Unit], float, Run]:
    """Every unit and token by brute force, τ as a share of the largest unit's norm, and a run that keeps bundles."""
    units, _ = brute_force(case, build_batch(case, dist.get_rank()), tokens=True)
    threshold = share * max(unit.norm / unit.weight for unit in units if unit.weight)
    return units, threshold, kept(case, directory, threshold)


def searched(bundle: str, model: str, *options: str) -> int:
    """The search of a bundle in the processes of this cluster, as torchrun starts it; its exit code."""
    started = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, started), contextlib.redirect_stdout(io.StringIO()):
        return main([bundle, "--model", model, "--search", *options])


def failing(bundle: str, model: str) -> list[tuple[int, str]]:
    """The exit codes of searches in which rank 1 alone fails: while it loads, and in either of its passes."""
    found = []
    for owner, name, at in ((search_command, "load", 1), *((Passes, "_forward_backward", at) for at in (1, 2))):
        errors = io.StringIO()
        failure = test_faults.failing(owner, name, at, [1], RuntimeError("planted failure"))
        with failure, contextlib.redirect_stderr(errors):
            found.append((searched(bundle, model), errors.getvalue()))
    return found
