# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Two published adaptive clips, implemented from their papers. stability.py compares LayerClip with them.

Both look at norms before verl's grad_clip, which still applies after them. A gradient that is exactly zero is left out
of their statistics, as in LayerClip. Otherwise the smallest norm of AdaGC's warm-up would be zero, and the tensor would
never be updated again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean, pvariance

import torch
from torch import Tensor


class AdaGC:
    """AdaGC (arXiv 2502.11034): each tensor is clipped against the moving average of its own clipped norms.

    In the warm-up the whole gradient is clipped to one norm, and a tensor's average is the smallest norm that it had
    after that. From then on a tensor's norm is at most `ratio` times its average.

    Args:
        warmup_clip (float): The global norm of the warm-up.
        warmup_steps (int): Optimizer steps of the warm-up.
        ratio (float): λ_rel of the paper.
        beta (float): Decay of the average for each optimizer step.
    """

    def __init__(self, warmup_clip: float, warmup_steps: int, ratio: float = 1.05, beta: float = 0.98) -> None:
        self.warmup_clip, self.warmup_steps, self.ratio, self.beta = warmup_clip, warmup_steps, ratio, beta
        self.steps = 0
        self.averages: dict[int, float] = {}

    @torch.no_grad()
    def clip(self, gradients: Iterable[Tensor]) -> float:
        """Scales the gradients in place, the same tensors in the same order in every step.

        Returns:
            float: The share of them that a bound of their own has cut; 0 in the warm-up.
        """
        gradients = list(gradients)
        norms = [gradient.norm().item() for gradient in gradients]
        if not any(norms):
            return 0.0
        warm_up = self.steps < self.warmup_steps
        self.steps += 1
        shared = min(1.0, self.warmup_clip / math.hypot(*norms)) if warm_up else 1.0
        cut = 0
        for i, (gradient, norm) in enumerate(zip(gradients, norms, strict=True)):
            if norm == 0:
                continue
            average = self.averages.get(i, math.inf)
            factor = shared if warm_up else min(1.0, self.ratio * average / norm)
            cut += factor < 1 and not warm_up
            gradient.mul_(factor)
            clipped = factor * norm
            # A tensor without a norm in the warm-up starts from its first norm.
            blend = self.beta * average + (1 - self.beta) * clipped
            self.averages[i] = min(average, clipped) if warm_up or average == math.inf else blend
        return cut / len(gradients)


class ZClip:
    """ZClip (arXiv 2504.02507): the global norm is clipped where it is z deviations over its moving average.

    A norm that is z > `threshold` deviations over the average is cut to threshold²/z deviations over it: the larger the
    spike, the closer to the average. The statistics take in the norm that was cut.

    Args:
        threshold (float): Deviations from which on a norm is cut.
        alpha (float): Decay of the averages for each optimizer step.
        warmup_steps (int): Norms from which the averages start, themselves not cut.
    """

    def __init__(self, threshold: float = 2.5, alpha: float = 0.97, warmup_steps: int = 25) -> None:
        self.threshold, self.alpha, self.warmup_steps = threshold, alpha, warmup_steps
        self.first_norms: list[float] = []
        self.mean = self.variance = 0.0

    @torch.no_grad()
    def clip(self, gradients: Iterable[Tensor]) -> float:
        """Scales the gradients in place; returns 1 if it did, 0 otherwise."""
        gradients = list(gradients)
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if norm == 0:
            return 0.0
        if len(self.first_norms) < self.warmup_steps:
            self.first_norms.append(norm)
            self.mean, self.variance = mean(self.first_norms), pvariance(self.first_norms)
            return 0.0
        deviation = math.sqrt(self.variance)
        bound = norm
        if norm > self.mean + self.threshold * deviation:
            bound = self.mean + self.threshold**2 * deviation**2 / (norm - self.mean)
            for gradient in gradients:
                gradient.mul_(bound / norm)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * bound
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (bound - self.mean) ** 2
        return float(bound < norm)
