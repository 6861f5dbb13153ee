"""Runs that keep a bundle of their spike, with the brute force that its replay is held against."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from actor_cases import Run, compare_runs, search, train
from actors import IDENTITY_THRESHOLD, Case, build_model, stock_dp_actor
from oracle import Unit
from verl.utils.gradloc.bundles import bundle_writer


def save_model(case: Case, directory: Path) -> None:
    """The model's weights at the start, in the form that transformers loads; of a LoRA model, its parts."""
    model = build_model(case)
    if case.model == "lora":
        model.save_pretrained(directory / "adapter")
        model = model.unload()
    model.save_pretrained(directory / "model")


def spiked(case: Case, directory: str, most: int = 4, **options: Any) -> tuple[list[Unit], float, Run]:
    """Every unit and token by brute force, a threshold that planted tokens exceed, and a run that keeps bundles."""
    path = Path(directory)
    if dist.get_rank() == 0:
        save_model(case, path)
    units, _, threshold, run = search(case, bisect_dump_dir=str(path / "dump"), spike_replay=most, **options)
    dist.barrier()
    return units, threshold, run


def events_of(run: Run) -> list[dict[str, Any]]:
    return [event for events in run.events for event in json.loads(events)]


def identical(directory: str) -> tuple[dict[str, bool], dict[str, bool], dict[str, list[str | None]]]:
    """Runs of two events, one with space for one bundle and one that can write none, against the unpatched actor."""
    case = Case(mini_batch=4, optimizer="adamw", planted=((0, 0, 4), (1, 3, 0), (1, 6, 9)))
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD}
    stock = train(case, stock_dp_actor())
    kept = train(case, bisect_dump_dir=f"{directory}/dump", spike_replay=1, **options)
    broken = train(case, bisect_dump_dir=f"{directory}/file", spike_replay=1, **options)
    events = {name: [event["replay"] for event in events_of(run)] for name, run in (("kept", kept), ("broken", broken))}
    return compare_runs(kept, stock), compare_runs(broken, stock), events


def stalled(directory: str) -> tuple[dict[str, bool], list[str | None]]:
    """A run of two events whose disk answers no more once a bundle is to be written, against the unpatched actor."""
    case = Case(mini_batch=4, planted=((0, 0, 4), (1, 3, 0), (1, 6, 9)))
    answers = threading.Event()

    def prepare(actor: Any) -> None:
        actor.gradloc._bundle_writer._write = lambda *_: answers.wait()

    bundle_writer.PATIENCE = 0.1
    try:
        run = train(
            case,
            prepare=prepare,
            spike_detection=True,
            grad_norm_threshold=IDENTITY_THRESHOLD,
            bisect_dump_dir=directory,
            spike_replay=4,
        )
    finally:
        bundle_writer.PATIENCE = 60.0
        answers.set()
    return compare_runs(run, train(case, stock_dp_actor())), [event["replay"] for event in events_of(run)]
