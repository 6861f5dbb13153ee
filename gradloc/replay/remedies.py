# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each remedy would have left of a spike, and what it would have cost the ordinary tokens.

A remedy gives other coefficients ∂L/∂log p, so its gradient is one more backward pass from the log-probs. The ordinary
tokens are all but the culprits. How far their gradient moves is a pass with the differences of their coefficients.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..bundles.layout import SavedMicroBatch
from ..bundles.opening import Bundle
from ..measure.token_weights import movable, square_weight
from ..report.figures import severity
from ..threshold import is_over
from .measuring import Measured, Norms, gradient_norms, places
from .model import Model
from .token_clip import FACTOR, clip_tokens

# A layer whose bound is not known is taken to be clipped at this multiple of an ordinary token's norm: LayerClip's
# own default for its rule 'ratio'.
ORDINARY_MULTIPLE = 3.0

_ACTOR = "actor_rollout_ref.actor"
DROP = "spike_action=drop"
# The tighter global clip is this part of the one that the run had.
_TIGHTER = 0.1

Row = dict[str, Any]


@dataclass(frozen=True)
class _Spike:
    """The micro-batch whose gradient is compared.

    Args:
        saved (SavedMicroBatch): It.
        whole (Norms): Its gradient.
        rest (Norms): That of its ordinary tokens.
        ordinary (Tensor): Which tokens are ordinary, bool of shape (rows, response length).
        threshold (float): Its threshold.
    """

    saved: SavedMicroBatch
    whole: Norms
    rest: Norms
    ordinary: Tensor
    threshold: float

    def row(
        self, name: str, override: str | None, meaning: str, norm: float, moved: float | None, masked: Tensor | None
    ) -> Row:
        """A row of the table.

        Args:
            name (str): The remedy's name.
            override (str, optional): The Hydra overrides that turn it on; None for what the run had.
            meaning (str): What it does.
            norm (float): The norm that is left.
            moved (float, optional): The norm by which the ordinary tokens' gradient moves.
            masked (Tensor, optional): The tokens that have no coefficient any more, bool; None for none.
        """
        masked = torch.zeros_like(self.ordinary) if masked is None else masked
        return {
            "name": name,
            "norm": norm,
            "left": _ratio(norm, self.whole.norm),
            "under": not is_over(norm, self.threshold),
            "ordinary_moved": None if moved is None else _ratio(moved, self.rest.norm),
            "masked": {"tokens": int(masked.sum()), "culprits": int((masked & ~self.ordinary).sum())},
            "override": override,
            "meaning": meaning,
            "note": None,
        }


def measure_remedies(bundle: Bundle, model: Model, measured: Measured) -> tuple[list[Row], list[str]]:
    """The table of remedies for a bundle's first micro-batch, best first.

    Args:
        bundle (Bundle): The bundle.
        model (Model): The model; its gradients are cleared.
        measured (Measured): What `measure` gave with it, with the rests.

    Returns:
        tuple: The rows, and sentences on what cannot be computed.
    """
    spike = _spike(bundle, measured)
    notes: list[str] = []
    rows: list[Row] = []
    for make in (_of_verl, _of_token_clip, _of_layer_clip, _of_grad_clip, _of_drop):
        rows += make(bundle, model, spike, notes)
    notes.append(
        "Advantages without the division by the standard deviation (algorithm.norm_adv_by_std_in_grpo=False) cannot be "
        "computed: the bundle does not have the rewards of the group."
    )
    return sorted(rows, key=rank), notes


