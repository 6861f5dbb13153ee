# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each remedy would have left of a spike, and what it would have cost the ordinary tokens.

A remedy gives other coefficients ∂L/∂log p, so its gradient is one more backward pass from the log-probs. The ordinary
tokens are all but the culprits. How far their gradient moves is a pass with the differences of their coefficients.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..measure.micro_batch import movable
from ..threshold import is_over
from ..tools.command_line import say
from ..tools.figures import severity
from ..tools.opening import Bundle
from .advice import MOST_MOVED
from .measuring import Coefficients, Measured, Norms, all_but, coefficients_of, gradient_norms, places
from .model import HALF, Model
from .token_clip import clip_tokens

_SKIPS = "It moves the ordinary tokens' gradient by over half, so for them it is a skipped step."

_ACTOR = "actor_rollout_ref.actor"
DROP = "spike_action=drop"
# The tighter global clip is this part of the one that the run had.
_TIGHTER = 0.1

Row = dict[str, Any]


class _Spike:
    """The micro-batch whose gradient is compared, a bundle's first one, of which `measure` gave this."""

    def __init__(self, bundle: Bundle, measured: Measured) -> None:
        name = bundle.first
        self.bundle, self.saved = bundle, bundle.micro_batches[name]
        self.whole = measured.units[name]  # its gradient
        self.rest = measured.rests.get(name, self.whole)  # that of its ordinary tokens
        # Which tokens are ordinary, bool of shape (rows, response length).
        self.ordinary = all_but(self.saved, name, places(bundle, bundle.event["culprits"]))

    def row(
        self,
        name: str,
        override: str | None,
        meaning: str,
        norm: float,
        moved: float,
        masked: Tensor | None = None,
        note: str | None = None,
        as_set: bool = False,
    ) -> Row:
        """A row of the table.

        Args:
            override (str, optional): The Hydra overrides that turn it on; None for the loss as it was.
            meaning (str): What it does.
            moved (float): The norm by which the ordinary tokens' gradient moves.
            masked (Tensor, optional): The tokens that have no coefficient any more, bool; None for none.
            note (str, optional): In what the figures may differ from a run with it.
            as_set (bool): Whether the run had it.
        """
        masked = torch.zeros_like(self.ordinary) if masked is None else masked
        ordinary_moved = _ratio(moved, self.rest.norm)
        if ordinary_moved is not None and ordinary_moved > MOST_MOVED:
            note = " ".join(filter(None, (note, _SKIPS)))
        return {
            "name": f"{name}, as it was set" if as_set else name,
            "norm": norm,
            "left": _ratio(norm, self.whole.norm),
            "under": not is_over(norm, float(self.bundle.manifest["micro_batches"][0]["threshold"])),
            "ordinary_moved": ordinary_moved,
            "masked": {"tokens": int(masked.sum()), "culprits": int((masked & ~self.ordinary).sum())},
            "override": None if as_set else override,
            "meaning": meaning,
            "note": note,
        }


def remedies_so_far(bundle: Bundle, model: Model, measured: Measured) -> Iterator[tuple[list[Row], list[str]]]:
    """The table of remedies for a bundle's first micro-batch, best first; again after each row, and at the end.

    Args:
        model (Model): The model; its gradients are cleared.
        measured (Measured): What `measure` gave with it, with the rests.

    Yields:
        tuple: The rows, and sentences on what cannot be computed.
    """
    spike = _Spike(bundle, measured)
    notes: list[str] = []
    rows: list[Row] = []
    for row in chain(_of_verl(spike, model, notes), _of_token_clip(spike, model, notes), _without_pass(spike, notes)):
        rows.append(row)
        yield sorted(rows, key=rank), [*notes]
    notes.append(
        "Advantages without the division by the standard deviation (algorithm.norm_adv_by_std_in_grpo=False) cannot be "
        "computed: the bundle does not have the rewards of the group."
    )
    yield sorted(rows, key=rank), notes


def remedies_without_pass(bundle: Bundle, measured: Measured) -> list[Row]:
    """The rows of the table that can be told of what `measure` gave, best first."""
    return sorted(_without_pass(_Spike(bundle, measured), []), key=rank)


