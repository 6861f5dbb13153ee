"""Runs that keep a bundle of their spike, with the brute force that its replay is held against."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from actor_cases import Run, threshold_between, train
from actors import Case, build_model
from batches import build_batch
from oracle import Unit, brute_force

from gradloc.replay.command import main


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


def searched(bundle: str, model: str, *options: str) -> int:
    """The search of a bundle in the processes of this cluster, as torchrun starts it; its exit code."""
    started = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, started), contextlib.redirect_stdout(io.StringIO()):
        return main([bundle, "--model", model, "--search", *options])
