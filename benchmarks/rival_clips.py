# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Four published adaptive clips, implemented from their papers' formulas. stability.py and collapse.py run them.

All look at the gradient before verl's grad_clip, which still applies after them. A gradient that is exactly zero is
left out of their statistics, as in LayerClip. Otherwise the smallest norm of AdaGC's warm-up would be zero, and the
tensor would never be updated again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


class SPAM:
    """SPAM (arXiv 2501.06842): elements far over Adam's second moment are cut, and the moments are reset now and then.

    An element whose square is over `threshold` times its second moment v (before this step, without bias correction) is
    cut to the square root of that product. After every `reset_interval` steps both moments start over; the learning
    rate then rises from 0 in half a cosine. The paper takes 5000, 500 and 150. How long after a reset v is too young to
    clip by is our choice: `clip_after` steps.

    Args:
        optimizer (Optimizer): Adam or AdamW, whose moments these are.
        threshold (float): θ of the paper.
        reset_interval (int): ΔT of the paper.
        warmup_share (float): Its N, the steps in which the learning rate rises, as a share of ΔT.
        clip_after (int): Optimizer steps after the start, or after a reset, in which nothing is cut.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        threshold: float = 5000.0,
        reset_interval: int = 500,
        warmup_share: float = 0.3,
        clip_after: int = 20,
    ) -> None:
        self.optimizer, self.threshold, self.reset_interval = optimizer, threshold, reset_interval
        self.warmup_steps, self.clip_after = round(warmup_share * reset_interval), clip_after
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.steps = 0  # since the start or the last reset
        self.resets = 0

    @torch.no_grad()
    def clip(self, gradients: Iterable[Tensor]) -> float:
        """Cuts the gradients' elements in place, resets what is due; returns the share of elements that were cut.

        Args:
            gradients (Iterable): Those of the optimizer's parameters, in its order.
        """
        if self.steps == self.reset_interval:
            self.steps, self.resets = 0, self.resets + 1
            for state in self.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq", "step"):
                    state[name].zero_()
        self.steps += 1
        risen = 1.0
        if self.resets and self.steps <= self.warmup_steps:
            risen = (1 - math.cos(math.pi * self.steps / self.warmup_steps)) / 2
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = risen * rate
        if self.steps <= self.clip_after:
            return 0.0
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        cut = total = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            bound = (self.threshold * self.optimizer.state[parameter]["exp_avg_sq"]).sqrt()
            over = gradient.abs() > bound
            cut, total = cut + int(over.sum()), total + over.numel()
            gradient.copy_(gradient.clamp(-bound, bound))
        return cut / total


class AGGC:
    """AGGC (arXiv 2601.11864): the norm of each kind of module is kept in an interval around its moving average.

    The norm of a group, all tensors of one kind of module (q_proj, embed_tokens, …), is scaled down to `high` times the
    moving average S of the group's scaled norms, or up to `low` times S. `high` changes from its first to its late
    value, linearly, from `switch` of the run on for `transition` of it.

    The formulas give no limit to the scaling, and the settings are not in them. The values here are those of the
    authors' script for GRPO with Qwen2.5-3B. That script also limits a step's factor to 0.9 to 1.1: `limits`. S starts
    from the first norm here; from 0, without the limits, no gradient would ever pass.

    Args:
        kinds (Sequence[str]): The group of each tensor.
        total_steps (int): Optimizer steps of the run.
        beta (float): Decay of S for each optimizer step.
        high (tuple[float, float]): First and late upper bound, in S.
        low (float): The lower bound, in S.
        switch (float), transition (float): See above.
        limits (tuple[float, float]): The smallest and the largest factor.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        total_steps: int,
        beta: float = 0.99,
        high: tuple[float, float] = (0.7, 0.999),
        low: float = 0.98,
        switch: float = 0.6,
        transition: float = 0.2,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        self.groups: dict[str, list[int]] = {}
        for i, kind in enumerate(kinds):
            self.groups.setdefault(kind, []).append(i)
        self.total_steps, self.beta, self.high, self.low = total_steps, beta, high, low
        self.switch, self.transition, self.limits = switch, transition, limits
        self.steps = 0
        self.averages: dict[str, float] = {}

    @torch.no_grad()
    def clip(self, gradients: Iterable[Tensor]) -> float:
        """Scales the gradients in place; returns the share of groups that were scaled down.

        Args:
            gradients (Iterable): One for each of `kinds`.
        """
        gradients = list(gradients)
        late = min(1.0, max(0.0, (self.steps / self.total_steps - self.switch) / self.transition))
        high = self.high[0] * (1 - late) + self.high[1] * late
        self.steps += 1
        cut = 0
        for kind, places in self.groups.items():
            norm = math.hypot(*(gradients[i].norm().item() for i in places))
            if norm == 0:
                continue
            average = self.averages.get(kind, norm)
            factor = 1.0
            if kind in self.averages:
                if norm > high * average:
                    factor = max(high * average / norm, self.limits[0])
                elif norm < self.low * average:
                    factor = min(self.low * average / norm, self.limits[1])
            cut += factor < 1
            for i in places:
                gradients[i].mul_(factor)
            self.averages[kind] = self.beta * average + (1 - self.beta) * factor * norm
        return cut / len(self.groups)
