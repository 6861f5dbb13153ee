# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What TokenClip would have left of a micro-batch's gradient.

A position's backward signal is the norm of the gradient with respect to its hidden state, at the embedding's output and
at every decoder layer's output; at the log-probs it is |∂L/∂log p|. Where it is over a bound, it is multiplied by 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..bundles.layout import SavedMicroBatch
from ..token_clip.boundaries import find_boundaries
from ..token_clip.watched_pass import LOG_PROBS
from .measuring import Norms, add_row, coefficients_of, take_norms
from .model import Model

# A signal is cut if it is over so many times the largest one of ordinary tokens: TokenClip's own default.
FACTOR = 4.0


@dataclass(frozen=True)
class Cut:
    """What is left, and what it costs.

    Args:
        gradient (Norms): The gradient with the signals cut.
        moved (Norms): How far the ordinary tokens' gradient moves.
        positions (Tensor): The response positions with a signal that was cut, bool of shape (rows, response length).
        prompt_positions (int): How many positions of prompts there are besides.
        boundary (str | None): The first boundary, in the order of the backward pass, where one was cut.
    """

    gradient: Norms
    moved: Norms
    positions: Tensor
    prompt_positions: int
    boundary: str | None


def clip_tokens(model: Model, saved: SavedMicroBatch, ordinary: Tensor) -> Cut | None:
    """The gradient with each signal cut that is over `FACTOR` times the largest one of ordinary tokens.

    Args:
        model (Model): The model; its gradients are cleared.
        saved (SavedMicroBatch): The micro-batch.
        ordinary (Tensor): Which tokens are ordinary, bool of shape (rows, response length).

    Returns:
        Cut | None: None if the model's decoder layers are not known, or no ordinary token has a gradient.
    """
    modules = find_boundaries(model.module)
    coefficient, entropy = coefficients_of(saved)
    alone = coefficients_of(saved, ordinary)
    if not modules or not any(bool((values != 0).any()) for values in alone):
        return None
    largest: dict[str, float] = {}
    for index, row in enumerate(saved.rows):
        # Of the hidden states whose next token is a culprit: what amplifies it is there.
        culprits = torch.nonzero(~ordinary[index]).flatten() + row.prompt_length - 1
        with _hooked(modules, partial(_raise, largest, culprits)):
            add_row(model, saved, index, alone)
    model.module.zero_grad(set_to_none=True)
    bounds = {name: FACTOR * value for name, value in largest.items()}

    # At the log-probs, a position's signal is its own coefficient.
    over = ~(coefficient.abs() <= FACTOR * float(alone[0].abs().max()))
    kept = torch.where(over, 0.0, coefficient), entropy
    cuts: list[dict[str, Tensor]] = [{} for _ in saved.rows]
    for index, of_row in enumerate(cuts):
        with _hooked(modules, partial(_over, bounds, of_row)):
            add_row(model, saved, index, kept)
    gradient = take_norms(model)

    left, opposite = (torch.where(over, 0.0, alone[0]), alone[1]), (-alone[0], -alone[1])
    changed = (left[0] != alone[0]).any(-1).tolist()
    for index, of_row in enumerate(cuts):
        if of_row or changed[index]:
            with _hooked(modules, partial(_again, of_row)):
                add_row(model, saved, index, left)
            add_row(model, saved, index, opposite)
    moved = take_norms(model)

    positions, prompt = over & (coefficient != 0), 0
    where = {LOG_PROBS} if bool(positions.any()) else set()
    for index, of_row in enumerate(cuts):
        where |= of_row.keys()
        for cut in of_row.values():
            places = torch.nonzero(cut).flatten() - (saved.rows[index].prompt_length - 1)
            prompt += int((places < 0).sum())
            positions[index, places[places >= 0]] = True
    order = [LOG_PROBS, *reversed(modules)]
    return Cut(gradient, moved, positions, prompt, next((name for name in order if name in where), None))


def _raise(largest: dict[str, float], without: Tensor, name: str, signal: Tensor) -> None:
    """Notes a boundary's largest signal, some positions left out."""
    signal = signal.clone()
    signal[without[(0 <= without) & (without < len(signal))].to(signal.device)] = 0.0
    largest[name] = max(largest.get(name, 0.0), float(signal.max()))


def _over(bounds: dict[str, float], cuts: dict[str, Tensor], name: str, signal: Tensor) -> Tensor | None:
    """Which positions of a row are over the bound; None if none is. NaN counts as over."""
    over = ~(signal <= bounds.get(name, 0.0)) & (signal != 0)
    if not bool(over.any()):
        return None
    cuts[name] = over.cpu()
    return over


def _again(cuts: dict[str, Tensor], name: str, signal: Tensor) -> Tensor | None:
    """The cut of another pass, which may have gone on further in the row."""
    return cuts[name][: len(signal)] if name in cuts else None


@contextmanager
def _hooked(modules: dict[str, nn.Module], look: Any) -> Iterator[None]:
    """Calls `look(name, signal)` for each boundary in a backward, with signals of shape (length,).

    Where it returns a mask of that shape, the gradient of these positions becomes 0.
    """

    def on_forward(name: str) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: on_backward(name, gradient))

        return hook

    def on_backward(name: str, gradient: Tensor) -> Tensor | None:
        signal = torch.linalg.vector_norm(gradient[0].float(), dim=-1)
        cut = look(name, signal)
        return None if cut is None else gradient.masked_fill(cut.to(gradient.device)[None, :, None], 0.0)

    handles = [module.register_forward_hook(on_forward(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
