# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's figures beside the recorded ones, as `<bundle>.result.json` has them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundles import layout
from ..bundles.opening import Bundle
from ..evidence.writer import jsonable
from ..report.figures import severity
from ..report.page import write_whole
from ..version import __version__
from .measuring import Measured, Norms, Place
from .model import Variant
from .remedies import DROP, ORDINARY_MULTIPLE, Row, global_clip_factor, layer_clip_factors, scaled
from .scale import find_scale
from .temperature import temperature_sentences
from .verdict import same_weights, sentences


def build_result(
    bundle: Bundle,
    model: str,
    device: str,
    main: Variant,
    measured: Mapping[Variant, Measured],
    tokens: Sequence[Place],
    notes: Sequence[str],
    remedies: tuple[list[Row], list[str]] | None = None,
    temperature: Mapping[str, float] | None = None,
    switches: Sequence[Row] | None = None,
) -> dict[str, Any]:
    """The result of a replay, ready for `jsonable`; norms that were not recorded are None.

    Args:
        bundle (Bundle): The bundle.
        model (str): The model's path.
        device (str): Where it was computed.
        main (Variant): What stands for the replay; the other ways of computing are compared with it.
        measured (Mapping): What each way of computing gave.
        tokens (Sequence[Place]): The tokens that were measured alone.
        notes (Sequence[str]): What could not be repeated.
        remedies (tuple, optional): What `measure_remedies` gave; None if it was not asked for.
        temperature (Mapping, optional): What `fit_temperature` gave.
        switches (Sequence, optional): The rows of `measure_switch`; None if they were not asked for.
    """
    manifest, event = bundle.manifest, bundle.event
    others = [variant for variant in measured if variant != main]
    recorded = {(t["rank"], t["micro_batch"], t["row"], t["position"]): t for t in manifest["measured"]}
    culprits = {(c["rank"], c["micro_batch"], c["row"], c["position"]): c for c in event["culprits"]}
    result: dict[str, Any] = {
        "format": layout.FORMAT,
        "kind": layout.RESULT_KIND,
        "time": datetime.now(timezone.utc).isoformat(),
        "bundle": bundle.path.resolve().name,
        **{name: event[name] for name in ("global_step", "epoch", "mini_batch", "threshold", "summary")},
        "culprits": len(event["culprits"]),
        "model": model,
        "checkpoint": manifest["checkpoint"],
        "device": device,
        "dtype": main.dtype,
        "variant": str(main),
        "variants": [str(variant) for variant in others],
        "recorded": f"{manifest['dtype']}, {manifest['model'].get('attention')}",
        "recorded_dtype": manifest["dtype"],
        "versions": {"gradloc": __version__, "torch": torch.__version__},
        "recorded_versions": {str(name): str(version) for name, version in manifest["versions"].items()},
        "notes": list(notes),
        "log_probs": _distance(bundle, measured[main]),
        "temperature": None if temperature is None else dict(temperature),
        "units": [],
        "tokens": [],
        "layers": [],
        "remedies": [],
    }
    for entry in manifest["micro_batches"]:
        name = entry["rank"], entry["micro_batch"]
        rest = measured[main].rests.get(name)
        result["units"].append(
            {
                **{key: entry[key] for key in ("rank", "micro_batch", "norm", "threshold")},
                "rows": len(entry["rows"]),
                "replayed": measured[main].units[name].norm,
                "others": [measured[variant].units[name].norm for variant in others],
                "rest": None if rest is None else rest.norm,
            }
        )
    for place in tokens:
        name, row, position = place
        key = (*name, bundle.rows[name][row], position)
        values = bundle.micro_batches[name].tokens
        replayed = measured[main].tokens[place]
        known = culprits.get(key) or recorded.get(key)
        largest = max(replayed.layers, key=lambda layer: severity(replayed.layers[layer]), default=None)
        result["tokens"].append(
            {
                **dict(zip(("rank", "micro_batch", "row", "position"), key, strict=True)),
                "token_id": int(values["token_id"][row, position]),
                "culprit": key in culprits,
                "source": culprits[key]["source"] if key in culprits else None,
                "grad_norm": None if known is None else known["grad_norm"],
                "replayed": replayed.norm,
                "others": [measured[variant].tokens[place].norm for variant in others],
                "log_prob": float(values["log_prob"][row, position]),
                "replayed_log_prob": float(measured[main].log_probs[name][row, position]),
                "layer": largest,
                "layer_norm": None if known is None or largest is None else known["layer_norms"].get(largest),
                "replayed_layer_norm": None if largest is None else replayed.layers[largest],
            }
        )
    first = manifest["micro_batches"][0]
    name = first["rank"], first["micro_batch"]
    result["layers"] = [
        {
            "layer": layer,
            "norm": first["layer_norms"].get(layer),
            "replayed": measured[main].units[name].layers.get(layer, 0.0),
            "others": [measured[variant].units[name].layers.get(layer, 0.0) for variant in others],
        }
        for layer in manifest["layers"] or measured[main].units[name].layers
    ]
    if remedies is None:
        result["remedies"] = _remedies(bundle, measured[main].units[name], measured[main].rests.get(name))
    else:
        result["remedies"], result["remedy_notes"] = remedies
    result["scale"] = find_scale(bundle, measured[main], same_weights(result), main.dtype, manifest["dtype"])
    if switches is not None:
        result["switches"] = list(switches)
    result["sentences"] = [*sentences(result), *temperature_sentences(temperature)]
    return result


