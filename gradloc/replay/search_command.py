# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What `--search` does: it loads the model, searches, and writes and prints the event. Also under torchrun."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import GradLocConfig
from ..evidence.writer import event_line, jsonable
from ..fsdp import collectives
from ..measure import passes
from ..measure.passes import Forward
from ..report.build import TABLE_ROWS, build
from ..report.page import write_page
from ..tools.command_line import in_a_sentence
from ..tools.figures import count, ranges, short, visible
from ..tools.files import write_whole
from ..tools.opening import Bundle, BundleError, open_bundle
from ..tools.reading import read
from ..tools.results import EVENT_SUFFIX
from .memory import check_memory, is_out_of_memory, needed_memory
from .model import (
    CannotReplayError,
    Model,
    Variant,
    default_variant,
    device_kind,
    first_line,
    load,
    model_path,
    why_not,
)
from .search import Searched, build_forward, search, shard_model
from .searched_event import event_around, evidence_of, places, quiet_event, searched_event
from .verdict import same_weights, weights_in_words

_TAKE_LESS = "Take another --device, --dtype or --attention, a machine with more memory, or several with torchrun."


def given(options: argparse.Namespace) -> list[str]:
    """What was given of the model: a command on the same bundle takes it as well."""
    paths = (("--model", options.model), ("--adapter", options.adapter))
    words = [word for name, path in paths if path is not None for word in (name, path)]
    return [*words, *["--trust-remote-code"] * options.trust_remote_code]


def processes() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def run_search(options: argparse.Namespace) -> None:
    """Searches a bundle as the command line asks for.

    Raises:
        CannotReplayError: On all ranks: it cannot be searched.
        OSError: On rank 0, which writes the page: that cannot be written.
    """
    with process_group(options.device) as device:
        # Ranks that make a mesh may wait for each other: none has failed yet.
        mesh = init_device_mesh(device.type, (processes(),)) if processes() > 1 else None
        with _failing_together(options.bundle):
            bundle, model, forward = _load(options, device, mesh)
        threshold = options.threshold or bundle.event["threshold"]
        budget = options.budget or bundle.event["budget"] or GradLocConfig.bisect_budget_steps
        try:
            # Without the warning of a pass that fails, which is for training.
            with mock.patch.object(passes.logger, "disabled", True):
                found = search(bundle, model, forward, threshold, budget)
        except collectives.RankFailedError as error:
            raise _failure(error, model.variant) from error
        if collectives.rank() == 0:
            _report(options, bundle, model, found, threshold)


@contextmanager
def process_group(asked: str | None = None, alone: bool = False) -> Iterator[torch.device]:
    """Joins the processes of torchrun, if there are any, for tensors on the CPU and on the device of this process.

    Args:
        asked (str, optional): The kind of device; default: cuda where there is one.
        alone (bool): Whether one process is a group as well.

    Raises:
        CannotReplayError: This process has no device.
    """
    device = torch.device(device_kind(asked))
    several = processes() > 1
    if several and device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if device.index >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise CannotReplayError(f"There are {found} CUDA devices here: start no more processes.")
        torch.cuda.set_device(device)
    if dist.is_initialized() or not (several or alone):
        yield device
        return
    options: dict[str, Any] = {} if several else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **options)
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def _failing_together(path: str) -> Iterator[None]:
    """If it fails on some rank within it, all raise.

    Raises:
        CannotReplayError: With the message of the first rank that failed.
    """
    failure = None
    try:
        yield
    except (CannotReplayError, BundleError, OSError) as error:
        failure = in_a_sentence(error, path)
    for message in filter(None, collectives.gather_objects(failure)):
        raise CannotReplayError(message)


def _load(options: argparse.Namespace, device: torch.device, mesh: DeviceMesh | None) -> tuple[Bundle, Model, Forward]:
    bundle, trust = open_bundle(options.bundle), options.trust_remote_code
    path = model_path(bundle, options.model, trust)
    variant = default_variant(bundle, options.dtype, options.attention, device.type)
    try:
        # Shards are made of a copy on the CPU, so that no device ever has all of it.
        model = load(bundle, path, variant, "cpu" if mesh is not None else device.type, options.adapter, trust)
        if mesh is not None:
            return bundle, *shard_model(model, device, mesh)
        check_memory(needed_memory(bundle, model.module, model.dtype, variant.attention), device.type)
    except (MemoryError, RuntimeError) as error:
        raise _failure(error, variant) from error
    return bundle, model, build_forward(model)


def _failure(error: BaseException, variant: Variant) -> CannotReplayError:
    if is_out_of_memory(error):
        return CannotReplayError(f"{why_not(error, str(variant))} {_TAKE_LESS}")
    return CannotReplayError(f"The search failed: {first_line(error)}")


