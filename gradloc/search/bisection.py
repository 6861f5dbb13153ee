# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds every token over τ in a token set over its threshold, by best-first bisection and by codes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .candidates import Found, TokenSet

# A reading of a code's digit may differ from a whole digit by this much.
_READING_ERROR = 0.45

# A bound replaces a measurement only if it is over the threshold by this fraction of the norm that it was computed
# from: in half precision, two measurements of the same gradient can differ by this much.
_SLACK = 1e-2

# A subset under its threshold is "unusual", and still searched for a token over τ, if its norm is this many times what
# ordinary tokens give. Sets of ordinary tokens seldom reach it, although their norms have heavy tails.
_UNUSUAL = 1.75

# After this many codes in a row without a culprit, a bisection reads no more codes.
_READINGS = 3

# The largest base of a code if the norms of ordinary tokens, which add noise to the readings, are unknown; and its
# limit otherwise.
_BASE_UNKNOWN, _BASE_MOST = 8, 64

# If the tokens that one pass can measure alone have more than this fraction of the prior, they are measured instead of
# a code.
_CONCENTRATED = 0.5

# How many of the likeliest tokens are still measured when the rest is given up.
SAMPLE = 3


def patience(candidates: int, count: int) -> float:
    """How many passes of `count` probes may point at no token before a search of this many candidates is given up."""
    return 2 * math.log(10 * candidates, count + 1) + 2


