# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""LayerClip: clips each layer's gradient to a bound computed from that layer's recent norms."""

import logging
import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ..config import is_finite_number, is_positive_integer, require
from ..guarded import ForeseenError
from ..saved import checked
from .reduced_norms import ReducedNorms

logger = logging.getLogger(__name__)

# The mean never falls below _MEAN_FLOOR times an average that is _FLOOR_SLOWNESS times slower. So a short phase of
# small norms does not bring the bound close to zero, but a lasting decrease of the norms is followed.
_MEAN_FLOOR = 0.1
_FLOOR_SLOWNESS = 5.0
# The deviation never falls below this fraction of the mean: at zero, every norm above the mean would be clipped.
_DEVIATION_FLOOR = 0.1
# A norm's distance from the mean counts as at most this many deviations, so repeated spikes widen the bound slowly.
_DEVIATION_CAP = 2.5
# For normal numbers: standard deviation over mean absolute deviation.
_PER_MEAN_DEVIATION = math.sqrt(math.pi / 2)
# And over median absolute deviation.
_PER_MEDIAN_DEVIATION = 1.4826


@dataclass
class LayerClipConfig:
    """When a layer's gradient is scaled down.

    A layer's bound is mean + z * standard deviation of its recent norms. Over it, it is scaled to mean + z**2 /
    deviations * standard deviation, deviations being how many of them its norm is over the mean: the larger the norm,
    the nearer to the mean.

    Args:
        enable (bool): Whether to clip each layer's gradient.
        z (float): Maximum number of standard deviations above the mean.
        beta (float): Decay of the moving averages per optimizer step.
        warmup_steps (int): Number of norms of a layer before it is clipped.
        min_bound (float): Lower limit of bounds and of what layers are scaled to.
        log_layers (bool): Whether to log every layer's norm and bound.

    Raises:
        ValueError: A value is out of range.
    """

    enable: bool = False
    z: float = 5.0
    beta: float = 0.98
    warmup_steps: int = 20
    min_bound: float = 0.0
    log_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("enable", "log_layers"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("z", is_finite_number(self.z) and self.z > 0, "a positive number")
        self._check("beta", is_finite_number(self.beta) and 0 < self.beta < 1, "a number between 0 and 1")
        self._check("min_bound", is_finite_number(self.min_bound) and self.min_bound >= 0, "a number of at least 0")
        self._check("warmup_steps", is_positive_integer(self.warmup_steps), "an integer over 0")

    def _check(self, name: str, good: bool, wanted: str) -> None:
        require(good, f"layer_clip.{name}", getattr(self, name), wanted)


@dataclass
class LayerStatistics:
    """The moving mean and deviation of one layer's norms, those over the bound cut at it.

    They start from the median and the median absolute deviation of the first norms, which are robust to a spike among
    these norms. After that, the t-th norm has the weight (1 - beta) / (1 - beta^t), as in a bias-corrected moving
    average (Adam's), so that the starting values weigh as much as the norms they were computed from.
    """

    warmup: list[float] = field(default_factory=list)  # the norms of the warm-up; empty after it
    count: int = 0  # the number of norms so far
    mean: float = 0.0  # the moving mean of the norms; 0 during the warm-up
    # The mean absolute deviation from the mean, times sqrt(pi / 2): equal to the standard deviation for normally
    # distributed norms.
    deviation: float = 0.0
    floor: float = 0.0  # the lower limit of the mean: a tenth of a moving average five times slower than the mean

    def take_in(self, norm: float, config: LayerClipConfig) -> None:
        """Adds one step's norm, cut at the bound by the caller. Exact zeros and non-finite norms are ignored."""
        if norm == 0 or not math.isfinite(norm):
            return
        self.count += 1
        if self.mean == 0:
            self.warmup.append(norm)
            if self.count >= config.warmup_steps:
                self._start()
            return
        weight = (1 - config.beta) / (1 - config.beta**self.count)
        distance = min(abs(norm - self.mean), _DEVIATION_CAP * self.deviation)
        self.deviation += weight * (_PER_MEAN_DEVIATION * distance - self.deviation)
        self.floor += weight / _FLOOR_SLOWNESS * (_MEAN_FLOOR * norm - self.floor)
        self.mean = max(self.mean + weight * (norm - self.mean), self.floor)
        self.deviation = max(self.deviation, _DEVIATION_FLOOR * self.mean)

    def bound(self, config: LayerClipConfig) -> float | None:
        """The bound of the next norm; None during the warm-up."""
        return None if self.mean == 0 else max(self.mean + config.z * self.deviation, config.min_bound)

    def target(self, norm: float, config: LayerClipConfig) -> float:
        """What a norm over its bound is scaled to: ZClip's reciprocal (arXiv 2504.02507) for one layer."""
        deviations = (norm - self.mean) / self.deviation
        return max(self.mean + config.z**2 / deviations * self.deviation, config.min_bound)

    def _start(self) -> None:
        self.mean = median(self.warmup)
        deviation = _PER_MEDIAN_DEVIATION * median(abs(norm - self.mean) for norm in self.warmup)
        self.floor = _MEAN_FLOOR * self.mean
        self.deviation = max(deviation, _DEVIATION_FLOOR * self.mean)
        self.warmup = []


_Statistics = TypeVar("_Statistics")


def saved_statistics(
    state: Mapping[str, Any] | None, names: Collection[str], make: Callable[..., _Statistics], clip: str, kind: str
) -> dict[str, _Statistics]:
    """The saved statistics by name; without a saved state those of a new warm-up, with a warning.

    Args:
        names (Collection[str]): The names that this model has, of its `kind`, "layers" or "boundaries".
        make (Callable): Makes those of a name: new ones, or from their fields.
        clip (str): "LayerClip" or "TokenClip".

    Raises:
        ValueError: They are no statistics, or belong to another model.
    """
    if state is None:
        logger.warning(
            "No %s statistics are loaded (there is no gradloc_state.pt beside the checkpoint, or "
            "checkpoint.load_contents is without 'extra'); the warm-up starts over.",
            clip,
        )
        return {name: make() for name in names}
    saved = set(checked(state, {}, kind))
    if saved != set(names):
        extra, missing = (reprlib.repr(sorted(map(str, each))) for each in (saved - set(names), set(names) - saved))
        raise ForeseenError(
            f"it belongs to another model ({kind} only in the checkpoint: {extra}; only in this model: {missing})"
        )
    return {name: make(**checked(state[name], vars(make()), name)) for name in names}


class LayerStep(TypedDict):
    """One layer in one step: its norm before clipping, its bound (None during the warm-up), and its scale factor."""

    norm: float
    bound: float | None
    factor: float


class LayerClip:
    """Scales the gradient of every layer over its bound before the optimizer step, and updates the bounds."""

    def __init__(self, module: nn.Module, config: LayerClipConfig, device: str | torch.device = "cpu") -> None:
        self._config = config
        self._reduced_norms = ReducedNorms(module, torch.device(device))
        self.layers = self._reduced_norms.layers  # the layers, in the model's order
        self.last_step: dict[str, LayerStep] = {}  # by layer
        self._steps: list[dict[str, LayerStep]] = []
        self._statistics = {layer: LayerStatistics() for layer in self.layers}

    @property
    def is_on(self) -> bool:
        """Whether it clips, and does not only learn its bounds."""
        return self._config.enable

    def squared_norms(self) -> Tensor:
        """`ReducedNorms.squared_norms`, which are given to `clip`. A collective call."""
        return self._reduced_norms.squared_norms()

    def clip(self, squared_norms: Tensor) -> Tensor:
        """Clips the gradient and updates the statistics with its `squared_norms`.

        For a step that is skipped, use `preview` instead. If any norm is NaN or infinite, nothing is changed: the
        optimizer step will be skipped.

        Returns:
            Tensor: The norm of the whole gradient before clipping, shape (), on the CPU.
        """
        step = self.preview(squared_norms)
        figures = list(step.values())
        self._reduced_norms.scale_({i: layer["factor"] for i, layer in enumerate(figures) if layer["factor"] < 1})
        self.take_in(step)
        self.last_step = step
        self._steps.append(step)
        return torch.tensor(math.sqrt(sum(layer["norm"] ** 2 for layer in figures)))

    def take_in(self, step: Mapping[str, LayerStep]) -> None:
        """Updates the statistics with a step that `preview` gave; by itself where LayerClip only learns its bounds."""
        if all(math.isfinite(layer["norm"]) for layer in step.values()):
            for name, layer in step.items():
                # Cut at the bound, not at the target, which would never follow a lasting rise.
                norm, bound = layer["norm"], layer["bound"]
                self._statistics[name].take_in(norm if bound is None else min(norm, bound), self._config)

    def preview(self, squared_norms: Tensor) -> dict[str, LayerStep]:
        """What `clip` would do to a gradient with these norms, in the form of `last_step`. Changes nothing."""
        # The only host sync: the norm that `clip` returns is computed on the CPU.
        norms = [math.sqrt(square) for square in squared_norms.tolist()]
        finite = all(map(math.isfinite, norms))
        step: dict[str, LayerStep] = {}
        for layer, norm in zip(self.layers, norms, strict=True):
            statistics, factor = self._statistics[layer], 1.0
            bound = statistics.bound(self._config)
            if finite and bound is not None and norm > bound:
                factor = statistics.target(norm, self._config) / norm
            step[layer] = {"norm": norm, "bound": bound, "factor": factor}
        return step

    def metrics(self) -> dict[str, float | list[float]]:
        """The metrics of docs/reference/clips.md since the last call, the same on every rank.

        Lists have one value per step. `norm_max_ratio` and `tightest_layer` are missing until a layer has a bound.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        factors = [layer["factor"] for step in steps for layer in step.values()]
        metrics: dict[str, float | list[float]] = {
            "actor/layer_clip/fraction": sum(factor < 1 for factor in factors) / len(factors),
            "actor/layer_clip/min_factor": min(factors),
        }
        ratios = [
            (layer["norm"] / layer["bound"], i)
            for step in steps
            for i, layer in enumerate(step.values())
            if layer["bound"] and math.isfinite(layer["norm"])
        ]
        if ratios:
            metrics["actor/layer_clip/norm_max_ratio"], metrics["actor/layer_clip/tightest_layer"] = max(ratios)
        if self._config.log_layers:
            for layer in self.layers:
                metrics[f"actor/layer_clip/norm/{layer}"] = [step[layer]["norm"] for step in steps]
                bounds = [bound for step in steps if (bound := step[layer]["bound"]) is not None]
                if bounds:
                    metrics[f"actor/layer_clip/bound/{layer}"] = bounds
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The statistics by layer name: plain numbers, the same on every rank and for any number of ranks."""
        return {layer: asdict(statistics) for layer, statistics in self._statistics.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; see `saved_statistics`. After an error, nothing is changed."""
        saved = saved_statistics(state, self.layers, LayerStatistics, "LayerClip", "layers")
        for layer, each in saved.items():
            # A mean has a deviation, by which `target` divides; before it, the warm-up has all norms that are counted.
            if not (each.deviation if each.mean else each.count == len(each.warmup)):
                raise ForeseenError(f"the numbers of {layer} contradict each other")
        self._statistics = saved
