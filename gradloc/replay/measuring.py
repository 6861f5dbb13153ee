# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a bundle's gradients with one model: plain autograd over one row after the other.

Rows are independent of each other, so a micro-batch's gradient is the sum of its rows'. A row is computed without its
padding; packed and padded training differ from that by rounding alone.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..bundles.layout import SavedMicroBatch
from ..measure.micro_batch import MicroBatchName
from ..tools.command_line import say
from ..tools.opening import Bundle
from .model import Model, cut_row, forward

# (unit, row in the micro-batch, position in the response).
Place = tuple[MicroBatchName, int, int]
# ∂L/∂log p and the derivative by the entropies, each of shape (rows, response length).
Coefficients = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Norms:
    """A gradient's norm, and by layer."""

    norm: float
    layers: dict[str, float]

    def divided_by(self, number: float) -> "Norms":
        return Norms(self.norm / number, {layer: norm / number for layer, norm in self.layers.items()})


@dataclass
class Measured:
    """What one model gave."""

    units: dict[MicroBatchName, Norms] = field(default_factory=dict)  # of each micro-batch
    rests: dict[MicroBatchName, Norms] = field(default_factory=dict)  # the same without its culprits, if it has some
    tokens: dict[Place, Norms] = field(default_factory=dict)  # of single tokens' share of the loss, by their weight
    # The norms of all micro-batches' gradient, averaged over ranks; None if the bundle does not have all of them.
    whole: Norms | None = None
    # Each of shape (rows, response length); 0 outside of the responses.
    log_probs: dict[MicroBatchName, Tensor] = field(default_factory=dict)


def places(bundle: Bundle, listed: Sequence[Mapping[str, Any]]) -> list[Place]:
    """Where the tokens of a list (culprits, or `measured`) are, those whose micro-batch the bundle has."""
    found = []
    for token in listed:
        name = token["rank"], token["micro_batch"]
        if name in bundle.rows:
            found.append((name, bundle.row_indices[name][token["row"]], token["position"]))
    return found


def coefficients_of(saved: SavedMicroBatch, keep: Tensor | None = None) -> Coefficients:
    """Those of a micro-batch; 0 where `keep`, bool of the same shape, is false."""
    found = saved.tokens["coefficient"], saved.tokens["entropy_coefficient"]
    return found if keep is None else (torch.where(keep, found[0], 0.0), torch.where(keep, found[1], 0.0))


def all_but(saved: SavedMicroBatch, name: MicroBatchName, culprits: Collection[Place]) -> Tensor:
    """Which tokens of a micro-batch are not among these, bool of shape (rows, response length)."""
    keep = torch.ones_like(saved.tokens["weight"], dtype=torch.bool)
    for unit, row, position in culprits:
        if unit == name:
            keep[row, position] = False
    return keep


def measure(
    bundle: Bundle,
    model: Model,
    tokens: Sequence[Place],
    culprits: Sequence[Place] | None = None,
    names: Sequence[MicroBatchName] | None = None,
) -> Measured:
    """Measures a bundle's micro-batches and some of its tokens.

    Args:
        model (Model): The model; its gradients are cleared.
        tokens (Sequence[Place]): The tokens to measure alone.
        culprits (Sequence[Place], optional): The tokens without which the rests are measured; without it, neither these
            are nor the whole gradient.
        names (Sequence[MicroBatchName], optional): The micro-batches to measure; all by default.
    """
    found = Measured()
    wanted = list(bundle.micro_batches) if names is None else names
    for number, name in enumerate(wanted, 1):
        say(f"micro-batch, {number} of {len(wanted)}")
        saved = bundle.micro_batches[name]
        found.log_probs[name] = torch.zeros_like(saved.tokens["weight"], dtype=torch.float64)
        found.units[name] = gradient_norms(model, saved, coefficients_of(saved), into=found.log_probs[name])
        keep = all_but(saved, name, culprits or ())
        if not keep.all():
            found.rests[name] = gradient_norms(model, saved, coefficients_of(saved, keep))
    for number, place in enumerate(tokens, 1):
        say(f"token alone, {number} of {len(tokens)}")
        found.tokens[place] = _token(model, bundle, place)
    if culprits is not None and bundle.event["micro_batches"] == len(bundle.micro_batches):
        for saved in bundle.micro_batches.values():
            add_rows(model, saved, coefficients_of(saved))
        found.whole = take_norms(model).divided_by(bundle.event["world_size"])
    return found


def _token(model: Model, bundle: Bundle, place: Place) -> Norms:
    """A token's gradient, divided by its weight."""
    name, row, position = place
    saved = bundle.micro_batches[name]
    alone = gradient_norms(model, saved, coefficients_of(saved, ~all_but(saved, name, [place])))
    return alone.divided_by(abs(float(saved.tokens["weight"][row, position])) or math.nan)


def gradient_norms(
    model: Model, saved: SavedMicroBatch, coefficients: Coefficients, into: Tensor | None = None
) -> Norms:
    """The norms of Σ (∂L/∂log p_t)·∇log p_t, and the same term for the entropies.

    Args:
        model (Model): The model; its gradients are cleared.
        into (Tensor, optional): Where the log-probs of every row are put, shape (rows, response length). Without it,
            rows without a coefficient, and what follows the last one, are not computed.
    """
    model.module.zero_grad(set_to_none=True)
    add_rows(model, saved, coefficients, into)
    return take_norms(model)


def add_rows(
    model: Model,
    saved: SavedMicroBatch,
    coefficients: Coefficients,
    into: Tensor | None = None,
    only: Collection[int] | None = None,
) -> None:
    """Adds the gradient of a micro-batch, or of only these rows, to the parameters' gradients; see `gradient_norms`."""
    for index, row in enumerate(saved.rows):
        coefficient, of_entropy = (values[index, : row.response_length] for values in coefficients)
        moved = ((coefficient != 0) | (of_entropy != 0)).nonzero()
        stop = int(moved[-1]) + 1 if len(moved) else 0
        if into is not None:
            stop = row.response_length
        if not stop or (only is not None and index not in only):
            continue
        with torch.set_grad_enabled(len(moved) > 0):
            log_prob, entropy = forward(model, cut_row(row, stop), bool((of_entropy != 0).any()))
        if into is not None:
            into[index, :stop] = log_prob.detach().double().cpu()
        if len(moved):
            pairs = [(log_prob, coefficient)] + ([] if entropy is None else [(entropy, of_entropy)])
            gradients = [(values[:stop] * model.loss_scale).to(output) for output, values in pairs]
            torch.autograd.backward([output for output, _ in pairs], gradients)


def take_norms(model: Model) -> Norms:
    """The norms of the parameters' gradients, which are cleared."""
    norms: dict[str, list[float]] = {layer: [] for layer in model.layer_of.values()}
    for parameter, layer in model.layer_of.items():
        if parameter.grad is not None:
            norm = float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
            norms[layer].append(norm / model.loss_scale)
    model.module.zero_grad(set_to_none=True)
    layers = {layer: math.hypot(*norms_of_parameters) for layer, norms_of_parameters in norms.items()}
    return Norms(math.hypot(*layers.values()), layers)
