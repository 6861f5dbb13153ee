# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What TokenClip would have left of a micro-batch's gradient.

The rule and its bounds are those of training; a replay's passes have one row, without padding.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..bundles.layout import SavedMicroBatch
from ..token_clip.token_clip import find_boundaries, row_weights
from ..token_clip.watched_pass import LOG_PROBS, cut, is_over
from .measuring import Norms, add_rows, coefficients_of, take_norms
from .model import Model


@dataclass(frozen=True)
class Cut:
    """What is left, and what it costs."""

    gradient: Norms  # with the signals cut
    moved: Norms  # how far the ordinary tokens' gradient moves
    positions: Tensor  # those of responses with a signal that was cut, bool of shape (rows, response length)
    prompt_positions: int  # how many positions of prompts there are besides
    boundary: str | None  # the first, in the order of the backward pass, where one was cut
    refused: list[str]  # the boundaries with too many signals over the bound for any to be cut


# Which signals at a boundary are cut, and all their values, of the same shape.
_Where = tuple[Tensor, Tensor]


def clip_tokens(
    model: Model, saved: SavedMicroBatch, ordinary: Tensor, bounds: Mapping[str, Any], scaled: bool
) -> Cut | None:
    """The gradient of a micro-batch with TokenClip on.

    Args:
        model (Model): The model; its gradients are cleared.
        ordinary (Tensor): Which tokens are ordinary, bool of shape (rows, response length).
        bounds (Mapping): What `TokenClip.bounds_in_force` returned, checked by `open_bundle`. Its `limit` is taken to
            be open: earlier micro-batches may have used some of it.
        scaled (bool): Whether the loss was scaled in training.

    Returns:
        Cut | None: None if the model's boundaries are not those of the bounds.
    """
    modules = find_boundaries(model.module)
    if {*modules, LOG_PROBS} != set(bounds["usual"]):
        return None
    order, scaling = [LOG_PROBS, *reversed(modules)], 1 / row_weights(saved.tokens["weight"])
    coefficient, of_entropy = coefficients_of(saved)
    refused: list[str] = []
    while True:
        # Whether a boundary is refused depends on what was cut before it, so they are refused one after the other.
        clip = _Clip(bounds, scaling, model.loss_scale, scaled, refused)
        # There, a position's signal is its own coefficient.
        at_log_probs = clip.over(LOG_PROBS, coefficient.abs() * scaling.unsqueeze(1))
        kept = clip.cut(LOG_PROBS, coefficient, at_log_probs)
        for index in range(len(saved.rows)):
            with _hooked(modules, partial(clip.see, index)):
                add_rows(model, saved, (kept, of_entropy), only=[index])
        gradient = take_norms(model)
        too_many = next((name for name in order if clip.counts[name] > bounds["limit"] and name not in refused), None)
        if too_many is None:
            break
        refused.append(too_many)

    alone = coefficients_of(saved, ordinary)
    left, opposite = (clip.cut(LOG_PROBS, alone[0], at_log_probs), alone[1]), (-alone[0], -alone[1])
    changed = (left[0] != alone[0]).any(-1).tolist()
    for index in range(len(saved.rows)):
        if changed[index] or any(row == index for row, _ in clip.cuts):
            with _hooked(modules, partial(clip.again, index)):
                add_rows(model, saved, left, only=[index])
            add_rows(model, saved, opposite, only=[index])
    moved = take_norms(model)

    positions, prompt = at_log_probs[0] & (coefficient != 0), 0
    where = {name for _, name in clip.cuts} | ({LOG_PROBS} if bool(positions.any()) else set())
    for (index, _), (over, _) in clip.cuts.items():
        places = torch.nonzero(over).flatten().cpu() - (saved.rows[index].prompt_length - 1)
        prompt += int((places < 0).sum())
        positions[index, places[(0 <= places) & (places < positions.shape[1])]] = True
    return Cut(gradient, moved, positions, prompt, next((name for name in order if name in where), None), refused)


class _Clip:
    """TokenClip's rule for the rows of a micro-batch, with some boundaries `refused`, at which nothing is cut."""

    def __init__(
        self, bounds: Mapping[str, Any], scaling: Tensor, loss_scale: float, scaled: bool, refused: list[str]
    ) -> None:
        self._action = "drop" if bounds["action"] == "log" else bounds["action"]
        self._bounds = {name: bounds["factor"] * usual for name, usual in bounds["usual"].items() if usual}
        self._scaling, self._loss_scale, self._scaled = scaling, loss_scale, scaled
        self._refused = {*refused}
        self.counts: Counter[str] = Counter()  # how many signals were over the bound, by boundary
        self.cuts: dict[tuple[int, str], _Where] = {}  # by row and boundary below the log-probs, what was cut

    def over(self, name: str, signal: Tensor) -> _Where:
        """Counts the signals over a boundary's bound, and says which are cut."""
        bound = self._bounds.get(name)
        over = torch.zeros_like(signal, dtype=torch.bool) if bound is None else is_over(signal, bound, self._scaled)
        self.counts[name] += int(over.sum())
        return over & (name not in self._refused), signal

    def cut(self, name: str, gradient: Tensor, where: _Where) -> Tensor:
        """What is left of a gradient."""
        return cut(gradient, where[1], self._bounds.get(name, 1.0), where[0], self._action)

    def see(self, row: int, name: str, gradient: Tensor) -> Tensor | None:
        """What replaces the gradient of a row's hidden states, shape (1, positions, hidden); None to leave it."""
        if name not in self._bounds:
            return None
        norms = torch.linalg.vector_norm(gradient[0].float(), dim=-1)
        found = self.over(name, norms / self._loss_scale * float(self._scaling[row]))
        if not bool(found[0].any()):
            return None
        self.cuts[row, name] = found
        return self.again(row, name, gradient)

    def again(self, row: int, name: str, gradient: Tensor) -> Tensor | None:
        """The same cut of another pass of that row, which may be shorter."""
        if (found := self.cuts.get((row, name))) is None:
            return None
        over, signal = (values[: gradient.shape[1], None] for values in found)
        return self.cut(name, gradient, (over, signal))


@contextmanager
def _hooked(modules: dict[str, nn.Module], look: Any) -> Iterator[None]:
    """Calls `look(name, gradient)` for each boundary in a backward; what it returns replaces the gradient."""

    def hook(name: str, _: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(partial(look, name))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_hook(partial(hook, name)))
        yield
