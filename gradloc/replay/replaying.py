# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay, and its figures beside the recorded ones, as `<bundle>.result.json` has them."""

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundles import limits
from ..convert.told import told_by_bundle
from ..evidence.writer import jsonable
from ..tools.command_line import say
from ..tools.figures import severity
from ..tools.files import write_whole
from ..tools.opening import Bundle
from ..tools.results import RESULT_KIND, RESULT_SUFFIX
from ..version import __version__
from .measuring import Measured, Place, measure, places
from .memory import check_memory, is_out_of_memory, needed_memory
from .model import (
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
from .remedies import Row, remedies_so_far, remedies_without_pass
from .scale import find_scale, fit_temperature
from .switches import AS_REPLAYED, Switch, find_switches
from .verdict import same_weights, sentences

_TAKE_LESS = "Take another --device, --dtype or --attention, or a machine with more memory."
# A model's own code may have other signatures and attributes than a switch takes for granted.
_NOT_DONE = (MemoryError, OSError, RuntimeError, ImportError, TypeError, AttributeError, ValueError)

# The table of remedies, a comparison or a switch: how a note begins that it was not done, what it is, and what measures
# it, which may be an iterator over rows.
_Step = tuple[str, str, Callable[[], Iterable[object] | None]]


class Replay:
    """A replay, one model in memory at a time, and what it has found so far."""

    def __init__(self, bundle: Bundle, options: argparse.Namespace) -> None:
        self.bundle, self._options = bundle, options
        self.device = device_kind(options.device)
        self.path = model_path(bundle, options.model, options.trust_remote_code)
        self._culprits = places(bundle, bundle.event["culprits"])
        largest = sorted(bundle.manifest["measured"], key=lambda token: -severity(token["grad_norm"]))
        # The tokens that are measured alone.
        self.tokens = list(dict.fromkeys([*self._culprits, *places(bundle, largest)]))[: max(options.tokens, 0)]
        # The one that each switch measures alone.
        self._culprit = [place for place in self.tokens if place in self._culprits and place[0] == bundle.first][:1]
        # The replay itself; the other ways of computing are compared with it.
        self.main = default_variant(bundle, options.dtype, options.attention, self.device)
        self.notes = bundle.missing  # what could not be repeated
        if bundle.is_converted:
            self.notes.insert(0, "The spike was not searched: --search finds the tokens.")
        self.measured: dict[Variant, Measured] = {}
        self.temperature: dict[str, float] | None = None  # what `fit_temperature` gave
        self.remedies: tuple[list[Row], list[str]] | None = None  # the last of `remedies_so_far`; None if not asked for
        self.switches: list[Row] = []  # the rows of their table; empty if not asked for
        self._model: Model | None = None
        self._sizes: dict[Variant, int] = {}

    def results(self) -> Iterator[dict[str, object]]:
        """The result, then that with each remedy, comparison or switch added: the next may take too much memory."""
        steps = self._replay()
        notes = [note for note, *_ in steps]
        for number, (note, what, measure_it) in enumerate(steps):
            yield build_result(self, notes[number:])
            say(f"{what}, {number + 1} of {len(steps)}")
            try:
                for _ in measure_it() or ():
                    yield build_result(self, notes[number:])
            except _NOT_DONE as error:
                self.notes.append(f"{note}: {why_not(error)}")
        yield build_result(self, [])

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
            self._add_switch(AS_REPLAYED, measured)
        steps: list[_Step] = [
            (f"Not switched to '{each.name}'", f"switch '{each.name}'", partial(self._switch, each))
            for each in switches
        ]
        in_place = sum(switch.variant is None for switch in switches)  # these come first
        steps[in_place:in_place] = [
            (f"Not compared with {other}", f"comparison with {other}", partial(self._compare, other))
            for other in others
        ]
        remedies: _Step = "Not all remedies were measured", "remedies", self._remedies
        return [remedies, *steps] if options.remedies else steps

    def _remedies(self) -> Iterator[None]:
        assert self._model is not None  # that of the replay
        for so_far in remedies_so_far(self.bundle, self._model, self.measured[self.main]):
            self.remedies = so_far
            yield

    def _load(self, variant: Variant) -> Model:
        self._model = None  # makes room
        if variant in self._sizes:
            check_memory(self._sizes[variant], self.device)
        options = self._options
        self._model = load(self.bundle, self.path, variant, self.device, options.adapter, options.trust_remote_code)
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
        self._add_switch(switch.name, measured)

    def _add_switch(self, name: str, found: Measured) -> None:
        """Adds a row: the first micro-batch's norm, the largest change of a log-prob, and the culprit's norm."""
        first = self.bundle.first
        differences = (found.log_probs[first] - self.measured[self.main].log_probs[first]).abs().flatten()
        self.switches.append(
            {
                "name": name,
                "norm": found.units[first].norm,
                "log_probs": log_prob_distance(differences)["max"],
                "culprit": next((found.tokens[place].norm for place in self._culprit), None),
            }
        )


def build_result(replay: Replay, open_ones: Sequence[str]) -> dict[str, Any]:
    """The result of a replay, ready for `jsonable`; norms that were not recorded are None.

    Args:
        replay (Replay): The replay, with the main way of computing measured.
        open_ones (Sequence[str]): How the notes on comparisons begin that have not been made yet.
    """
    bundle, main, measured = replay.bundle, replay.main, replay.measured[replay.main]
    manifest, event = bundle.manifest, bundle.event
    others = {variant: of for variant, of in replay.measured.items() if variant != main}
    first = bundle.first
    differences = [
        (measured.log_probs[name] - saved.tokens["log_prob"].double())[saved.tokens["response_mask"].bool()].abs()
        for name, saved in bundle.micro_batches.items()
    ]
    result: dict[str, Any] = {
        "format": limits.FORMAT,
        "kind": RESULT_KIND,
        "time": datetime.now(timezone.utc).isoformat(),
        "bundle": bundle.path.name,
        **{name: event[name] for name in ("global_step", "epoch", "mini_batch", "threshold", "summary")},
        "culprits": len(event["culprits"]),
        "cause": None if event.get("verdict") is None else event["verdict"]["cause"],
        "model": replay.path,
        "checkpoint": manifest["checkpoint"],
        "device": replay.device,
        "dtype": main.dtype,
        "variant": str(main),
        "variants": [str(variant) for variant in others],
        "recorded": f"{manifest['dtype']}, {manifest['model'].get('attention')}",
        "recorded_dtype": manifest["dtype"],
        "versions": {"gradloc": __version__, "torch": torch.__version__},
        "recorded_versions": {str(name): str(version) for name, version in manifest["versions"].items()},
        "notes": [*replay.notes, *(f"{note}: the replay ended before." for note in open_ones)],
        "log_probs": log_prob_distance(torch.cat(differences)),
        "temperature": replay.temperature,
        "units": [_unit(entry, measured, others.values()) for entry in manifest["micro_batches"]],
        "tokens": _tokens(bundle, replay.tokens, measured, others.values()),
        "layers": [
            {
                "layer": layer,
                "norm": manifest["micro_batches"][0]["layer_norms"].get(layer),
                "replayed": measured.units[first].layers.get(layer, 0.0),
                "others": [of.units[first].layers.get(layer, 0.0) for of in others.values()],
            }
            for layer in manifest["layers"] or measured.units[first].layers
        ],
    }
    if replay.remedies is None:
        result["remedies"] = remedies_without_pass(bundle, measured)
    else:
        result["remedies"], result["remedy_notes"] = replay.remedies
    result["same_weights"] = same_weights(result)
    of_tokens = told_by_bundle(bundle).answer()
    of_loss = next((each.get("factor") for each in of_tokens["warnings"] if each["name"] == "loss_scale"), None)
    result["scale"] = find_scale(bundle, measured, result["same_weights"], of_loss, main.dtype, manifest["dtype"])
    if replay.switches:
        result["switches"] = [*replay.switches]
    said = event if "identities" in event else of_tokens  # older releases had no identities
    result["sentences"] = [*(each["sentence"] for each in said["warnings"]), *sentences(result)]
    return result


def _unit(entry: Mapping[str, Any], measured: Measured, others: Collection[Measured]) -> dict[str, Any]:
    """A micro-batch of the manifest, with what was measured of it."""
    name = entry["rank"], entry["micro_batch"]
    rest = measured.rests.get(name)
    return {
        **{key: entry[key] for key in ("rank", "micro_batch", "norm", "threshold")},
        "rows": len(entry["rows"]),
        "replayed": measured.units[name].norm,
        "others": [of.units[name].norm for of in others],
        "rest": None if rest is None else rest.norm,
    }


def _tokens(
    bundle: Bundle, tokens: Sequence[Place], measured: Measured, others: Collection[Measured]
) -> list[dict[str, Any]]:
    keys = ("rank", "micro_batch", "row", "position")
    recorded, culprits = (
        {tuple(token[key] for key in keys): token for token in listed}
        for listed in (bundle.manifest["measured"], bundle.event["culprits"])
    )
    found = []
    for place in tokens:
        name, row, position = place
        key = (*name, bundle.rows[name][row], position)
        values, replayed = bundle.micro_batches[name].tokens, measured.tokens[place]
        known = culprits.get(key) or recorded.get(key)
        largest = max(replayed.layers, key=lambda layer: severity(replayed.layers[layer]), default=None)
        found.append(
            {
                **dict(zip(keys, key, strict=True)),
                "token_id": int(values["token_id"][row, position]),
                "culprit": key in culprits,
                "source": culprits[key]["source"] if key in culprits else None,
                "grad_norm": None if known is None else known["grad_norm"],
                "replayed": replayed.norm,
                "others": [of.tokens[place].norm for of in others],
                "log_prob": float(values["log_prob"][row, position]),
                "replayed_log_prob": float(measured.log_probs[name][row, position]),
                "layer": largest,
                "layer_norm": None if known is None or largest is None else known["layer_norms"].get(largest),
                "replayed_layer_norm": None if largest is None else replayed.layers[largest],
            }
        )
    return found


def write_result(bundle: Bundle, result: Mapping[str, Any]) -> Path:
    """Writes the result beside the bundle, where the report looks for it.

    Raises:
        OSError: It cannot be written.
    """
    path = bundle.path.with_name(bundle.path.name + RESULT_SUFFIX)
    write_whole(path, json.dumps(jsonable(result), allow_nan=False))
    return path


def log_prob_distance(differences: Tensor) -> dict[str, Any]:
    """How far log-probs are from others.

    Args:
        differences (Tensor): Their absolute differences, shape (tokens,).
    """
    finite = differences[differences.isfinite()]
    return {
        "tokens": len(differences),
        "nonfinite": len(differences) - len(finite),
        "mean": float(finite.mean()) if len(finite) else None,
        "max": float(finite.max()) if len(finite) else None,
    }
