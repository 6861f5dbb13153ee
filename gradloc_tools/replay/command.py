# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the spike of a bundle: its micro-batches again, unsharded in one process, against the recorded norms.

    gradloc replay /runs/1/spikes/replay/step7-epoch0-mini_batch0 --remedies

The coefficients of the loss are those of training. So with the weights of training, the gradients are those of
training but for rounding; with other weights, the log-probs show how far they are.

exit codes: 0  it was replayed, or searched
            2  wrong usage, or the bundle or the model cannot be used
            1  a package is missing, or an error that is none of these
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from gradloc.evidence.writer import evidence_files, jsonable

from ..bundles.opening import Bundle, BundleError, open_bundle
from ..command_line import argument, in_a_sentence, need, say
from ..command_line import parser as new_parser
from ..report.figures import severity, visible
from ..report.page import write_page
from ..report.reading import read
from ..report.replays import replay_tables
from .measuring import measure, places
from .memory import check_memory, is_out_of_memory, needed_memory
from .model import (
    ATTENTIONS,
    DTYPES,
    CannotReplayError,
    Model,
    Variant,
    default_variant,
    device_kind,
    load,
    model_path,
    other_variants,
    why_not,
)
from .parts import missing_notes
from .remedies import remedies_so_far
from .result import Found, build_result, write_result
from .scale import fit_temperature
from .search_command import given, processes, run_search
from .searched_event import evidence_of, with_findings
from .switches import AS_REPLAYED, Switch, find_switches, row