def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows are sorted by, the best first.

    Those come first that bring the micro-batch under its threshold. Of them, those come first that move the ordinary
    tokens' gradient least, in whole percent, and `drop`, which searches for the culprits of every spike, after others
    that move it as little. The rest is in the order of the norms that are left.
    """
    moved = math.inf if row["ordinary_moved"] is None else severity(row["ordinary_moved"])
    moved = round(moved, 2) if math.isfinite(moved) else math.inf
    norm = severity(row["norm"])
    if not row["under"]:
        return True, norm, moved, row["name"]
    return False, moved, row["name"] == DROP, norm, row["name"]


def layer_clip_factors(bundle: Bundle, unit: Norms) -> tuple[dict[str, float], bool]:
    """LayerClip's factor for each layer, and whether they are those of that step; no factors if nothing is known.

    Args:
        bundle (Bundle): The bundle.
        unit (Norms): The gradient of its first micro-batch.
    """
    event, entry = bundle.event, bundle.manifest["micro_batches"][0]
    clipped = event["layer_clip"]
    if clipped and any(layer["bound"] is not None for layer in clipped.values()):
        return {layer: float(step["factor"]) for layer, step in clipped.items()}, True
    if not event["ordinary_layer_norms"]:
        return {}, False
    root = math.sqrt(float(square_weight(bundle.micro_batches[entry["rank"], entry["micro_batch"]].tokens)))
    bounds = {layer: ORDINARY_MULTIPLE * float(norm) * root for layer, norm in event["ordinary_layer_norms"].items()}
    return {
        layer: bounds[layer] / norm if layer in bounds and norm > bounds[layer] else 1.0
        for layer, norm in ((layer, severity(norm)) for layer, norm in unit.layers.items())
    }, False


def global_clip_factor(bundle: Bundle, clip: float) -> float:
    """What a global clip multiplies the step's gradient by; 0 if that is not finite, as the step is left out then."""
    norm = float(bundle.event["global_norm"])
    return 0.0 if not math.isfinite(norm) else min(1.0, clip / norm) if norm else 1.0


def _spike(bundle: Bundle, measured: Measured) -> _Spike:
    entry = bundle.manifest["micro_batches"][0]
    name = entry["rank"], entry["micro_batch"]
    saved = bundle.micro_batches[name]
    ordinary = torch.ones_like(saved.tokens["weight"], dtype=torch.bool)
    for unit, row, position in places(bundle, bundle.event["culprits"]):
        if unit == name:
            ordinary[row, position] = False
    whole = measured.units[name]
    return _Spike(saved, whole, measured.rests.get(name, whole), ordinary, float(entry["threshold"]))


def _of_verl(bundle: Bundle, model: Model, spike: _Spike, notes: list[str]) -> list[Row]:
    """Other losses and rollout corrections: verl's own functions, where it is installed."""
    try:
        losses = _remedy_losses()
    except ImportError as error:
        reason = "is not installed" if find_spec("verl") is None else f"cannot be imported ({error})"
        notes.append(f"verl {reason} here, so its policy losses and rollout corrections are left out.")
        return []
    manifest = bundle.manifest
    half = manifest["dtype"] in ("bfloat16", "float16")
    version = manifest["versions"].get("verl")
    try:
        found, more = losses.loss_remedies(
            manifest["actor"], spike.saved.tokens, half, version if isinstance(version, str) else None
        )
    except losses.NotTheRecordedLossError as error:
        notes.append(f"{error} So policy losses and rollout corrections are left out.")
        return []
    notes += more
    tokens = spike.saved.tokens
    had = movable(tokens)
    measured: dict[bytes, tuple[float, float]] = {}
    rows = []
    for remedy in found:
        values = remedy.coefficient, remedy.entropy_coefficient
        key = b"".join(tensor.contiguous().numpy().tobytes() for tensor in values)
        if key not in measured:
            recorded = tokens["coefficient"], tokens["entropy_coefficient"]
            differences = [
                torch.where(spike.ordinary, new - old, 0.0) for new, old in zip(values, recorded, strict=True)
            ]
            whole, moved_by = (gradient_norms(model, bundle, spike.saved, *pair).norm for pair in (values, differences))
            measured[key] = whole, moved_by
        norm, moved = measured[key]
        masked = had & ~movable(
            {"weight": tokens["weight"], "coefficient": values[0], "entropy_coefficient": values[1]}
        )
        row = spike.row(remedy.name, remedy.override, remedy.meaning, norm, moved, masked)
        rows.append({**row, "note": remedy.note})
    return rows


def _remedy_losses() -> Any:
    """The adapter's module; by name, as the adapter for verl may be there or not."""
    package = __package__.rpartition(".")[0]
    return importlib.import_module(f"{package}.adapters.remedy_losses")


