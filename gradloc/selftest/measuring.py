# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what GradLoc costs in steps of a loop, and whether it finds planted tokens there."""

import math
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..config import GradLocConfig
from ..fsdp import collectives
from ..gradloc import GradLoc
from .loop import Loop

NEVER = 1e30
# τ in ordinary tokens' norms, and what the planted token exceeds its micro-batch's threshold by, if it is ordinary.
_THRESHOLD, _SPIKE = 10.0, 30.0
_WARM_UP = 2


class SelfTest:
    """Measures the steps of a loop, on all ranks.

    Args:
        loop (Loop): The loop.
        seconds (float): How long to measure what detection costs; at least three pairs of steps.
    """

    def __init__(self, loop: Loop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self._watch = self._gradloc(NEVER)
        self._steps = 0

    def run(self) -> dict[str, Any]:
        """All figures; the same on every rank but for memory, which is this rank's."""
        for _ in range(_WARM_UP):
            self._step(None)
            self._step(self._watch)
        ordinary = self._watch.metrics()["actor/gradloc/token_norm_max"]
        result: dict[str, Any] = {"ordinary_token_norm": ordinary, **self._cost()}
        result["peak"] = {name: self._peak(of) for name, of in (("off", None), ("detection", self._watch))}
        threshold = _THRESHOLD * ordinary
        for name, action in (("search", "log"), ("drop", "drop")):
            result[name] = self._search(self._gradloc(threshold, spike_action=action))
        result["drill"] = self._drill(self._gradloc(threshold, spike_drill_step=1))
        return result

    def _gradloc(self, threshold: float, **options: Any) -> GradLoc:
        config = GradLocConfig(grad_norm_threshold=threshold, **options)
        return GradLoc(self._loop.model, config, self._loop.forward, self._loop.device)

    def _step(self, gradloc: GradLoc | None, advantages: Tensor | None = None, global_step: int = 0) -> float:
        """Seconds of a step, with the check before its optimizer step."""
        return self._timed(lambda: self._checked(gradloc, advantages, global_step))

    def _checked(self, gradloc: GradLoc | None, advantages: Tensor | None = None, global_step: int = 0) -> None:
        self._loop.step(gradloc, self._loop.advantages if advantages is None else advantages, global_step)
        if gradloc is not None:
            gradloc.locate(0, 0)

    def _timed(self, call: Callable[[], None]) -> float:
        _wait(self._loop.device)
        started = time.perf_counter()
        call()
        _wait(self._loop.device)
        return time.perf_counter() - started

    def _cost(self) -> dict[str, Any]:
        """Pairs of steps, in an order that is drawn anew."""
        pairs: list[tuple[float, float]] = []
        started = time.perf_counter()
        draw = random.Random(0)
        # The ranks have to take the same number of steps.
        while collectives.broadcast(lambda: len(pairs) < 3 or time.perf_counter() - started < self._seconds, 0):
            if draw.random() < 0.5:
                plain = self._step(None)
                watched = self._step(self._watch)
            else:
                watched = self._step(self._watch)
                plain = self._step(None)
            pairs.append((plain, watched))
        return {
            "steps": len(pairs),
            "step_seconds": median(plain for plain, _ in pairs),
            "detection": median(watched / plain for plain, watched in pairs) - 1,
        }

    def _peak(self, gradloc: GradLoc | None) -> int | None:
        return self._peak_of(lambda: self._checked(gradloc))

    def _peak_of(self, call: Callable[[], None]) -> int | None:
        """The most bytes that are allocated during a call; None on a CPU."""
        if self._loop.device.type != "cuda":
            call()
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def _search(self, gradloc: GradLoc) -> dict[str, Any]:
        """A step with a planted token."""
        sizes = self._loop.sizes
        draw = random.Random(1)
        place = {
            "rank": draw.randrange(collectives.world_size()),
            "row": draw.randrange(sizes.micro_batches * sizes.rows),
            "position": draw.randrange(sizes.response),
        }
        advantages = self._loop.advantages.clone()
        micro_batch, row = divmod(place["row"], sizes.rows)
        if place["rank"] == collectives.rank():
            # Against a unit's threshold, which is τ √(its tokens).
            factor = _SPIKE * _THRESHOLD * math.sqrt(sizes.rows * sizes.response)
            planted = advantages[micro_batch, row, place["position"]]
            advantages[micro_batch, row, place["position"]] = math.copysign(factor, float(planted))
        taken: dict[str, Any] = {}

        def step() -> None:
            self._loop.step(gradloc, advantages, 1)
            before = _gradient_sums(self._loop.model)
            taken["seconds"] = self._timed(lambda: taken.update(located=gradloc.locate(0, 0)))
            taken["same"] = _gradient_sums(self._loop.model) == before

        peak = self._peak_of(step)
        found = [{name: culprit[name] for name in place} for event in gradloc.events for culprit in event["culprits"]]
        return {
            "found": found == [place],
            "passes": sum(event["passes"] for event in gradloc.events),
            "error": next((event["error"] for event in gradloc.events), "no spike was seen"),
            "seconds": taken["seconds"],
            "same_gradient": all(collectives.gather_objects(taken["same"])),
            "peak": peak,
        }

    def _drill(self, gradloc: GradLoc) -> dict[str, Any]:
        """A step in which GradLoc plants a token itself."""
        peak = self._peak_of(partial(self._checked, gradloc, None, 1))
        (event,) = gradloc.events
        return {"found": event["drill"]["found"], "passes": event["passes"], "error": event["error"], "peak": peak}


def _gradient_sums(model: nn.Module) -> list[tuple[int, int]]:
    """Two sums of the bits of this rank's gradient, one by position, for each parameter: other bits, other sums."""
    sums = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            own = getattr(parameter.grad, "_local_tensor", parameter.grad).detach().flatten()
            bits = own.view({2: torch.int16, 4: torch.int32}[own.element_size()])
            # In parts: as int64, a large parameter would need far more memory than training.
            of_parts = [part.long() for part in bits.split(2**22)]
            sums.append(
                (
                    sum(int(part.sum()) for part in of_parts),
                    sum(int((part * torch.arange(len(part), device=part.device)).sum()) for part in of_parts),
                )
            )
    return sums


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
