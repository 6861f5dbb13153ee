# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the spike of a bundle: its micro-batches again, unsharded in one process, against the recorded norms.

    gradloc replay /runs/1/spikes/replay/step7-epoch0-mini_batch0 --remedies

The coefficients of the loss are those of training. So with the weights of training, the gradients are those of
training but for rounding; with other weights, the log-probs show how far they are.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from gradloc.evidence.writer import jsonable

from ..bundles.opening import Bundle, BundleError, open_bundle
from ..command_line import argument, need
from ..report.figures import severity, visible
from .measuring import Measured, measure, places
from .memory import check_memory, is_out_of_memory, needed_memory
from .model import (
    ATTENTIONS,
    DTYPES,
    Model,
    Variant,
    WrongModelError,
    default_variant,
    device_kind,
    load,
    model_path,
    other_variants,
    quiet_transformers,
    why_not,
)
from .parts import missing_notes
from .progress import measuring, shown
from .remedies import remedies_so_far
from .result import Found, build_result, write_result
from .search_command import given, processes, run_search
from .searched_event import with_findings
from .switch_table import AS_REPLAYED
from .switches import Switch, loaded_switches, measure_switch, row, switches_in_place
from .temperature import fit_temperature

TOKENS = 16
_REMEDIES_OPEN = "Not all remedies were measured"
_TAKE_LESS = "Take another --device, --dtype or --attention, or a machine with more memory."
# A model's own code may have other signatures and attributes than a switch takes for granted.
_NOT_DONE = (
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
    need("gradloc replay", *([] if options.json else ["rich"]))
    try:
        with shown():
            return run_search(options) if options.search else _run(options)
    except (BundleError, WrongModelError) as error:
        text = str(error)
    except OSError as error:
        text = f"{error.strerror or error}: {error.filename2 or error.filename or options.bundle}"
    print(visible(text), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradloc replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    positive = argument(float, lambda value: 0 < value < math.inf, "must be positive and finite")
    parser.add_argument("--threshold", metavar="τ", type=positive, help="for --search: τ (default: the event's)")
    parser.add_argument(
        "--budget", metavar="N", type=int, help="for --search: at most N passes (default: as in training)"
    )
    parser.add_argument("--html", metavar="FILE", help="write a report with the replay to FILE")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's folder run its own code")
    return parser


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


def _run(options: argparse.Namespace) -> int:
    """Replays the bundle, and writes and prints the result."""
    bundle = with_findings(open_bundle(options.bundle))
    said = ""
    for result in _Replay(bundle, options).results():
        try:
            text = f"The result: {visible(str(write_result(bundle, result)))}"
        except OSError as error:
            text = f"The result cannot be written beside the bundle: {error.strerror}"
        if text != said:
            print(text, file=sys.stderr)
        said = text
    if options.json:
        print(json.dumps(jsonable(result), indent=2, allow_nan=False))
    else:
        from .terminal import print_result  # needs rich

        print_result(result)
    if options.html:
        from .page import write_replay_page

        write_replay_page(bundle, result, options.html, given(options))
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)
    return 0


@dataclass(frozen=True)
class _Step:
    """A comparison or a switch.

    Args:
        note (str): What a note on it begins with: that it was not done.
        what (str): What it is.
        do (Callable): Measures it.
        variant (Variant, optional): What is compared; None for a switch.
    """

    note: str
    what: str
    do: Callable[[], None]
    variant: Variant | None = None


class _Replay:
    """What is measured of a bundle, one model in memory at a time."""

    def __init__(self, bundle: Bundle, options: argparse.Namespace) -> None:
        quiet_transformers()
        device = device_kind(options.device)
        path = model_path(bundle, options.model, options.trust_remote_code)
        self._culprits = places(bundle, bundle.event["culprits"])
        largest = sorted(bundle.manifest["measured"], key=lambda token: -severity(token["grad_norm"]))
        tokens = list(dict.fromkeys([*self._culprits, *places(bundle, largest)]))[: max(options.tokens, 0)]
        of_first = [place for place in tokens if place in self._culprits and place[0] == bundle.first]
        self._culprit = of_first[0] if of_first else None
        main = default_variant(bundle, options.dtype, options.attention, device)
        self._found = Found(bundle, path, device, main, tokens, notes=missing_notes(bundle))
        self._options = options
        self._model: Model | None = None
        self._sizes: dict[Variant, int] = {}

    def results(self) -> Iterator[dict[str, object]]:
        """The result, then that with each remedy, comparison or switch added: the next may take too much memory."""
        steps = self._replay()
        notes = [step.note for step in steps]
        if self._options.remedies:
            yield build_result(self._found, [_REMEDIES_OPEN, *notes])
            yield from self._remedies(notes)
        yield build_result(self._found, notes)
        for number, step in enumerate(steps, 1):
            measuring(step.what, number, len(steps))
            try:
                step.do()
            except _NOT_DONE as error:
                self._found.notes.append(f"{step.note}: {_reason(error, step.variant)}")
            yield build_result(self._found, [later.note for later in steps[number:]])

    def _remedies(self, notes: list[str]) -> Iterator[dict[str, object]]:
        """The result after each row of remedies; the model is still that of the replay."""
        found = self._found
        assert self._model is not None
        try:
            for so_far in remedies_so_far(found.bundle, self._model, found.measured[found.main]):
                found.remedies = so_far
                yield build_result(found, [_REMEDIES_OPEN, *notes])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            found.notes.append(f"{_REMEDIES_OPEN}: {why_not(error, found.main)}")

    def _replay(self) -> list[_Step]:
        """Measures what stands for the replay, and returns what is left to do."""
        options, found = self._options, self._found
        bundle, main = found.bundle, found.main
        others = [] if options.only else other_variants(main)
        reloaded = loaded_switches(main, found.device) if options.switches else []
        in_place: list[Switch] = []
        try:
            model = self._load(main)
            check_memory(_size(bundle, model, main), found.device)
            for later in (*others, *(variant for _, variant, _ in reloaded)):
                self._sizes[later] = _size(bundle, model, later, loaded=False)
            found.measured[main] = measured = measure(bundle, model, found.tokens, self._culprits)
            found.temperature = fit_temperature(bundle, model)
            if options.switches:
                found.switches = [row(AS_REPLAYED, bundle, measured, measured, self._culprit)]
                in_place = switches_in_place(model, main)
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise WrongModelError(f"{why_not(error, main)} {_TAKE_LESS}") from error
        return [
            *(_switching(switch.name, partial(self._switch, switch)) for switch in in_place),
            *(
                _Step(f"Not compared with {other}", f"comparison with {other}", partial(self._compare, other), other)
                for other in others
            ),
            *(_switching(each[0], partial(self._switch_reloaded, *each)) for each in reloaded),
        ]

    def _load(self, variant: Variant) -> Model:
        self._model = None  # makes room
        if variant in self._sizes:
            check_memory(self._sizes[variant], self._found.device)
        found, options = self._found, self._options
        self._model = load(found.bundle, found.model, variant, found.device, options.adapter, options.trust_remote_code)
        found.notes += [note for note in self._model.notes if note not in found.notes]
        return self._model

    def _compare(self, variant: Variant) -> None:
        self._found.measured[variant] = measure(self._found.bundle, self._load(variant), self._found.tokens)

    def _switch(self, switch: Switch) -> None:
        assert self._model is not None  # that of the replay
        with switch.on(self._model):
            self._add_switch(switch.name, self._model)

    def _switch_reloaded(self, name: str, variant: Variant, change: Callable[[nn.Module], None] | None) -> None:
        if change is None and variant in self._found.measured:
            self._add_switch(name, self._found.measured[variant])
            return
        model = self._load(variant)
        if change is not None:
            change(model.module)
        self._add_switch(name, model)

    def _add_switch(self, name: str, of: Model | Measured) -> None:
        """Adds the row of a switch that is on in a model, or of what was measured with it on."""
        found, culprit = self._found, self._culprit
        bundle, main = found.bundle, found.measured[found.main]
        if isinstance(of, Model):
            found.switches.append(measure_switch(name, bundle, of, main, culprit))
        else:
            found.switches.append(row(name, bundle, of, main, culprit))


def _switching(name: str, do: Callable[[], None]) -> _Step:
    return _Step(f"Not switched to '{name}'", f"switch '{name}'", do)


def _reason(error: BaseException, variant: Variant | None) -> str:
    """Why a comparison with a variant could not be made, or a switch, as a sentence."""
    if variant is None and is_out_of_memory(error):
        return "it takes more memory than there is."
    return why_not(error, variant)


def _size(bundle: Bundle, model: Model, variant: Variant, loaded: bool = True) -> int:
    """The bytes that a variant takes at least, as far as they are not taken yet."""
    dtype = DTYPES[variant.dtype]
    weights = 0 if loaded else sum(p.numel() for p in model.module.parameters()) * dtype.itemsize
    return weights + needed_memory(bundle, model.module, dtype, variant.attention)
