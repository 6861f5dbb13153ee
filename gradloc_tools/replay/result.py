# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's figures beside the recorded ones, as `<bundle>.result.json` has them."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradloc.bundles import limits
from gradloc.evidence.writer import jsonable
from gradloc.measure.alignment import alignment_warning
from gradloc.version import __version__

from ..bundles.opening import Bundle
from ..bundles.results import RESULT_KIND, RESULT_SUFFIX
from ..report.figures import severity
from ..report.page import write_whole
from .measuring import Measured, Place
from .model import Variant
from .remedies import Row, remedies_without_pass
from .scale import find_scale
from .verdict import same_weights, sentences


@dataclass
class Found:
    """What a replay has found so far."""

    bundle: Bundle
    model: str  # its path
    device: str
    main: Variant  # what stands for the replay; the other ways of computing are compared with it
    tokens: list[Place]  # those that are measured alone
    notes: list[str]  # what could not be repeated
    measured: dict[Variant, Measured] = field(default_factory=dict)
    temperature: dict[str, float] | None = None  # what `fit_temperature` gave
    remedies: tuple[list[Row], list[str]] | None = None  # the last of `remedies_so_far`; None if not asked for
    switches: list[Row] = field(default_factory=list)  # the rows of their table; empty if not asked for


def build_result(found: Found, open_ones: Sequence[str]) -> dict[str, Any]:
    """The result of a replay, ready for `jsonable`; norms that were not recorded are None.

    Args:
        found (Found): What was found, with the main way of computing measured.
        open_ones (Sequence[str]): How the notes on comparisons begin that have not been made yet.
    """
    bundle, main, measured = found.bundle, found.main, found.measured[found.main]
    manifest, event = bundle.manifest, bundle.event
    others = {variant: of for variant, of in found.measured.items() if variant != main}
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
        "model": found.model,
        "checkpoint": manifest["checkpoint"],
        "device": found.device,
        "dtype": main.dtype,
        "variant": str(main),
        "variants": [str(variant) for variant in others],
        "recorded": f"{manifest['dtype']}, {manifest['model'].get('attention')}",
        "recorded_dtype": manifest["dtype"],
        "versions": {"gradloc": __version__, "torch": torch.__version__},
        "recorded_versions": {str(name): str(version) for name, version in manifest["versions"].items()},
        "notes": [*found.notes, *(f"{note}: the replay ended before." for note in open_ones)],
        "log_probs": log_prob_distance(torch.cat(differences)),
        "temperature": found.temperature,
        "units": [_unit(entry, measured, others.values()) for entry in manifest["micro_batches"]],
        "tokens": _tokens(bundle, found.tokens, measured, others.values()),
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
    if found.remedies is None:
        result["remedies"] = remedies_without_pass(bundle, measured)
    else:
        result["remedies"], result["remedy_notes"] = found.remedies
    result["same_weights"] = same_weights(result)
    result["scale"] = find_scale(bundle, measured, result["same_weights"], main.dtype, manifest["dtype"])
    if found.switches:
        result["switches"] = [*found.switches]
    misaligned = alignment_warning([saved.tokens for saved in bundle.micro_batches.values()])
    of_positions = [] if misaligned is None else [misaligned["sentence"]]
    result["sentences"] = [*of_positions, *sentences(result)]
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
    write_whole(path, json.dumps(jsonable(result), allow_nan=False, indent=1))
    return path


def log_prob_distance(differences: Tensor) -> dict[str, Any]:
    """How far log-probs are from the recorded ones.

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
