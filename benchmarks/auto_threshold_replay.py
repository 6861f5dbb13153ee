# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Recorded norms, judged, and passed through the rule of the automatic threshold in other ways."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from verl.utils.gradloc import auto_threshold

# A fault is held against the norms without a fault among so many mini-batches before it.
ORDINARY = 256
SHUFFLES = 20
CONFIDENCE = 0.95

# The largest token-equivalent norm of a mini-batch (infinite where it is not finite), and whether it has a fault.
Norm = tuple[float, bool]


@dataclass(frozen=True)
class MiniBatch:
    """A mini-batch in its place among others.

    Args:
        norm (float): The largest token-equivalent norm; infinite where it is not finite.
        has_fault (bool): Whether a fault was planted.
        largest_ordinary (float): The largest finite norm without a fault among the ORDINARY mini-batches before.
    """

    norm: float
    has_fault: bool
    largest_ordinary: float

    @property
    def is_spike(self) -> bool:
        """Whether a fault's norm is over what ordinary mini-batches show."""
        return self.has_fault and self.norm > self.largest_ordinary


@dataclass(frozen=True)
class Replayed:
    """Counts of mini-batches.

    Args:
        checked (int): Without a fault, after the warm-up, with a norm that is not zero.
        false_alarms (int): Of these.
        faults (int), spikes (int), caught (int): Faults; those that are spikes; spikes that alarmed.
    """

    checked: int = 0
    false_alarms: int = 0
    faults: int = 0
    spikes: int = 0
    caught: int = 0

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def norms_of(records: Sequence[dict[str, Any]]) -> list[Norm]:
    """The norms of a run's records."""
    norms = [float(record["norm"]) for record in records]
    faults = [record["fault"] is not None for record in records]
    return [(norm if math.isfinite(norm) else math.inf, fault) for norm, fault in zip(norms, faults, strict=True)]


def in_place(norms: Sequence[Norm]) -> list[MiniBatch]:
    """Mini-batches with what is ordinary at their places."""
    batches = []
    for i, (norm, has_fault) in enumerate(norms):
        before = norms[max(0, i - ORDINARY) : i]
        ordinary = [other for other, other_has_fault in before if not other_has_fault and math.isfinite(other)]
        batches.append(MiniBatch(norm, has_fault, max(ordinary, default=0.0)))
    return batches


def replay(norms: Sequence[Norm], alarms: Sequence[bool] | None = None) -> Replayed:
    """Counts what the rule does, or with `alarms` what it did."""
    found = Replayed()
    auto = auto_threshold.AutoThreshold()
    for i, batch in enumerate(in_place(norms)):
        threshold = auto.value
        auto.take_in(batch.norm)
        over = not math.isfinite(batch.norm) or (threshold is not None and batch.norm > threshold)
        alarm = over if alarms is None else alarms[i]
        checked = not batch.has_fault and threshold is not None and batch.norm != 0
        found += Replayed(
            checked=int(checked),
            false_alarms=int(checked and alarm),
            faults=int(batch.has_fault),
            spikes=int(batch.is_spike),
            caught=int(batch.is_spike and alarm),
        )
    return found


def replays(norms: Sequence[Norm]) -> dict[str, Replayed]:
    """The counts in other orders, with other windows and warm-ups, and of k mini-batches at once."""
    window, warmup = auto_threshold.WINDOW, auto_threshold.WARMUP
    found = {"in its order": replay(norms), "reversed": replay(_in_order(norms, None))}
    shuffled = [replay(_in_order(norms, random.Random(seed))) for seed in range(SHUFFLES)]
    found[f"shuffled, {SHUFFLES} seeds"] = sum(shuffled, Replayed())
    for size in (window // 4, window // 2, 2 * window):
        with patch.object(auto_threshold, "WINDOW", size):
            found[f"window {size} (not {window})"] = replay(norms)
    for size in (2 * warmup, 5 * warmup):
        with patch.object(auto_threshold, "WARMUP", size):
            found[f"warm-up {size} (not {warmup})"] = replay(norms)
    for k in (2, 4, 8):
        parts = [norms[i : i + k] for i in range(0, len(norms), k)]
        largest = [(max(norm for norm, _ in part), any(fault for _, fault in part)) for part in parts]
        found[f"largest of {k}"] = replay(largest)
    return found


def _in_order(norms: Sequence[Norm], chance: random.Random | None) -> list[Norm]:
    """Faults in their places, the others shuffled, or reversed without `chance`."""
    ordinary = [norm for norm in norms if not norm[1]]
    if chance is None:
        ordinary.reverse()
    else:
        chance.shuffle(ordinary)
    rest = iter(ordinary)
    return [norm if norm[1] else next(rest) for norm in norms]


def upper_bound(count: int, total: int) -> float | None:
    """The upper end of the one-sided 95% Clopper-Pearson interval of a rate; None of nothing."""
    if total == 0:
        return None
    low, high = count / total, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        at_most = sum(math.comb(total, i) * rate**i * (1 - rate) ** (total - i) for i in range(count + 1))
        low, high = (rate, high) if at_most > 1 - CONFIDENCE else (low, rate)
    return high