def _of_token_clip(bundle: Bundle, model: Model, spike: _Spike, notes: list[str]) -> list[Row]:
    if bool(spike.ordinary.all()):
        notes.append("TokenClip cannot be computed: without culprits, it is not known how large signals usually are.")
        return []
    cut = clip_tokens(model, bundle, spike.saved, spike.ordinary)
    if cut is None:
        notes.append(
            "TokenClip cannot be computed: no ordinary token has a gradient, or the decoder layers are not known."
        )
        return []
    override = f"{_ACTOR}.token_clip.enable=True {_ACTOR}.token_clip.action=drop"
    meaning = f"signals over {FACTOR:g} times the largest of ordinary tokens are cut"
    if cut.boundary is not None:
        meaning += f", first at {cut.boundary}"
    row = spike.row("TokenClip", override, meaning, cut.gradient.norm, cut.moved.norm, cut.positions)
    row["note"] = (
        "The usual signal is the largest of this micro-batch's ordinary tokens; a run has a moving average of its own."
    )
    if bundle.event["diagnosis"] != "tokens":
        row["note"] += " The culprits do not explain this spike: of other outlying tokens, a run cuts more."
    if cut.prompt_positions:
        row["note"] += f" {cut.prompt_positions:,} positions of prompts are cut as well."
    return [row]


def _of_layer_clip(bundle: Bundle, model: Model, spike: _Spike, notes: list[str]) -> list[Row]:
    factors, as_set = layer_clip_factors(bundle, spike.whole)
    if not factors:
        notes.append(
            "LayerClip cannot be computed: the bundle has neither its bounds nor the norms of ordinary layers."
        )
        return []
    norm = scaled(spike.whole, lambda layer: factors.get(layer, 1.0))
    moved = scaled(spike.rest, lambda layer: 1 - factors.get(layer, 1.0))
    tightest = min(factors, key=lambda layer: factors[layer])
    meaning = f"each layer is scaled by its own factor, {tightest} by {factors[tightest]:.3g}"
    if as_set:
        return [spike.row("LayerClip, as it was set", None, meaning, norm, moved, None)]
    row = spike.row("LayerClip", f"{_ACTOR}.layer_clip.enable=True", meaning, norm, moved, None)
    row["note"] = f"An estimate: each layer at most {ORDINARY_MULTIPLE:g} times what ordinary tokens give it."
    return [row]


def _of_grad_clip(bundle: Bundle, model: Model, spike: _Spike, notes: list[str]) -> list[Row]:
    recorded = bundle.manifest["grad_clip"]
    if recorded is None or not math.isfinite(float(recorded)):
        return []
    rows = []
    for clip, override in (
        (float(recorded), None),
        (float(recorded) * _TIGHTER, f"{_ACTOR}.grad_clip={float(recorded) * _TIGHTER:g}"),
    ):
        factor = global_clip_factor(bundle, clip)
        name = f"grad_clip {clip:g}" + (", as it was set" if override is None else "")
        meaning = (
            f"everything in the step is scaled by {factor:.3g}, ordinary tokens too"
            if factor
            else "the whole step is left out"
        )
        norm = spike.whole.norm * factor if factor else 0.0
        rows.append(spike.row(name, override, meaning, norm, spike.rest.norm * (1 - factor), None))
    return rows


def _of_drop(bundle: Bundle, model: Model, spike: _Spike, notes: list[str]) -> list[Row]:
    if bool(spike.ordinary.all()):
        notes.append("spike_action=drop cannot be computed: the micro-batch has no culprits.")
        return []
    masked = ~spike.ordinary & movable(spike.saved.tokens)
    meaning = "the step without the culprits' gradient, at the price of a search for each spike"
    return [spike.row(DROP, f"{_ACTOR}.spike_action=drop", meaning, spike.rest.norm, 0.0, masked)]


def scaled(norms: Norms, factor: Callable[[str], float]) -> float:
    """The norm of a gradient with each layer scaled; a layer that is scaled by 0 is left out."""
    return math.hypot(*(severity(norm) * factor(layer) for layer, norm in norms.layers.items() if factor(layer)))


def _ratio(norm: float, by: float) -> float | None:
    """The ratio of two norms; None if it is not defined."""
    return norm / by if math.isfinite(norm) and math.isfinite(by) and by > 0 else None
