# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a pass can measure: the gradient of a `TokenSet`, or a `Digit` of a `Code` of its tokens."""

import math
from dataclasses import dataclass, field

from .candidates import GroupKey, TokenSet

# A reading may differ from a whole digit by this much.
_READING_ERROR = 0.45


@dataclass(eq=False)
class Code:
    """Numbers tokens, to find one that outweighs all others; each probe reads one digit of its number.

    In a digit's probe, each token's gradient is multiplied by sqrt(d / (base - 1)), where d is that digit of the
    token's number. If one token outweighs all others, the probe's squared norm divided by that of all the tokens
    is d / (base - 1) for that token's d. So about log(n) / log(base) probes find a culprit even if its suspicion is
    low, and these probes are independent: they can all run in one pass.
    """

    token_set: TokenSet
    norm: float
    base: int  # the base of the numbers
    digits: int  # the number of digits of each number
    norms: dict[int, float] = field(default_factory=dict)  # the norms measured so far, by digit

    @classmethod
    def of(cls, token_set: TokenSet, norm: float, largest_base: int) -> "Code":
        n = len(token_set.candidates)
        digits = max(math.ceil(math.log(n, largest_base) - 1e-9), 1)
        # The smallest sufficient base separates the digits best.
        return cls(token_set, norm, max(math.ceil(n ** (1 / digits) - 1e-9), 2), digits)

    @property
    def unread(self) -> "list[Digit]":
        return [Digit(self, digit) for digit in range(self.digits) if digit not in self.norms]

    def read(self) -> int | None:
        """The candidate whose number the norms of all digits give; None if they do not fit a single token."""
        number = 0
        for digit, norm in self.norms.items():
            reading = (norm / self.norm) ** 2 * (self.base - 1)
            value = round(reading) if math.isfinite(reading) else -1
            if not 0 <= value < self.base or abs(reading - value) > _READING_ERROR:
                return None
            number += value * self.base**digit
        return self.token_set.candidates[number] if number < len(self.token_set.candidates) else None


@dataclass(frozen=True, eq=False)
class Digit:
    """A probe that reads one digit of a code: the candidates, and the factor for each one's gradient."""

    code: Code
    digit: int

    @property
    def group(self) -> GroupKey:
        return self.code.token_set.group

    @property
    def candidates(self) -> tuple[int, ...]:
        return self.code.token_set.candidates

    @property
    def factors(self) -> list[float]:
        base = self.code.base
        digits = (number // base**self.digit % base for number in range(len(self.candidates)))
        return [math.sqrt(digit / (base - 1)) for digit in digits]


Probe = TokenSet | Digit


def is_single(probe: Probe) -> bool:
    """Whether a probe measures one token alone."""
    return isinstance(probe, TokenSet) and len(probe.candidates) == 1
