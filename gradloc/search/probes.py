# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a pass can measure: the gradient of some tokens as it is, or one digit of their numbers."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

# A reading may be off by this fraction of a digit.
_READING_ERROR = 0.45

# A unit's name: anything hashable that the caller tells its units apart by. The search gives it back as it is, so the
# caller knows its type.
UnitKey = Any


@dataclass(frozen=True, eq=False)
class Segment:
    """Some tokens of a unit, whose gradient is to be measured as it is.

    An empty one measures what a unit's gradient is without any token: anything but zero means that it is broken.

    Args:
        unit (UnitKey): The unit.
        candidates (tuple[int, ...]): Indices into the candidates given to `Search.add_unit`, ascending.
    """

    factors: ClassVar[None] = None

    unit: UnitKey
    candidates: tuple[int, ...]


@dataclass(eq=False)
class Code:
    """Numbers for tokens of which one may outweigh all others, written in digits; a probe reads one digit.

    In the probe of a digit d, each token's gradient is multiplied by sqrt(d / (base - 1)). If one token
    outweighs all others, the squared norm over that of them all is d / (base - 1) of that token. So about
    log(n) / log(base) probes name a culprit that suspicion does not expect, and they need not wait for each other.

    Args:
        segment (Segment): The tokens.
        norm (float): The norm of their gradient.
        base (int): Of the digits.
        digits (int): How many each number has.
    """

    segment: Segment
    norm: float
    base: int
    digits: int
    norms: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, norm: float, largest_base: int) -> "Code":
        n = len(segment.candidates)
        digits = max(math.ceil(math.log(n, largest_base) - 1e-9), 1)
        # The smallest base that does tells digits apart best.
        return cls(segment, norm, max(math.ceil(n ** (1 / digits) - 1e-9), 2), digits)

    @property
    def unread(self) -> "list[Digit]":
        return [Digit(self, digit) for digit in range(self.digits) if digit not in self.norms]

    def read(self) -> int | None:
        """The candidate that the norms of all digits' probes name; None if they do not fit a single token."""
        number = 0
        for digit, norm in self.norms.items():
            reading = (norm / self.norm) ** 2 * (self.base - 1)
            value = round(reading) if math.isfinite(reading) else -1
            if not 0 <= value < self.base or abs(reading - value) > _READING_ERROR:
                return None
            number += value * self.base**digit
        return self.segment.candidates[number] if number < len(self.segment.candidates) else None


@dataclass(frozen=True, eq=False)
class Digit:
    """A probe that reads one digit of a code: the candidates, and the factor of each one's gradient."""

    code: Code
    digit: int

    @property
    def unit(self) -> UnitKey:
        return self.code.segment.unit

    @property
    def candidates(self) -> tuple[int, ...]:
        return self.code.segment.candidates

    @property
    def factors(self) -> list[float]:
        base = self.code.base
        digits = (number // base**self.digit % base for number in range(len(self.candidates)))
        return [math.sqrt(digit / (base - 1)) for digit in digits]


Probe = Segment | Digit


def is_single(probe: Probe) -> bool:
    """Whether a probe measures one token alone."""
    return isinstance(probe, Segment) and len(probe.candidates) == 1
