# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's figures beside the recorded ones, as `<bundle>.result.json` has them."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..bundles import layout
from ..bundles.opening import Bundle
from ..evidence.writer import jsonable
from ..measure.token_weights import square_weight
from ..report.figures import severity
from ..report.page import write_whole
from ..version import __version__
from .measuring import Measured, Norms, Place
from .model import Variant
from .verdict import sentences

# A layer whose bound is not known is taken to be clipped at this multiple of an ordinary token's norm: LayerClip's
# own default for its rule 'ratio'.
_ORDINARY_MULTIPLE = 3.0


def build_result(
    bundle: Bundle,
    model: str,
    device: str,
    main: Variant,
    measured: Mapping[Variant, Measured],
    tokens: Sequence[Place],
    notes: Sequence[str],
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
        for layer in manifest["layers"]
    ]
    result["remedies"] = _remedies(bundle, measured[main].units[name], measured[main].rests.get(name))
    result["sentences"] = sentences(result)
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
    every = torch.cat(differences)
    finite = every[every.isfinite()]
    return {
        "tokens": len(every),
        "nonfinite": len(every) - len(finite),
        "mean": float(finite.mean()) if len(finite) else None,
        "max": float(finite.max()) if len(finite) else None,
    }


def _remedies(bundle: Bundle, unit: Norms, rest: Norms | None) -> list[dict[str, Any]]:
    """What would have been left of the first micro-batch's gradient."""
    event, entry = bundle.event, bundle.manifest["micro_batches"][0]
    found = []
    clip, norm = bundle.manifest["grad_clip"], float(event["global_norm"])
    if clip is not None:
        # A gradient that is not finite is not clipped: the optimizer step is left out.
        factor = 0.0 if not math.isfinite(norm) else min(1.0, float(clip) / norm) if norm else 1.0
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
        found.append({"name": "spike_action=drop", "norm": rest.norm, "meaning": meaning})
    clipped = event["layer_clip"]
    if clipped and any(layer["bound"] is not None for layer in clipped.values()):
        left = [severity(unit.layers.get(layer, 0.0)) * float(step["factor"]) for layer, step in clipped.items()]
        tightest = min(clipped, key=lambda layer: float(clipped[layer]["factor"]))
        meaning = f"each layer by its own factor of that step, {tightest} by {float(clipped[tightest]['factor']):.3g}"
        found.append({"name": "LayerClip, as it was set", "norm": math.hypot(*left), "meaning": meaning})
    elif event["ordinary_layer_norms"]:
        tokens = bundle.micro_batches[entry["rank"], entry["micro_batch"]].tokens
        root = math.sqrt(float(square_weight(tokens)))
        bounds = {
            layer: _ORDINARY_MULTIPLE * float(value) * root for layer, value in event["ordinary_layer_norms"].items()
        }
        left = [min(severity(value), bounds.get(layer, math.inf)) for layer, value in unit.layers.items()]
        meaning = f"an estimate: each layer at most {_ORDINARY_MULTIPLE:g} times what ordinary tokens give it"
        found.append({"name": "LayerClip, estimated", "norm": math.hypot(*left), "meaning": meaning})
    return found
