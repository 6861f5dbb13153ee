# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a bundle's gradients with one model: plain autograd over one row after the other.

Rows are independent of each other, so a micro-batch's gradient is the sum of its rows'. A row is computed without its
padding; packed and padded training differ from that by rounding alone.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..bundles.layout import Row, SavedMicroBatch
from ..bundles.opening import Bundle
from ..measure.micro_batch import MicroBatchName
from .model import Model, forward

# (unit, row in the micro-batch, position in the response).
Place = tuple[MicroBatchName, int, int]


@dataclass(frozen=True)
class Norms:
    """A gradient's norm, and by layer."""

    norm: float
    layers: dict[str, float]


@dataclass
class Measured:
    """What one model gave.

    Args:
        units (dict[MicroBatchName, Norms]): The norm of each micro-batch.
        rests (dict[MicroBatchName, Norms]): The same without its culprits, where it has some.
        tokens (dict[Place, Norms]): The norm ‖g_t‖ of single tokens: of their share of the loss, by their weight.
        whole (Norms | None): The norm of the gradient of all micro-batches, averaged over the ranks; None if the bundle
            does not have all of them.
        log_probs (dict[MicroBatchName, Tensor]): Of shape (rows, response length); 0 outside of the responses.
    """

    units: dict[MicroBatchName, Norms] = field(default_factory=dict)
    rests: dict[MicroBatchName, Norms] = field(default_factory=dict)
    tokens: dict[Place, Norms] = field(default_factory=dict)
    whole: Norms | None = None
    log_probs: dict[MicroBatchName, Tensor] = field(default_factory=dict)


def places(bundle: Bundle, listed: list[dict[str, Any]]) -> list[Place]:
    """Where the tokens of a list (culprits, or `measured`) are, those whose micro-batch the bundle has."""
    found = []
    for token in listed:
        name = token["rank"], token["micro_batch"]
        if name in bundle.rows:
            found.append((name, bundle.row_indices[name][token["row"]], token["position"]))
    return found


def measure(bundle: Bundle, model: Model, tokens: list[Place], culprits: list[Place], rests: bool) -> Measured:
    """Measures a bundle's micro-batches and some of its tokens.

    Args:
        bundle (Bundle): The bundle.
        model (Model): The model; its gradients are cleared.
        tokens (list[Place]): The tokens to measure alone.
        culprits (list[Place]): The tokens without which the rests are measured.
        rests (bool): Whether to measure them.
    """
    found = Measured()
    for name, saved in bundle.micro_batches.items():
        everything = saved.tokens["coefficient"], saved.tokens["entropy_coefficient"]
        found.log_probs[name] = torch.zeros_like(saved.tokens["weight"], dtype=torch.float64)
        found.units[name] = gradient_norms(model, bundle, saved, *everything, into=found.log_probs[name])
        here = [(row, position) for unit, row, position in culprits if unit == name]
        if rests and here:
            without = [coefficient.clone() for coefficient in everything]
            for coefficient in without:
                for row, position in here:
                    coefficient[row, position] = 0.0
            found.rests[name] = gradient_norms(model, bundle, saved, *without)
    for place in tokens:
        found.tokens[place] = _token(model, bundle, place)
    if rests and bundle.event["micro_batches"] == len(bundle.micro_batches):
        found.whole = _whole(model, bundle, found)
    return found


def measure_first(bundle: Bundle, model: Model, token: Place | None) -> Measured:
    """The same of the first micro-batch, and of one token of it, alone."""
    entry = bundle.manifest["micro_batches"][0]
    name = entry["rank"], entry["micro_batch"]
    saved, found = bundle.micro_batches[name], Measured()
    found.log_probs[name] = torch.zeros_like(saved.tokens["weight"], dtype=torch.float64)
    coefficients = saved.tokens["coefficient"], saved.tokens["entropy_coefficient"]
    found.units[name] = gradient_norms(model, bundle, saved, *coefficients, into=found.log_probs[name])
    if token is not None:
        found.tokens[token] = _token(model, bundle, token)
    return found


def _whole(model: Model, bundle: Bundle, found: Measured) -> Norms:
    """The gradient of the mini-batch, averaged over the ranks, if the bundle has all its micro-batches."""
    if len(found.units) == 1:
        (summed,) = found.units.values()
    else:
        model.module.zero_grad(set_to_none=True)
        for saved in bundle.micro_batches.values():
            for index in range(len(saved.rows)):
                coefficients = saved.tokens["coefficient"][index], saved.tokens["entropy_coefficient"][index]
                add_row(model, bundle, saved, index, *coefficients)
        summed = take_norms(model, bundle)
    ranks = bundle.event["world_size"]
    return Norms(summed.norm / ranks, {layer: norm / ranks for layer, norm in summed.layers.items()})


