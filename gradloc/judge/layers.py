# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every update's layers: have optimizer steps written their weights, and passes their gradient?"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from ..lines import RunWarning
from ..sources import LAYER_FRACTION, layer_shares
from .loss import CLEAR, LOSS_SCALE
from .progress import IN_A_ROW, SEE, Progress, RunCheck, as_warning
from .shares import is_unlike_its_like, is_unusual, percent

LAYER = "layer"  # the rule's name, and the warnings'
# An optimizer step hardly moves a weight by so many times its learning rate; and by which part of a layer's norm more
# than that is said, for so many steps.
WEIGHT_MOVE, WEIGHT_PART, WEIGHT_STEPS = 10.0, 0.05, 5
# Usual shares of the gradient's squared norm are means over about so many updates.
_UPDATES = 8


class LayerChecks(RunCheck):
    """The checks of layers, in the first mini-batch of each update."""

    NOW = ("_gradients_now", "_beyond")

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        # By layer the norm of its weights before the last optimizer step. And the last warning of weights that were
        # written, and in how many updates it was said.
        self._weights: dict[str, float] = {}
        self._written: tuple[RunWarning, int] | None = None
        # By layer its usual share of the gradient's squared norm, the mean of so many updates; and the share now.
        self._gradients: dict[str, float] = {}
        self._gradient_updates = 0
        self._gradients_now: dict[str, float] = {}
        # The warning of a gradient that is more than the passes gave.
        self._beyond: RunWarning | None = None
        # The layer that carries the gradient, since which step, and in how many updates in a row; and its usual share
        # before that, None where too few updates are known.
        self._carrying: tuple[str, int | None, int] | None = None
        self._share_before: float | None = None

    def take_in(
        self,
        weights: Mapping[str, tuple[float, int]],
        gradient: Mapping[str, float],
        passes: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Takes an update's first mini-batch, before its optimizer step.

        Args:
            weights (Mapping): By layer the norm of its weights, and their number.
            gradient (Mapping): By layer the norm of the gradient that the optimizer gets.
            passes (Mapping): By layer the sum of the micro-batches' gradient norms, a mean over the ranks; zeros where
                they were not measured.
        """
        if (warning := self._find_written(weights)) is not None:
            self._written = warning, 0
        self._weights = {name: norm for name, (norm, _) in weights.items()}
        self._beyond = self._find_beyond(gradient, passes)
        self._gradients_now = layer_shares(gradient)
        if self._gradients_now:
            layer, before = self._find_carrying(), self._carrying
            if layer is None:
                self._carrying = None
            elif before is not None and before[0] == layer:
                self._carrying = (*before[:2], before[2] + 1)
            else:
                self._carrying = layer, self._progress.step, 1
                self._share_before = self._usual(layer)

    def warnings(self) -> list[RunWarning]:
        """Of this update, one at most."""
        found = self._beyond if self._written is None else self._written[0]
        if found is None and self._gradients_now and self._carrying is not None and self._carrying[2] >= IN_A_ROW:
            found = self._carries(*self._carrying[:2])
        return [] if found is None else [found]

    def end_update(self) -> None:
        """Takes the update's figures into what later ones are compared with."""
        if self._written is not None:
            warning, times = self._written
            self._written = (warning, times + 1) if times + 1 < WEIGHT_STEPS else None
        # Once a layer that carries it has been told, its share becomes the usual one: it may be as it should be.
        if self._gradients_now and (self._carrying is None or self._carrying[2] >= IN_A_ROW):
            self._gradient_updates = min(self._gradient_updates + 1, _UPDATES)
            for name, share in self._gradients_now.items():
                usual = self._gradients.get(name, 0.0)
                self._gradients[name] = usual + (share - usual) / self._gradient_updates
        self._gradients_now, self._beyond = {}, None

    def _find_carrying(self) -> str | None:
        """The layer that makes most of the gradient, and did not before; None if there is none.

        Where too few updates are known, it has to make far more of it than each other block of the model.
        """
        name = max(self._gradients_now, key=self._gradients_now.__getitem__)
        share = self._gradients_now[name]
        if share <= LAYER_FRACTION:
            return None
        usual = self._usual(name)
        is_new = is_unlike_its_like(name, self._gradients_now) if usual is None else is_unusual(share, usual)
        return name if is_new else None

    def _usual(self, layer: str) -> float | None:
        """A layer's usual share; None where too few updates are known."""
        return self._gradients.get(layer, 0.0) if self._gradient_updates >= IN_A_ROW else None

    def _carries(self, layer: str, step: int | None) -> RunWarning:
        share = percent(self._gradients_now[layer])
        since = "" if step is None else f" since step {step}"
        before = self._share_before
        usual = "far more than every other block" if before is None else f"{percent(before)} before"
        return as_warning(
            LAYER,
            f"The layer {layer} carries {share} of the gradient's squared norm{since}, {usual}",
            ": look at this layer's backward pass (kernels, hooks, scaling), and at losses that are added there.",
            "Take one step from a checkpoint with plain kernels (attn_implementation=eager, "
            "use_fused_kernels=False), and compare this layer's gradient norm. " + SEE.format("kernel"),
        )

    def _find_beyond(self, gradient: Mapping[str, float], passes: Mapping[str, float]) -> RunWarning | None:
        """Layers whose gradient is larger than the sum of what it is made of, which no sum of vectors is."""
        known = [name for name in gradient if 0 < passes.get(name, 0.0) < math.inf]
        times = {
            name: gradient[name] / passes[name] for name in known if CLEAR * passes[name] < gradient[name] < math.inf
        }
        if not times:
            return None
        is_whole = len(times) == len(known)
        layer = (min if is_whole else max)(times, key=times.__getitem__)
        what = "The optimizer's gradient" if is_whole else f"The optimizer's gradient in the layer {layer}"
        return as_warning(
            LOSS_SCALE if is_whole else LAYER,
            f"{what} is at least {times[layer]:.3g} times what the backward passes of all ranks add up to",
            ": something multiplies it, or adds to it, after them. Look at hooks on parameters, at gradients that "
            "are left from before (zero_grad), and at how the ranks' gradients are reduced.",
            "On one rank with one micro-batch, compare the norm of a parameter's `grad` right after the backward "
            "pass with that before the optimizer step.",
        )

    def _find_written(self, weights: Mapping[str, tuple[float, int]]) -> RunWarning | None:
        """Layers whose weights are others than the last update and its optimizer steps can have left."""
        written = {}
        for layer, (norm, count) in weights.items():
            before = self._weights.get(layer, 0.0)
            if 0 < before < math.inf:
                most = max(WEIGHT_PART * before, WEIGHT_MOVE * self._progress.last_rates * math.sqrt(count))
                if not abs(norm - before) <= most:
                    written[layer] = norm / before
        if not written:
            return None
        most_changed = {name: abs(math.log(x or 1e-9)) if x < math.inf else math.inf for name, x in written.items()}
        layer = max(most_changed, key=lambda name: most_changed[name])
        times = written[layer]
        count = len(written) - 1
        others = f", and those of {count} other layer{'s' * (count > 1)}," if count else ""
        when = "" if self._progress.step is None else f" before step {self._progress.step}"
        how = f"their norm is {times:.3g} times what it was" if math.isfinite(times) else "they are NaN or infinite"
        return as_warning(
            LAYER,
            f"The weights of {layer}{others} changed{when} by more than an optimizer step should change them",
            f": {how}. Look at the optimizer (its state after a resume, its precision, weight decay), and at what "
            "else writes weights: a loaded checkpoint, offloading, merging an adapter, an average of weights, a "
            "faulty device.",
            "Compare this layer's weights with those of the checkpoint before that step, parameter by parameter. "
            + SEE.format("bitflip"),
        )