def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows are sorted by, the best first.

    Those that move the ordinary tokens' gradient by over half, or by nobody knows how much, come last. Before them, and
    among them, those come first that bring the micro-batch under its threshold. Of these, those come first that move
    the ordinary tokens' gradient least, in whole percent, and `drop`, which searches for the culprits of every spike,
    after others that move it as little. The others are in the order of the norms that are left.
    """
    moved = math.inf if row["ordinary_moved"] is None else severity(row["ordinary_moved"])
    skips = not moved <= MOST_MOVED
    moved = round(moved, 2) if math.isfinite(moved) else math.inf
    norm = severity(row["norm"])
    if not row["under"]:
        return skips, True, norm, moved, row["name"]
    return skips, False, moved, row["name"] == DROP, norm, row["name"]


def _of_verl(spike: _Spike, model: Model, notes: list[str]) -> Iterator[Row]:
    """Other losses and rollout corrections: verl's own functions, where it is installed."""
    try:
        from .remedy_losses import NotTheRecordedLossError, loss_remedies
    except ImportError as error:
        reason = "is not installed" if find_spec("verl") is None else f"cannot be imported ({error})"
        notes.append(f"verl {reason} here, so its policy losses and rollout corrections are left out.")
        return
    manifest, tokens = spike.bundle.manifest, spike.saved.tokens
    version = manifest["versions"].get("verl")
    try:
        found, more = loss_remedies(
            manifest["actor"], tokens, manifest["dtype"] in HALF, version if isinstance(version, str) else None
        )
    except NotTheRecordedLossError as error:
        notes.append(f"{error} So policy losses and rollout corrections are left out.")
        return
    notes += more
    measured: dict[bytes, tuple[float, float]] = {}
    for number, remedy in enumerate(found, 1):
        say(f"remedy {remedy.name}, {number} of {len(found) + 1}")
        values: Coefficients = remedy.coefficient, remedy.entropy_coefficient
        key = b"".join(tensor.contiguous().numpy().tobytes() for tensor in values)
        if key not in measured:
            measured[key] = _left_and_moved(spike, model, values)
        now = {"weight": tokens["weight"], "coefficient": values[0], "entropy_coefficient": values[1]}
        masked = movable(tokens) & ~movable(now)
        yield spike.row(remedy.name, remedy.override, remedy.meaning, *measured[key], masked, remedy.note)
    say(f"remedy TokenClip, {len(found) + 1} of {len(found) + 1}")


def _left_and_moved(spike: _Spike, model: Model, values: Coefficients) -> tuple[float, float]:
    """The norm with other coefficients, and the norm by which the ordinary tokens' gradient moves."""
    pairs = zip(values, coefficients_of(spike.saved), strict=True)
    move, of_entropy = (torch.where(spike.ordinary, new - old, 0.0) for new, old in pairs)
    left = gradient_norms(model, spike.saved, values).norm
    return left, gradient_norms(model, spike.saved, (move, of_entropy)).norm


def _of_token_clip(spike: _Spike, model: Model, notes: list[str]) -> Iterator[Row]:
    bundle, bounds = spike.bundle, spike.bundle.manifest["clips"]["token_clip"]
    enable = f"{_ACTOR}.token_clip.enable=True"
    if bounds is None or not any(bounds["usual"].values()):
        notes.append(_unknown("TokenClip", bundle, "token_clip", f"{enable} {_ACTOR}.token_clip.action=log"))
        return
    found = clip_tokens(model, spike.saved, spike.ordinary, bounds, float(bundle.event["loss_scale"]) != 1)
    if found is None:
        notes.append("TokenClip cannot be computed: its bounds are of other layers than this model has.")
        return
    meaning = f"signals over {bounds['factor']:g} times the usual largest one are cut"
    if found.boundary is not None:
        meaning += f", first at {found.boundary}"
    said = []
    if found.refused:
        said.append(f"At {', '.join(found.refused)}, more than max_share are over the bound, so none is cut there.")
    if found.prompt_positions:
        said.append(f"{found.prompt_positions:,} positions of prompts are cut as well.")
    figures = found.gradient.norm, found.moved.norm, found.positions, " ".join(said) or None
    override = f"{enable} {_ACTOR}.token_clip.action=drop"
    yield spike.row("TokenClip", override, meaning, *figures, as_set=bounds["action"] != "log")