def _report(options: argparse.Namespace, bundle: Bundle, model: Model, searched: Searched, threshold: float) -> None:
    """Writes and prints what was found. On rank 0 alone."""
    facts = {
        "log_probs": searched.log_probs,
        "dtype": model.variant.dtype,
        "recorded_dtype": bundle.manifest["dtype"],
        "global_step": bundle.event["global_step"],
        "checkpoint": bundle.manifest["checkpoint"],
    }
    of_training = same_weights(facts)
    notes = [*bundle.missing, *model.notes]
    known, directory = event_around(bundle), None
    base = known or bundle.event
    was_found = base["diagnosis"] not in ("unsearched", "under")
    if searched.found is not None:
        event = searched_event(base, searched.found, bundle, threshold, is_whole=not bundle.missing)
        sentences = [_in_words(bundle, searched, searched.found), weights_in_words(facts)]
        if not of_training:
            sentences.append("So the tokens are those of these weights, which need not be those of training.")
        sentences += _compared(bundle, event)
    else:
        # An earlier search's finding stays.
        event = bundle.event if was_found else quiet_event(base, bundle, threshold, searched, of_training)
        sentences = [_nothing_over(searched, threshold), weights_in_words(facts)]
    if searched.found is not None and not of_training and not bundle.is_converted and was_found:
        notes.append("The event is not written: with other weights, it would hide what training has found.")
    elif event is not bundle.event:
        directory, said = _write(bundle, event, known is not None)
        notes.append(said)
    shown = evidence_of(event, bundle, given(options))
    if options.json:
        print(json.dumps(jsonable(event), indent=2, allow_nan=False))
        for text in [*sentences, *notes]:
            print(visible(text), file=sys.stderr)
    else:
        from ..report.terminal import print_report, print_texts_and_tables  # needs rich

        ranks, kind = collectives.world_size(), model.device.type
        where = f"{model.path}   {model.variant} on {kind if ranks == 1 else f'{ranks} processes, {kind}'}"
        texts = [f"Search of {bundle.path.name}", where, "", *sentences]
        print_texts_and_tables([visible(text) for text in texts], (), [visible(note) for note in notes])
        if searched.found is not None:
            print_report(build(shown, TABLE_ROWS, details=0), everything=False)
    if options.html:
        write_page(shown if directory is None else read(directory), options.html)
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)


def _write(bundle: Bundle, event: Mapping[str, Any], is_known: bool) -> tuple[str | None, str]:
    """Writes the event beside the bundle.

    Args:
        is_known (bool): Whether the evidence around the bundle has a line of the spike.

    Returns:
        tuple: The directory of the evidence whose report shows it, or None; and what is to be said.
    """
    beside = bundle.path.with_name(bundle.path.name + EVENT_SUFFIX)
    try:
        line, _ = event_line(event)
        write_whole(beside, line.decode())
    except (OSError, ValueError) as error:
        return None, f"The event cannot be written beside the bundle: {getattr(error, 'strerror', None) or error}"
    if is_known:
        return str(beside.parent.parent), f"The event: {beside}. The report shows it in place of training's line."
    why = "spikes.jsonl around the bundle has no line of this spike, or several"
    return None, f"The event: {beside}. The report does not show it: {why}."


def _in_words(bundle: Bundle, searched: Searched, found: Mapping[str, Any]) -> str:
    """What was searched, and what it took."""
    what = count(len(bundle.micro_batches), "micro-batch", "micro-batches")
    ranks = ranges(sorted({rank for rank, _ in bundle.micro_batches}))
    took = f"{count(found['passes'], 'pass', 'passes')} of at most {found['budget']}"
    here = f"{count(searched.passes, 'forward and backward', 'forwards and backwards')} here, {found['seconds']:.1f} s"
    return f"Searched {what} (rank {ranks}): {took} ({here})."


def _compared(bundle: Bundle, event: Mapping[str, Any]) -> list[str]:
    """Whether the search names what the one in training named; empty if there was none."""
    if bundle.is_converted:
        return []
    named, before = places(event["culprits"]), places(bundle.event["culprits"])
    if named == before:
        same = "the same tokens" if named else "no token either"
        return [f"The search in training named {same}."]
    both = len(named & before)
    return [f"The search in training named {count(len(before), 'token')}, of which this one names {both}."]


def _nothing_over(searched: Searched, threshold: float) -> str:
    """What is to be said if no micro-batch is over its threshold."""
    if searched.largest is None:
        return "No token of the bundle has a gradient."
    rank, micro_batch = searched.largest
    return (
        f"No micro-batch is over τ = {threshold:.4g}: the largest, micro-batch {micro_batch} of rank {rank}, has "
        f"{short(searched.norm / threshold)} τ. To search it all the same: --threshold {searched.lower_threshold}."
    )
