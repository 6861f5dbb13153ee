# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the spike of a bundle: its micro-batches again, unsharded in one process, against the recorded norms.

The coefficients of the loss are those of training. So with the weights of training, the gradients are those of
training but for rounding; with other weights, the log-probs show how far they are.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..bundles.opening import Bundle, BundleError, open_bundle
from ..checks import need
from ..evidence.writer import jsonable
from ..report.figures import severity, visible
from .measuring import Measured, Place, measure, places
from .memory import check_memory, is_out_of_memory, needed_memory
from .model import (
    ATTENTIONS,
    DTYPES,
    Model,
    Variant,
    WrongModelError,
    default_variant,
    first_line,
    load,
    model_path,
    other_variants,
)
from .parts import missing_notes
from .remedies import Row, measure_remedies
from .result import build_result, write_result
from .search_command import processes, run_search
from .searched_event import with_findings
from .switch_table import AS_REPLAYED
from .switches import Reloaded, Switch, loaded_switches, measure_switch, row, switches_in_place
from .temperature import fit_temperature

TOKENS = 16
_TAKE_LESS = "Take another --device, --dtype or --attention, or a machine with more memory."
# A model's own code may have other signatures and attributes than a switch takes for granted.
_NOT_SWITCHED = (
    WrongModelError,
    MemoryError,
    OSError,
    RuntimeError,
    ImportError,
    TypeError,
    AttributeError,
    ValueError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 where the bundle or the model cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    for package in [
        "safetensors",
        "transformers",
        *([] if options.json else ["rich"]),
        *(["plotly"] if options.html else []),
    ]:
        need(package, "A replay")
    if options.search:
        return run_search(options)
    said: set[str] = set()
    try:
        bundle = with_findings(open_bundle(options.bundle))
        for result in _replay(bundle, options):
            _write(bundle, result, said)
    except (BundleError, WrongModelError) as error:
        print(visible(str(error)), file=sys.stderr)
        return 2
    except OSError as error:
        print(visible(f"{error.strerror or error}: {error.filename or options.bundle}"), file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(jsonable(result), indent=2, allow_nan=False))
    else:
        from .terminal import print_result  # needs rich

        print_result(result)
    if options.html:
        from .page import write_replay_page  # needs plotly

        try:
            write_replay_page(bundle, result, options.html)
        except OSError as error:
            print(visible(f"{error.strerror}: {error.filename2 or error.filename}"), file=sys.stderr)
            return 2
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _parser() -> argparse.ArgumentParser:
    assert __spec__ is not None  # this module is imported or run with -m
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.parent}", description=__doc__)
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder, <bisect_dump_dir>/replay/<name>")
    parser.add_argument("--model", metavar="PATH", help="a folder or a name on the hub (default: the bundle's path)")
    parser.add_argument("--adapter", metavar="PATH", help="the folder of the LoRA adapter that was trained")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="what to compute in (default: as in training)")
    parser.add_argument("--attention", choices=ATTENTIONS, help="its implementation (default: as in training)")
    parser.add_argument("--only", action="store_true", help="no comparison with float32 and another attention")
    parser.add_argument("--tokens", metavar="K", type=int, default=TOKENS, help=f"measure K tokens alone ({TOKENS})")
    parser.add_argument("--remedies", action="store_true", help="measure what each remedy leaves of the spike")
    parser.add_argument(
        "--switches", action="store_true", help="switch attention, precision, RMSNorm and rotary embedding one by one"
    )
    parser.add_argument(
        "--search", action="store_true", help="search the bundle for the tokens behind the spike, and do nothing else"
    )
    parser.add_argument("--threshold", metavar="τ", type=_positive, help="for --search: τ (default: the event's)")
    parser.add_argument(
        "--budget", metavar="N", type=int, help="for --search: at most N passes (default: as in training)"
    )
    parser.add_argument("--html", metavar="FILE", help="write a report with the replay to FILE")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's folder run its own code")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be positive and finite")
    return value


def _problem(options: argparse.Namespace) -> str | None:
    """Which options do not fit together; None if all do."""
    if options.search:
        for name in ("remedies", "switches"):
            if getattr(options, name):
                return f"--{name} is of a replay without --search"
        return "--budget must be at least 1" if options.budget is not None and options.budget < 1 else None
    for name in ("threshold", "budget"):
        if getattr(options, name) is not None:
            return f"--{name} is for --search"
    return "torchrun is for --search" if processes() > 1 else None


