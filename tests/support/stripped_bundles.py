"""Bundles of a search in training, without all that it has measured: those of a converted spike."""

from operator import itemgetter
from pathlib import Path

from gradloc.bundles.bundle_writer import write_converted_bundle
from gradloc.evidence.event import converted_event
from gradloc.measure.micro_batch import MicroBatch
from gradloc.tools.opening import open_bundle


def strip(path: Path, evidence: Path) -> Path:
    """Writes a converted spike with the micro-batches of a bundle to a folder of evidence; returns its bundle."""
    bundle = open_bundle(path)
    event = bundle.event
    micro_batches = {
        name: MicroBatch({"samples": saved.rows}, bundle.rows[name], saved.rng_state, dict(saved.tokens))
        for name, saved in bundle.micro_batches.items()
    }
    where = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
    norms = {name: float(event[name]) for name in ("global_norm", "global_threshold")}
    run = {name: event[name] for name in ("threshold", "world_size")}
    converted = converted_event(micro_batches, where=where, **norms, **run)
    of_context = ("model", "dtype", "actor", "checkpoint", "grad_clip", "versions")
    context = {name: bundle.manifest[name] for name in of_context}
    return evidence / write_converted_bundle(evidence, converted, micro_batches, itemgetter("samples"), context)
