"""Bundles of a search in training, without all that it has measured: those of a recorded spike, one for each rank."""

from operator import itemgetter
from pathlib import Path

from gradloc.bundles.bundle_writer import write_recorded_bundle
from gradloc.evidence.event import recorded_event
from gradloc.measure.micro_batch import MicroBatch
from gradloc.tools.opening import open_bundle


def strip(path: Path, evidence: Path) -> list[Path]:
    """Writes the parts of a recorded spike with the micro-batches of a bundle to a folder of evidence, which gets
    `replay/<name>` for each rank.
    """
    bundle = open_bundle(path)
    event, found = bundle.event, []
    for rank in sorted({rank for rank, _ in bundle.micro_batches}):
        mine = {
            name: MicroBatch({"samples": saved.rows}, bundle.rows[name], saved.rng_state, dict(saved.tokens))
            for name, saved in bundle.micro_batches.items()
            if name[0] == rank
        }
        where = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
        norms = {name: float(event[name]) for name in ("global_norm", "global_threshold")}
        run = {name: event[name] for name in ("threshold", "world_size", "loss_scale")}
        recorded = recorded_event(mine, where=where, **norms, **run)
        of_context = ("model", "dtype", "actor", "checkpoint", "grad_clip", "versions")
        context = {name: bundle.manifest[name] for name in of_context}
        name = write_recorded_bundle(evidence, recorded, mine, itemgetter("samples"), context, f"-rank{rank}")
        found.append(evidence / name)
    return found