def _replay(bundle: Bundle, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields the result, then the result with each comparison or switch added: the next may take too much memory."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise WrongModelError("There is no CUDA device here: take --device cpu.")
    path = model_path(bundle, options.model, options.trust_remote_code)
    culprits = places(bundle, bundle.event["culprits"])
    tokens = list(dict.fromkeys([*culprits, *_largest(bundle)]))[: max(options.tokens, 0)]
    main_variant = default_variant(bundle, options.dtype, options.attention, device)
    others = [] if options.only else other_variants(main_variant)
    sizes: dict[Variant, int] = {}
    measured: dict[Variant, Measured] = {}
    notes = missing_notes(bundle)
    remedies: tuple[list[Row], list[str]] | None = None
    temperature: dict[str, float] | None = None
    switches: list[Row] | None = [] if options.switches else None
    in_place: list[Switch] = []
    reloaded: list[Reloaded] = []
    open_ones: list[Variant] = [*others]
    open_switches: list[str] = []
    first = bundle.manifest["micro_batches"][0]
    of_first = [place for place in tokens if place in culprits and place[0] == (first["rank"], first["micro_batch"])]
    culprit = of_first[0] if of_first else None

    def so_far() -> dict[str, object]:
        ended = [f"Not compared with {variant}" for variant in open_ones]
        ended += [f"Not switched to '{name}'" for name in open_switches]
        said = [*notes, *(f"{what}: the replay ended before." for what in ended)]
        return build_result(bundle, path, device, main_variant, measured, tokens, said, remedies, temperature, switches)

    for variant in [main_variant, *others]:
        if variant in open_ones:
            open_ones.remove(variant)
        model: Model | None = None  # that of the last variant makes room, also where it ran out of memory
        try:
            if variant in sizes:
                check_memory(sizes[variant], device)
            model = load(bundle, path, variant, device, options.adapter, options.trust_remote_code)
            if variant == main_variant:
                check_memory(_size(bundle, model, variant), device)
                if switches is not None:
                    reloaded = loaded_switches(main_variant, device)
                later = [*others, *(of_switch for _, of_switch, _ in reloaded)]
                sizes = {other: _size(bundle, model, other, loaded=False) for other in later}
            found = measure(bundle, model, tokens, culprits, rests=variant == main_variant)
            if variant == main_variant:
                temperature = fit_temperature(bundle, model)
            if options.remedies and variant == main_variant:
                remedies = measure_remedies(bundle, model, found)
            if switches is not None and variant == main_variant:
                switches.append(row(AS_REPLAYED, bundle, found, found, culprit))
                in_place = switches_in_place(model, main_variant)
                open_switches = [*(switch.name for switch in in_place), *(name for name, _, _ in reloaded)]
            notes += [note for note in model.notes if note not in notes]
        except (WrongModelError, MemoryError, OSError, RuntimeError) as error:
            reason = first_line(error)
            if no_room := is_out_of_memory(error):
                figures = f": {error}" if isinstance(error, MemoryError) and error.args else ""
                reason = f"{variant} takes more memory than there is{figures}."
            if variant != main_variant:
                notes.append(f"Not compared with {variant}: {reason}")
            elif no_room:
                raise WrongModelError(f"{reason} {_TAKE_LESS}") from error
            else:
                raise
        else:
            measured[variant] = found
        yield so_far()
        if switches is not None and variant == main_variant:
            assert model is not None  # it was measured
            for switch in in_place:
                open_switches.remove(switch.name)
                with _noting(switch.name, notes), switch.on(model):
                    switches.append(measure_switch(bundle, model, switch.name, found, culprit))
                yield so_far()
    if switches is None:
        return
    main = measured[main_variant]
    for name, variant, give in reloaded:
        open_switches.remove(name)
        model = None
        with _noting(name, notes):
            if give is None and variant in measured:
                switches.append(row(name, bundle, measured[variant], main, culprit))
            else:
                check_memory(sizes[variant], device)
                model = load(bundle, path, variant, device, options.adapter, options.trust_remote_code)
                if give is not None:
                    give(model.module)
                switches.append(measure_switch(bundle, model, name, main, culprit))
        yield so_far()


@contextmanager
def _noting(name: str, notes: list[str]) -> Iterator[None]:
    """Notes why something cannot be switched, instead of ending the replay."""
    try:
        yield
    except _NOT_SWITCHED as error:
        reason = "it takes more memory than there is." if is_out_of_memory(error) else first_line(error)
        notes.append(f"Not switched to '{name}': {reason}")


def _size(bundle: Bundle, model: Model, variant: Variant, loaded: bool = True) -> int:
    """The bytes that a variant takes at least, as far as they are not taken yet."""
    dtype = DTYPES[variant.dtype]
    weights = 0 if loaded else sum(p.numel() for p in model.module.parameters()) * dtype.itemsize
    return weights + needed_memory(bundle, model.module, dtype, variant.attention)


def _write(bundle: Bundle, result: Mapping[str, object], said: set[str]) -> None:
    """Writes a result and says where, once."""
    try:
        text = f"The result: {visible(str(write_result(bundle, result)))}"
    except OSError as error:
        text = f"The result cannot be written beside the bundle: {error.strerror}"
    if text not in said:
        print(text, file=sys.stderr)
    said.add(text)


def _largest(bundle: Bundle) -> list[Place]:
    """The tokens that the search measured alone, largest first."""
    ordered = sorted(bundle.manifest["measured"], key=lambda token: -severity(token["grad_norm"]))
    return places(bundle, ordered)


if __name__ == "__main__":
    sys.exit(main())