class Code:
    """Numbers tokens, to find one that outweighs all others; each probe reads one digit of its number.

    In a digit's probe, each token's gradient is multiplied by sqrt(d / (base - 1)), where d is that digit of the
    token's number. If one token outweighs all others, the probe's squared norm divided by that of all the tokens
    is d / (base - 1) for that token's d. So about log(n) / log(base) probes find a culprit even if its suspicion is
    low, and these probes are independent: they can all run in one pass.

    `norm` is that of the tokens, of which there are at least two. The smallest base with which the numbers have as few
    digits as with the largest one separates the digits best.
    """

    def __init__(self, token_set: TokenSet, norm: float, largest_base: int) -> None:
        self.norms: dict[TokenSet, float] = {}  # those measured so far, by probe
        self._token_set, self._norm, n = token_set, norm, len(token_set.places)
        digits = math.ceil(math.log(n, largest_base) - 1e-9)
        self._base = base = math.ceil(n ** (1 / digits) - 1e-9)
        factors, numbers = torch.tensor([math.sqrt(digit / (base - 1)) for digit in range(base)]), torch.arange(n)
        # One for each digit, the last digit first.
        self.probes = [
            TokenSet(token_set.of, token_set.places, factors[numbers // base**digit % base]) for digit in range(digits)
        ]

    @property
    def unread(self) -> list[TokenSet]:
        return [probe for probe in self.probes if probe not in self.norms]

    def read(self) -> int | None:
        """The candidate whose number the norms of all digits give; None if they do not fit a single token."""
        number = 0
        for digit, probe in enumerate(self.probes):
            reading = (self.norms[probe] / self._norm) ** 2 * (self._base - 1)
            value = round(reading) if math.isfinite(reading) else -1
            if not 0 <= value < self._base or abs(reading - value) > _READING_ERROR:
                return None
            number += value * self._base**digit
        places = self._token_set.places
        return int(places[number]) if number < len(places) else None


@dataclass(eq=False)
class _Node:
    """A subset that is over its threshold, or unusual, with the state of its open subsets."""

    subset: TokenSet
    norm: float
    unusual: bool  # whether it is unusual but not over its threshold
    code: Code | None = None  # the code that is being read
    open_subsets: int = -1  # how many subsets are open; -1 before the subset is split
    lower_bound: float = 0.0  # a lower bound on the norm of all open subsets together, by the triangle inequality
    energy: float = 0.0  # the squared norm of the open subsets together
    prior: float = 0.0  # and their prior
    has_subset_over: bool = False  # whether a subset of it was over its own threshold


class Bisection:
    """Finds every token over τ in a token set that is over its threshold.

    It measures subsets of it. A subset S is over its threshold if its norm exceeds τ·sqrt(Σ_{t∈S} w_t²) or is not
    finite. A single token over its threshold is a culprit. A larger subset over its threshold is read by a `Code`, or
    split into two halves of about equal prior. A subset under its threshold is dropped, unless it is unusual: then it
    is split too, but after all others, and only as long as this finds culprits. The states of a subset:

    - open: to be measured; the subset with the largest expected energy per squared weight comes first
    - reading: over its threshold; a code of its tokens is being read
    - split: over its threshold, or unusual; its subsets are open
    - settled: a measured single token, or measured under its threshold and not unusual
    - given up: still open when the search was given up, after several passes in which no probe pointed at a token

    Without the root mean square of `ordinary` tokens' gradient norms, no subset is unusual.
    """

    def __init__(self, root: TokenSet, norm: float, ordinary: float | None) -> None:
        self._given_up: list[TokenSet] = []  # the subsets still unmeasured when the search was given up
        self.named: set[TokenSet] = set()  # the single tokens found by a code
        self.tokens = root.of
        self._ordinary = ordinary
        self._root = root
        self._nodes = [_Node(root, norm, unusual=False)]
        self._open: dict[TokenSet, _Node] = {}
        self._settled: list[tuple[TokenSet, float]] = []
        self._pointless = 0  # passes in a row in which no probe pointed at a token
        self._vain_readings = 0  # codes in a row without a culprit

    @property
    def found(self) -> Found:
        """The result so far. A set with a spike is one of the smallest if no subset is over its own threshold."""
        culprits = self.tokens.over
        rest = self.tokens.token_set(set(self._root.candidates).difference(culprits)).candidates
        settled = [node for node in self._nodes if node.open_subsets == 0 and not node.unusual]
        ranked = [subset for subset in self._ranked() if not self._open[subset].unusual]
        return Found(
            culprits,
            next((found for found in self._settled if found[0].candidates == rest), None),
            diffuse=[(node.subset, node.norm) for node in settled if not node.has_subset_over],
            given_up=self._given_up,
            open_sets=ranked + [node.subset for node in self._unsplit],
        )

    @property
    def has_named(self) -> bool:
        """Whether a token found by a code is still to be measured."""
        return not self.named.isdisjoint(self._open)

    @property
    def ended(self) -> bool:
        return not self._open and not self._unsplit

    @property
    def _unsplit(self) -> list[_Node]:
        return [node for node in self._nodes if node.open_subsets < 0]

    def next_probes(self, count: int, passes_left: float) -> list[TokenSet]:
        """At most `count` probes to measure next, best first; none when the search is over."""
        for node in [node for node in self._unsplit if node.code is None]:
            node.code = self._code(node, count, passes_left)
            if node.code is None:
                self._split(node)
        digits = [probe for node in self._nodes if node.code for probe in node.code.unread]
        while len(self._open) + len(digits) < count and self._widen():
            pass
        ranked = self._ranked()
        named = [subset for subset in ranked if subset in self.named]
        return [*named, *digits, *(subset for subset in ranked if subset not in self.named)][:count]

    def add_measurements(self, measured: Sequence[tuple[TokenSet, float]], count: int) -> None:
        """Records the norms of a pass of up to `count` probes; NaN and Inf count as over the threshold."""
        measured_subsets = [(probe, norm) for probe, norm in measured if probe in self._open]
        found = any(subset.is_single and subset.is_over(norm) for subset, norm in measured_subsets)
        pointed = [self._record(subset, norm) for subset, norm in measured_subsets]
        for node, code in [(node, node.code) for node in self._nodes if node.code]:
            code.norms |= measured
            if code.unread:
                continue
            candidate, node.code = code.read(), None
            self._vain_readings += 1
            if candidate is not None and candidate not in self.tokens.alone:
                self._suspect(candidate)
            elif node.open_subsets < 0:
                self._split(node)
        self._infer()
        if found:
            self._vain_readings = 0
        self._pointless = 0 if found or any(pointed) else self._pointless + 1
        if self._pointless > patience(len(self._root.places), count):
            self._leave()

    def _record(self, subset: TokenSet, norm: float) -> bool:
        """Records a subset's norm; returns whether it points at a token."""
        parent, over = self._open.pop(subset), subset.is_over(norm)
        self._settled.append((subset, norm))
        parent.open_subsets -= 1
        parent.has_subset_over |= over
        parent.prior -= subset.expected
        if math.isfinite(norm):
            parent.lower_bound -= norm
            parent.energy = max(parent.energy - norm * norm, 0.0)
        else:
            parent.lower_bound = 0.0
        if not subset.is_single and (over or self._is_unusual(subset, norm)):
            self._nodes.append(_Node(subset, norm, unusual=not over))
        gains = norm * parent.subset.threshold > parent.norm * subset.threshold
        return over and (gains or not math.isfinite(norm))

    def _is_unusual(self, subset: TokenSet, norm: float) -> bool:
        if self._ordinary is None:
            return False
        tokens = self.tokens
        square = max(subset.square, subset.expected * tokens.square)
        least = tokens.tau * math.sqrt(tokens.square_of[subset.places].min())
        return norm > max(least, _UNUSUAL * self._ordinary * math.sqrt(square))

    def _code(self, node: _Node, count: int, passes_left: float) -> Code | None:
        """A code for a node's tokens; None if the budget is too small or suspicion already points at a few tokens."""
        size = len(node.subset.places)
        if self._vain_readings >= _READINGS or node.unusual or not math.isfinite(node.norm) or size < 2:
            return None
        # The largest base in which ordinary tokens do not hide a culprit's digits.
        largest = _BASE_UNKNOWN
        if self._ordinary:
            contrast = node.norm / (self._ordinary * math.sqrt(node.subset.square))
            largest = int(min(max(contrast, 2), _BASE_MOST))
        code = Code(node.subset, node.norm, largest)
        if math.ceil(len(code.probes) / count) + 1 > passes_left:
            return None
        if len(code.probes) < count:
            return code
        most = self.tokens.prior_of[node.subset.places].topk(min(count, size)).values.tolist()
        return None if math.fsum(most) > _CONCENTRATED * node.subset.expected else code

    def _split(self, node: _Node, *subsets: TokenSet) -> None:
        """Opens subsets of a node; by default, its two halves."""
        node.lower_bound, node.energy = node.norm, node.norm**2 if math.isfinite(node.norm) else 1e300
        node.prior = node.subset.expected
        subsets = subsets or self.tokens.halves(node.subset)
        node.open_subsets = len(subsets)
        self._open |= dict.fromkeys(subsets, node)

    def _replace(self, subset: TokenSet, *subsets: TokenSet) -> None:
        """Replaces an open subset by subsets of it."""
        node = self._open.pop(subset)
        node.open_subsets += len(subsets) - 1
        self._open |= dict.fromkeys(subsets, node)

    def _suspect(self, candidate: int) -> None:
        """Opens a token as a subset of its own, and the other tokens of its open subset as another."""
        # While the code was read, subsets of its token set may have been measured over their thresholds.
        for node in self._unsplit:
            if candidate in node.subset.candidates:
                self._split(node, node.subset)
        holder = next((subset for subset in self._open if candidate in subset.candidates), None)
        if holder is None:
            return
        alone, others = self.tokens.token_set([candidate]), [t for t in holder.candidates if t != candidate]
        self.named.add(alone)
        self._replace(holder, alone, *([self.tokens.token_set(others)] if others else []))

    def _widen(self) -> bool:
        """Splits the subset with the most expected energy, to have more probes; returns whether there was one."""
        if reading := self._unsplit:
            self._split(reading[0])
            return True
        widest = max((s for s in self._open if not s.is_single), key=self._expected_energy, default=None)
        if widest is not None:
            self._replace(widest, *self.tokens.halves(widest))
        return widest is not None

    def _infer(self) -> None:
        """Splits, without a measurement, each subset that must be over its threshold given its siblings' norms."""
        for subset, node in list(self._open.items()):
            slack = _SLACK * node.norm if math.isfinite(node.norm) else 0.0
            if node.open_subsets == 1 and node.lower_bound > subset.threshold + slack and not subset.is_single:
                self._replace(subset, *self.tokens.halves(subset))

    def _leave(self) -> None:
        """Gives up all open subsets, except for the likeliest tokens."""
        likeliest = self.tokens.likeliest(torch.arange(len(self.tokens.square_of)))[:SAMPLE].tolist()
        sample = set(likeliest).difference(self.tokens.alone)
        for node in self._nodes:
            node.code = None
        for node in self._unsplit:
            self._split(node, node.subset)
        for subset, node in list(self._open.items()):
            kept = [self.tokens.token_set([t]) for t in subset.candidates if t in sample and not node.unusual]
            rest = [t for t in subset.candidates if t not in sample]
            if rest and not node.unusual:
                self._given_up.append(self.tokens.token_set(rest))
            self._replace(subset, *kept)

    def _ranked(self) -> list[TokenSet]:
        return sorted(self._open, key=self._rank)

    def _rank(self, subset: TokenSet) -> tuple[bool, float, int]:
        # By density, for a depth-first search: among many culprits of similar size, the subset with the most energy
        # would always be a wide one.
        density = self._expected_energy(subset) / subset.square
        return self._open[subset].unusual, -density, int(subset.places[0])

    def _expected_energy(self, subset: TokenSet) -> float:
        node = self._open[subset]
        return node.energy * subset.expected / max(node.prior, 1e-300)