def write_result(bundle: Bundle, result: Mapping[str, Any]) -> Path:
    """Writes the result beside the bundle, where the report looks for it.

    Raises:
        OSError: It cannot be written.
    """
    folder = bundle.path.resolve()
    path = folder.with_name(folder.name + layout.RESULT_SUFFIX)
    write_whole(path, json.dumps(jsonable(result), allow_nan=False, indent=1))
    return path


def _distance(bundle: Bundle, measured: Measured) -> dict[str, Any]:
    """How far the replayed log-probs are from the recorded ones, over all response tokens."""
    differences = []
    for name, saved in bundle.micro_batches.items():
        lengths = torch.tensor([row.response_length for row in saved.rows]).unsqueeze(1)
        mask = saved.tokens["response_mask"].bool() & (torch.arange(saved.tokens["weight"].shape[1]) < lengths)
        differences.append((measured.log_probs[name] - saved.tokens["log_prob"].double())[mask].abs())
    return log_prob_distance(torch.cat(differences))


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


def _remedies(bundle: Bundle, unit: Norms, rest: Norms | None) -> list[dict[str, Any]]:
    """What would have been left of the first micro-batch's gradient, as far as no further pass is needed."""
    found = []
    clip = bundle.manifest["grad_clip"]
    if clip is not None:
        factor = global_clip_factor(bundle, float(clip))
        found.append(
            {
                "name": f"global clip ({float(clip):g})",
                "norm": unit.norm * factor if factor else 0.0,
                "meaning": f"everything in the step is scaled by {factor:.3g}, ordinary tokens too"
                if factor
                else "the whole step is left out",
            }
        )
    if rest is not None:
        meaning = "the step without the culprits' gradient, the other tokens' unchanged"
        found.append({"name": DROP, "norm": rest.norm, "meaning": meaning})
    factors, as_set = layer_clip_factors(bundle, unit)
    if factors:
        norm = scaled(unit, lambda layer: factors.get(layer, 1.0))
        tightest = min(factors, key=lambda layer: factors[layer])
        if as_set:
            name = "LayerClip, as it was set"
            meaning = f"each layer by its own factor of that step, {tightest} by {factors[tightest]:.3g}"
        else:
            name = "LayerClip, estimated"
            meaning = f"an estimate: each layer at most {ORDINARY_MULTIPLE:g} times what ordinary tokens give it"
        found.append({"name": name, "norm": norm, "meaning": meaning})
    return found