def _without_pass(spike: _Spike, notes: list[str]) -> Iterator[Row]:
    """LayerClip, the global clip, and the step without culprits: they only scale what was measured."""
    bundle, whole, rest = spike.bundle, spike.whole, spike.rest
    override = f"{_ACTOR}.layer_clip.enable=True"
    factors = _layer_clip_factors(bundle, whole)
    if factors is None:
        notes.append(_unknown("LayerClip", bundle, "layer_clip", override))
    else:
        left, moved = _scaled(whole, factors.__getitem__), _scaled(rest, lambda layer: 1 - factors[layer])
        tightest = min(factors, key=lambda layer: factors[layer])
        meaning = f"each layer is scaled by its own factor, {tightest} by {factors[tightest]:.3g}"
        as_set = _setting(bundle, "layer_clip", "enable") is True
        yield spike.row("LayerClip", override, meaning, left, moved, as_set=as_set)
    clip, norm = float(bundle.manifest["grad_clip"] or math.inf), float(bundle.event["global_norm"])
    for bound in (clip, clip * _TIGHTER) if math.isfinite(clip) else ():
        factor = 0.0 if not math.isfinite(norm) else min(1.0, bound / norm) if norm else 1.0
        meaning = f"everything in the step is scaled by {factor:.3g}, ordinary tokens too"
        meaning, left = (meaning, whole.norm * factor) if factor else ("the whole step is left out", 0.0)
        moved, setting = rest.norm * (1 - factor), f"{_ACTOR}.grad_clip={bound:g}"
        yield spike.row(f"grad_clip {bound:g}", setting, meaning, left, moved, as_set=bound == clip)
    if not spike.ordinary.all():
        masked = ~spike.ordinary & movable(spike.saved.tokens)
        meaning = "the step without the culprits' gradient, at the price of a search for each spike"
        yield spike.row(DROP, f"{_ACTOR}.spike_action=drop", meaning, rest.norm, 0.0, masked)
    else:
        notes.append("spike_action=drop cannot be computed: the micro-batch has no culprits.")


def _unknown(name: str, bundle: Bundle, key: str, override: str) -> str:
    """Why a clip whose bounds are not known has no row."""
    steps = _setting(bundle, key, "warmup_steps")
    steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else 20
    return (
        f"{name}: unknown until it has run {steps} steps, from which it learns its bounds; the bundle has none. To "
        f"learn them: {override}"
    )


def _setting(bundle: Bundle, key: str, name: str) -> Any:
    """A setting of a clip in the recorded configuration, which may have any form; None without it."""
    settings = bundle.manifest["actor"].get(key)
    return settings.get(name) if isinstance(settings, dict) else None


def _layer_clip_factors(bundle: Bundle, unit: Norms) -> dict[str, float] | None:
    """LayerClip's factor for each layer in that step, by its own bounds; None if these are not known.

    Args:
        unit (Norms): The gradient of its first micro-batch.
    """
    # Earlier versions wrote it into the event, where it was on.
    step = bundle.manifest["clips"]["layer_clip"] or bundle.event["layer_clip"]
    if not step or all(layer["bound"] is None for layer in step.values()):
        return None
    factors = {layer: float(figures["factor"]) for layer, figures in step.items()}
    return {**factors, **dict.fromkeys(unit.layers - factors.keys(), 1.0)}


def _scaled(norms: Norms, factor: Callable[[str], float]) -> float:
    """The norm of a gradient with each layer scaled; a layer that is scaled by 0 is left out."""
    return math.hypot(*(severity(norm) * factor(layer) for layer, norm in norms.layers.items() if factor(layer)))


def _ratio(norm: float, by: float) -> float | None:
    """The ratio of two norms; None if it is not defined."""
    return norm / by if math.isfinite(norm) and math.isfinite(by) and by > 0 else None