def _token(model: Model, bundle: Bundle, place: Place) -> Norms:
    """A token's gradient, divided by its weight."""
    name, row, position = place
    saved = bundle.micro_batches[name]
    alone = []
    for key in ("coefficient", "entropy_coefficient"):
        coefficient = torch.zeros_like(saved.tokens[key])
        coefficient[row, position] = saved.tokens[key][row, position]
        alone.append(coefficient)
    found = gradient_norms(model, bundle, saved, alone[0], alone[1])
    weight = abs(float(saved.tokens["weight"][row, position])) or math.nan
    return Norms(found.norm / weight, {layer: norm / weight for layer, norm in found.layers.items()})


def gradient_norms(
    model: Model,
    bundle: Bundle,
    saved: SavedMicroBatch,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    into: Tensor | None = None,
) -> Norms:
    """The norms of Σ (∂L/∂log p_t)·∇log p_t, and the same term for the entropies.

    Args:
        model (Model): The model.
        bundle (Bundle): The bundle.
        saved (SavedMicroBatch): The micro-batch.
        coefficient (Tensor): ∂L/∂log p, shape (rows, response length).
        entropy_coefficient (Tensor): The derivative by the entropies, same shape.
        into (Tensor, optional): Where the log-probs of every row are put, same shape. Without it, rows without a
            coefficient, and what follows the last one, are not computed.
    """
    model.module.zero_grad(set_to_none=True)
    for index in range(len(saved.rows)):
        add_row(model, bundle, saved, index, coefficient[index], entropy_coefficient[index], into)
    return take_norms(model, bundle)


def add_row(
    model: Model,
    bundle: Bundle,
    saved: SavedMicroBatch,
    index: int,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    into: Tensor | None = None,
) -> None:
    """Adds the gradient of a row to the parameters' gradients; the arguments are those of `gradient_norms`.

    Args:
        model (Model): The model.
        bundle (Bundle): The bundle.
        saved (SavedMicroBatch): The micro-batch.
        index (int): The row in it.
        coefficient (Tensor): Of this row, shape (response length,).
        entropy_coefficient (Tensor): The same.
        into (Tensor, optional): Of all rows.
    """
    row = saved.rows[index]
    moved = ((coefficient != 0) | (entropy_coefficient != 0))[: row.response_length].nonzero()
    if into is not None and row.response_length:
        stop = row.response_length
    elif len(moved):
        stop = int(moved[-1]) + 1
    else:
        return
    with torch.set_grad_enabled(len(moved) > 0):
        log_prob, entropy = _forward(model, row, stop, bool((entropy_coefficient != 0).any()))
    if into is not None:
        into[index, :stop] = log_prob.detach().double().cpu()
    if len(moved):
        outputs, gradients = [log_prob], [coefficient[:stop]]
        if entropy is not None:
            outputs.append(entropy)
            gradients.append(entropy_coefficient[:stop])
        scale = loss_scale(model, bundle)
        torch.autograd.backward(outputs, [(g * scale).to(o) for g, o in zip(gradients, outputs, strict=True)])


def take_norms(model: Model, bundle: Bundle) -> Norms:
    """The norms of the parameters' gradients, which are cleared."""
    scale = loss_scale(model, bundle)
    norms: dict[str, list[float]] = {layer: [] for layer in model.layer_of.values()}
    for parameter, layer in model.layer_of.items():
        if parameter.grad is not None:
            gradient = parameter.grad if parameter.dtype == torch.float64 else parameter.grad.float()
            norms[layer].append(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / scale)
    model.module.zero_grad(set_to_none=True)
    layers = {layer: math.hypot(*norms_of_parameters) for layer, norms_of_parameters in norms.items()}
    return Norms(math.hypot(*layers.values()), layers)


def loss_scale(model: Model, bundle: Bundle) -> float:
    """What a backward's gradients are multiplied by: half precision would lose small ones without training's scale."""
    return float(bundle.event["loss_scale"]) if model.dtype == torch.float16 else 1.0


def _forward(model: Model, row: Row, response: int, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """The forward of a row, its response cut to a length."""
    length = row.prompt_length + response
    return forward(
        model, row.input_ids[:length], row.position_ids[:length], row.prompt_length, row.temperature, entropy
    )
