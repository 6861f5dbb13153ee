# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a bundle, and a line of evidence, from what another trainer wrote of the step with the spike.

    gradloc convert step7.jsonl --out spikes --model WEIGHTS

The files hold plain records, one for each response, as JSON Lines or Parquet. docs/reference/other-trainers.md gives
the format, and examples/ has what makes it for TRL, slime, NeMo RL and prime-rl. Then `gradloc replay BUNDLE --search
--model WEIGHTS` finds the tokens, and `gradloc report spikes` shows them.

exit codes: 0  the bundle and its line of evidence are written
            2  wrong usage, or the files cannot be used
            1  a package is missing, or an error that is none of these
"""

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..bundles.bundle_writer import write_converted_bundle
from ..bundles.layout import NotReplayableError
from ..evidence.event import converted_event
from ..evidence.writer import evidence_files, record_events
from ..judge import judged
from ..measure.micro_batch import square_weights
from ..threshold import MARGIN
from ..tools.command_line import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, argument, in_a_sentence, in_shell
from ..tools.command_line import parser as new_parser
from ..tools.figures import visible
from ..tools.spike import bundle_of
from .batch import AGG_MODES, KL_LOSSES, Batch, Loss, build_batch
from .records import Record, RecordError, bounded_memory, read_records
from .told import Told, told_by_records

# The threshold of the published method.
THRESHOLD = 640.0

_NORM = argument(float, lambda value: not value < 0, "it must not be negative")
_WHOLE = argument(int, lambda value: value >= 0, "it must not be negative")
# A shell gives an empty text for a variable that is not set. A folder may be on another machine, or be made.
_NO_FOLDER = "it must name a folder, and {!r} is none"
_FOLDER = argument(str, lambda value: bool(value) and (os.path.isdir(value) or not os.path.exists(value)), _NO_FOLDER)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 where no bundle could be made."""
    options = _parser().parse_args(arguments)
    try:
        with bounded_memory():
            records = _read(options)
            known = told_by_records(records)  # before they get what they lack
        loss = Loss(**{name: getattr(options, name) for name in asdict(Loss())})
        batch = build_batch(records, loss, options.micro_batch_size, options.old_from_rollout)
        event = _event(batch, options, known)
        context = _context(options, loss, batch)
        event["replay"] = write_converted_bundle(
            Path(options.out), event, batch.micro_batches, itemgetter("samples"), context
        )
    except (RecordError, NotReplayableError, OSError) as error:
        why = "No bundle is written: " if isinstance(error, NotReplayableError) else ""
        print(visible(f"{why}{in_a_sentence(error, options.out)}"), file=sys.stderr)
        return 2
    record_events(options.out, [event])
    _say(event, batch, options)
    return 0 if evidence_files(options.out) else 2


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("convert", str(__doc__))
    parser.add_argument("files", metavar="FILE", nargs="+", help="of one optimizer step")
    parser.add_argument("--out", metavar="DIR", type=_FOLDER, required=True, help="where evidence and bundle go")
    parser.add_argument("--model", metavar="PATH", type=_FOLDER, help="the folder with the weights that this step had")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of training")
    parser.add_argument("--step", metavar="N", type=_WHOLE, help="the trainer's step")
    parser.add_argument("--threshold", metavar="TAU", type=POSITIVE, help=f"norm of a spike's token ({THRESHOLD:g})")
    parser.add_argument(
        "--usual-norm",
        metavar="NORM",
        type=POSITIVE,
        help=f"the run's usual gradient norm; τ is then {MARGIN:g} times the norm that tokens usually have by it",
    )
    parser.add_argument("--grad-norm", metavar="NORM", type=_NORM, help="that of this step, before clipping")
    parser.add_argument("--loss-agg-mode", choices=AGG_MODES, help="as verl names them (%(default)s)")
    parser.add_argument(
        "--loss-scale-factor", metavar="N", type=POSITIVE, help="of seq-mean-token-sum-norm (the longest response)"
    )
    parser.add_argument("--clip-low", metavar="EPS", type=NOT_NEGATIVE, help="PPO's clip (%(default)g)")
    parser.add_argument("--clip-high", metavar="EPS", type=NOT_NEGATIVE, help="PPO's clip (%(default)g)")
    parser.add_argument("--clip-c", metavar="C", type=POSITIVE, help="dual clip, over 1 (none)")
    parser.add_argument("--kl-coef", metavar="BETA", type=NOT_NEGATIVE, help="of a KL loss (%(default)g)")
    parser.add_argument("--kl-type", choices=tuple(KL_LOSSES), help="(%(default)s)")
    parser.add_argument("--temperature", type=POSITIVE, default=1.0, help="what logits are divided by (1)")
    parser.add_argument(
        "--micro-batch-size", metavar="N", type=AT_LEAST_ONE, help="responses in a micro-batch, where records name none"
    )
    parser.add_argument(
        "--old-from-rollout", action="store_true", help="the loss's ratio is to the rollout's log-probs"
    )
    parser.add_argument("--keep-nonfinite", action="store_true", help="take NaN and infinities, too")
    parser.set_defaults(**asdict(Loss()))
    return parser