TOKENS = 16
_REMEDIES_OPEN = "Not all remedies were measured"
_TAKE_LESS = "Take another --device, --dtype or --attention, or a machine with more memory."
# A model's own code may have other signatures and attributes than a switch takes for granted.
_NOT_DONE = (MemoryError, OSError, RuntimeError, ImportError, TypeError, AttributeError, ValueError)


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
        run_search(options) if options.search else _run(options)
    except (BundleError, CannotReplayError, OSError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(visible(in_a_sentence(error, options.bundle)), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("replay", str(__doc__))
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
    at_least_one = argument(int, lambda value: value > 0, "must be at least 1")
    parser.add_argument(
        "--budget", metavar="N", type=at_least_one, help="for --search: at most N passes (default: as in training)"
    )
    parser.add_argument("--html", metavar="FILE", help="write a report with the replay to FILE")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's folder run its own code")
    return parser


def _problem(options: argparse.Namespace) -> str | None:
    """Which options do not fit together; None if all do."""
    if options.search:
        others, why = ("remedies", "switches"), "of a replay without"
    else:
        others, why = ("threshold", "budget"), "for"
    wrong = [f"--{name}" for name in others if getattr(options, name)]
    if processes() > 1 and not options.search:
        wrong.append("torchrun")
    return f"{wrong[0]} is {why} --search" if wrong else None


def _run(options: argparse.Namespace) -> None:
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
        from ..report.terminal import print_texts_and_tables  # needs rich

        shown = replay_tables(result)
        texts = [f"Replay of {shown['title']}", shown["where"], "", *shown["sentences"]]
        print_texts_and_tables(texts, shown["tables"], shown["notes"])
    if options.html:
        _write_page(bundle, result, options)
        print(f"The report: {visible(options.html)}", file=sys.stderr if options.json else sys.stdout)


def _write_page(bundle: Bundle, result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Writes the report on the evidence that the bundle lies in, or on its event alone where there is none."""
    directory = str(bundle.path.parent.parent)
    evidence = read(directory) if evidence_files(directory) else evidence_of(bundle.event, bundle, given(options))
    # Its own result may not have been written beside the bundle.
    plain = jsonable(result)
    evidence.replays = [plain, *(other for other in evidence.replays if other["bundle"] != plain["bundle"])]
    write_page(evidence, options.html)


# A comparison or a switch: how a note begins that it was not done, what it is, and what measures it.
_Step = tuple[str, str, Callable[[], None]]


class _Replay(Found):
    """What is measured of a bundle, one model in memory at a time."""

    def __init__(self, bundle: Bundle, options: argparse.Namespace) -> None:
        device = device_kind(options.device)
        path = model_path(bundle, options.model, options.trust_remote_code)
        self._culprits = places(bundle, bundle.event["culprits"])
        largest = sorted(bundle.manifest["measured"], key=lambda token: -severity(token["grad_norm"]))
        tokens = list(dict.fromkeys([*self._culprits, *places(bundle, largest)]))[: max(options.tokens, 0)]
        # The token that each switch measures alone.
        self._culprit = [place for place in tokens if place in self._culprits and place[0] == bundle.first][:1]
        main = default_variant(bundle, options.dtype, options.attention, device)
        super().__init__(bundle, path, device, main, tokens, notes=missing_notes(bundle))
        self._options = options
        self._model: Model | None = None
        self._sizes: dict[Variant, int] = {}

    def results(self) -> Iterator[dict[str, object]]:
        """The result, then that with each remedy, comparison or switch added: the next may take too much memory."""
        steps = self._replay()
        notes = [note for note, *_ in steps]
        if self._options.remedies:
            yield build_result(self, [_REMEDIES_OPEN, *notes])
            yield from self._remedies(notes)
        yield build_result(self, notes)
        for number, (note, what, measure_it) in enumerate(steps, 1):
            say(f"{what}, {number} of {len(steps)}")
            try:
                measure_it()
            except _NOT_DONE as error:
                self.notes.append(f"{note}: {why_not(error)}")
            yield build_result(self, notes[number:])

    def _replay(self) -> list[_Step]:
        """Measures what stands for the replay, and returns what is left to do."""
        bundle, main, options = self.bundle, self.main, self._options
        others = [] if options.only else other_variants(main)
        switches = find_switches(main, self.device) if options.switches else []
        try:
            model = self._load(main)
            check_memory(needed_memory(bundle, model.module, model.dtype, main.attention), self.device)
            for later in {*others, *(switch.variant for switch in switches if switch.variant is not None)}:
                of_later = DTYPES[later.dtype], later.attention
                self._sizes[later] = needed_memory(bundle, model.module, *of_later, is_loaded=False)
            self.measured[main] = measured = measure(bundle, model, self.tokens, self._culprits)
            self.temperature = fit_temperature(bundle, model)
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CannotReplayError(f"{why_not(error, str(main))} {_TAKE_LESS}") from error
        if switches:
            self.switches = [row(AS_REPLAYED, bundle, measured, measured, self._culprit)]
        steps: list[_Step] = [
            (f"Not switched to '{each.name}'", f"switch '{each.name}'", partial(self._switch, each))
            for each in switches
        ]
        in_place = sum(switch.variant is None for switch in switches)  # these come first
        steps[in_place:in_place] = [
            (f"Not compared with {other}", f"comparison with {other}", partial(self._compare, other))
            for other in others
        ]
        return steps

    def _remedies(self, notes: list[str]) -> Iterator[dict[str, object]]:
        """The result after each row of remedies; the model is still that of the replay."""
        assert self._model is not None
        try:
            for so_far in remedies_so_far(self.bundle, self._model, self.measured[self.main]):
                self.remedies = so_far
                yield build_result(self, [_REMEDIES_OPEN, *notes])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.notes.append(f"{_REMEDIES_OPEN}: {why_not(error)}")

    def _load(self, variant: Variant) -> Model:
        self._model = None  # makes room
        if variant in self._sizes:
            check_memory(self._sizes[variant], self.device)
        options = self._options
        self._model = load(self.bundle, self.model, variant, self.device, options.adapter, options.trust_remote_code)
        self.notes += [note for note in self._model.notes if note not in self.notes]
        return self._model

    def _compare(self, variant: Variant) -> None:
        self.measured[variant] = measure(self.bundle, self._load(variant), self.tokens)

    def _switch(self, switch: Switch) -> None:
        if switch.on is None and switch.variant in self.measured:
            measured = self.measured[switch.variant]
        else:
            model = self._model if switch.variant is None else self._load(switch.variant)
            assert model is not None  # that of the replay
            with nullcontext() if switch.on is None else switch.on(model):
                measured = measure(self.bundle, model, self._culprit, names=[self.bundle.first])
        self.switches.append(row(switch.name, self.bundle, measured, self.measured[self.main], self._culprit))