def _read(options: argparse.Namespace) -> list[Record]:
    files = [*map(Path, options.files)]
    if pickled := [path for path in files if path.suffix.lower() in (".pt", ".pth")]:
        raise RecordError(f"{pickled[0]} has no records: if it is slime's, examples/slime_records.py makes them of it.")
    return [*read_records(files, options.temperature, options.keep_nonfinite)]


def _event(batch: Batch, options: argparse.Namespace, known: Told) -> dict[str, Any]:
    squares = math.fsum(float(square_weights(each.tokens)[0]) for each in batch.micro_batches.values())
    # The threshold of the reduced gradient's norm, for τ = 1.
    unit = math.sqrt(squares) / batch.world_size
    if not unit:
        raise RecordError("No token can move: all advantages or coefficients are zero, or clipped.")
    threshold = options.threshold or (MARGIN * options.usual_norm / unit if options.usual_norm else THRESHOLD)
    if not (0 < threshold < math.inf and 0 < threshold * unit < math.inf):
        raise RecordError(
            f"The weights lead to a threshold of {threshold:g} for tokens and of {threshold * unit:g} for the "
            "gradient: both must be positive and finite."
        )
    norm = math.nan if options.grad_norm is None else options.grad_norm
    if norm <= threshold * unit:
        batch.notes.append(
            f"The gradient norm {norm:g} is under its threshold {threshold * unit:.3g}: give --usual-norm, or a "
            "lower --threshold."
        )
    event = converted_event(
        batch.micro_batches,
        where={"global_step": options.step, "epoch": 0, "mini_batch": 0},
        threshold=threshold,
        global_norm=norm,
        global_threshold=threshold * unit,
        world_size=batch.world_size,
        answer=known.answer,
    )
    for token in event["suspected"]:
        token["uid"] = batch.uids.get((token["rank"], token["row"]))
    return judged(event)


def _context(options: argparse.Namespace, loss: Loss, batch: Batch) -> dict[str, Any]:
    """What a bundle has of the trainer; its settings by verl's names."""
    return {
        "model": {"path": os.path.abspath(options.model) if options.model else None, "attention": None},
        "dtype": options.dtype,
        "grad_clip": None,
        "checkpoint": None,
        "actor": {
            "loss_agg_mode": loss.loss_agg_mode,
            "clip_ratio_low": loss.clip_low,
            "clip_ratio_high": loss.clip_high,
            "use_kl_loss": loss.kl_coef > 0,
            "kl_loss_coef": loss.kl_coef,
            "kl_loss_type": loss.kl_type,
        },
        "converted": {"notes": batch.notes},
    }


def _say(event: Mapping[str, Any], batch: Batch, options: argparse.Namespace) -> None:
    bundle = bundle_of(event, options.out, ("--search", "--model", options.model or "PATH"))
    responses = sum(len(each.rows) for each in batch.micro_batches.values())
    for note in batch.notes:
        print(visible(note), file=sys.stderr)
    print(f"{responses:,} responses in {len(batch.micro_batches):,} micro-batches, τ = {event['threshold']:g}.")
    print(visible(event["summary"]))
    if event["verdict"]["cause"] is not None:
        print(visible(f"{event['verdict']['sentence']} {event['verdict']['check']}"))
    states = Counter(state["state"] for state in event["identities"].values())
    broken = [f"{each['identity']} ({each['name']})" for each in event["warnings"]]
    print(visible(f"Broken identities: {', '.join(broken) or 'none'}; {states['held']} hold: gradloc check has more."))
    print(visible(f"Search it:   gradloc replay {bundle}"))
    print(visible(f"The report:  gradloc report {in_shell(options.out)}"))
