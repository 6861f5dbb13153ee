# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Every token over τ in a segment that is over its threshold: by halves, best first, and by numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .probes import Code, Digit, Probe, Segment, is_single
from .tokens import UnitTokens

# A bound must clear the threshold by this fraction of the norms that it comes from before it replaces a measurement: in
# half precision, two measurements of one gradient differ by as much.
_SLACK = 1e-2

# A part under its threshold is still searched for a token over τ if its norm is this many times what ordinary tokens
# give it. Sets of ordinary tokens, whose norms have heavy tails, seldom reach that.
_LOUD = 1.75

# After this many codes in a row without a culprit, a tree reads no more.
_READINGS = 3

# Where the tokens that a pass can measure alone hold this much of the prior, they come before a reading.
_CONCENTRATED = 0.5

# How many of the likeliest tokens are measured of what is given up.
SAMPLE = 3


def patience(candidates: int, count: int) -> float:
    """After how many passes of `count` probes that point at no token, this many candidates are given up."""
    return 2 * math.log(10 * candidates, count + 1) + 2


@dataclass(eq=False)
class _Node:
    """A segment that is over its threshold, or loud, and what is known of its open parts.

    Args:
        segment (Segment): Its tokens.
        norm (float): Its norm.
        loud (bool): Whether it is loud only.
        code (Code | None): The reading under way.
        parts (int): How many parts are open; -1 before the segment is split.
        rest (float): A lower bound of their norm together, by the triangle inequality.
        energy (float), prior (float): What of its squared norm, and of the prior, they hold.
        explained (bool): Whether a part of it was over its own threshold.
    """

    segment: Segment
    norm: float
    loud: bool
    code: Code | None = None
    parts: int = -1
    rest: float = 0.0
    energy: float = 0.0
    prior: float = 0.0
    explained: bool = False


class Tree:
    """Finds every token over τ in a segment that is over its threshold.

    A part S is over its threshold when its norm exceeds τ·sqrt(Σ_{t∈S} w_t²), or is not finite. A single token over it
    is a culprit. Any other part over it is read (see `Code`) or split into halves of the prior. A part under it is
    dropped, or, if loud, split as well, but last of all and only while that finds culprits. The states of a part:

    - open: to be measured; the one with the largest expected energy for its weight first
    - reading: over its threshold; its tokens' numbers are being read
    - split: over its threshold, or loud; its parts are open
    - settled: a single token, or under its threshold and not loud
    - given up: open when the tree was left, because for some passes no probe pointed at a token

    Args:
        tokens (UnitTokens): The unit.
        root (Segment): Where to search.
        norm (float): Its norm.
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms; without it no part is loud.

    Attributes:
        given_up (list[Segment]): What was not measured when the tree was left.
        named (set[Segment]): Single tokens that a code has named.
    """

    def __init__(self, tokens: UnitTokens, root: Segment, norm: float, ordinary: float | None) -> None:
        self.given_up: list[Segment] = []
        self.named: set[Segment] = set()
        self.tokens = tokens
        self._ordinary = ordinary
        self._nodes: list[_Node] = []
        self._open: dict[Segment, _Node] = {}
        self._root = root
        self._settled: list[tuple[Segment, float]] = []
        self._pointless: float = 0
        self._vain_readings = 0
        self._nodes.append(_Node(root, norm, loud=False))

    @property
    def culprits(self) -> list[int]:
        """The tokens that were measured alone over τ."""
        return self.tokens.over

    @property
    def rest(self) -> tuple[Segment, float] | None:
        """The root without the culprits, and its norm, if that happens to have been measured as one segment."""
        rest = set(self._root.candidates).difference(self.culprits)
        return next((found for found in self._settled if rest == set(found[0].candidates)), None)

    @property
    def has_named(self) -> bool:
        """Whether a token that a code has named is still to be measured."""
        return not self.named.isdisjoint(self._open)

    @property
    def ended(self) -> bool:
        return not self._open and all(node.parts >= 0 for node in self._nodes)

    @property
    def diffuse(self) -> list[tuple[Segment, float]]:
        """Segments over their threshold, with their norms, of which no part is."""
        return [(n.segment, n.norm) for n in self._nodes if n.parts == 0 and not n.loud and not n.explained]

    @property
    def open_segments(self) -> list[Segment]:
        """What is not measured of segments over their threshold, best first."""
        return [segment for segment in self._ranked() if not self._open[segment].loud] + [
            node.segment for node in self._nodes if node.parts < 0
        ]

    def probes(self, count: int, passes_left: float) -> list[Probe]:
        """At most `count` probes to measure next, best first; none when the search is over."""
        for node in [node for node in self._nodes if node.parts < 0 and node.code is None]:
            node.code = self._code(node, count, passes_left)
            if node.code is None:
                self._split(node)
        digits = [digit for node in self._nodes if node.code for digit in node.code.unread][:count]
        while len(self._open) + len(digits) < count and self._widen():
            pass
        ranked = self._ranked()
        named = [segment for segment in ranked if segment in self.named]
        found: list[Probe] = [*named, *digits, *(segment for segment in ranked if segment not in self.named)]
        return found[:count]

    def record(self, measured: Sequence[tuple[Probe, float]], count: int) -> None:
        """Takes in the norms of a pass of up to `count` probes; NaN and Inf count as over."""
        segments = [(probe, norm) for probe, norm in measured if probe in self._open]
        searching = bool(self.open_segments)
        found = any(is_single(segment) and self.tokens.is_over(segment.candidates, norm) for segment, norm in segments)
        pointed = [self._record(segment, norm) for segment, norm in segments]
        for probe, norm in measured:
            if isinstance(probe, Digit):
                probe.code.norms[probe.digit] = norm
        for node, code in [(node, node.code) for node in self._nodes if node.code and not node.code.unread]:
            candidate, node.code = code.read(), None
            self._vain_readings += 1
            if candidate is not None and candidate not in self.tokens.alone:
                self._suspect(candidate)
            elif node.parts < 0:
                self._split(node)
        self._infer()
        if found:
            self._vain_readings = 0
        ended = searching and not self.open_segments  # what is left now is loud only
        self._pointless = 0 if found or ended or any(pointed) else self._pointless + 1
        # Parts that are loud only get half of it.
        if self._pointless > patience(len(self._root.candidates), count) / (1 if self.open_segments else 2):
            self._leave()

    def _record(self, segment: Segment, norm: float) -> bool:
        """Takes in a part's norm; returns whether it points at a token."""
        parent, tokens = self._open.pop(segment), self.tokens
        over = tokens.is_over(segment.candidates, norm)
        self._settled.append((segment, norm))
        parent.parts -= 1
        parent.explained |= over
        parent.prior -= tokens.expected(segment.candidates)
        if math.isfinite(norm):
            parent.rest -= norm
            parent.energy = max(parent.energy - norm * norm, 0.0)
        else:
            parent.rest = 0.0
        if len(segment.candidates) > 1 and (over or self._is_loud(segment, norm)):
            self._nodes.append(_Node(segment, norm, loud=not over))
        gains = norm * tokens.threshold(parent.segment.candidates) > parent.norm * tokens.threshold(segment.candidates)
        return over and (gains or not math.isfinite(norm))

    def _is_loud(self, segment: Segment, norm: float) -> bool:
        if self._ordinary is None:
            return False
        squares = [self.tokens.squares[t] for t in segment.candidates]
        square = max(math.fsum(squares), self.tokens.expected(segment.candidates) * math.fsum(self.tokens.squares))
        return norm > max(self.tokens.tau * math.sqrt(min(squares)), _LOUD * self._ordinary * math.sqrt(square))

    def _code(self, node: _Node, count: int, passes_left: float) -> Code | None:
        """Numbers for a node's tokens, unless the budget is too small or suspicion names the likely ones."""
        size = len(node.segment.candidates)
        if self._vain_readings >= _READINGS or node.loud or not math.isfinite(node.norm) or size < 2:
            return None
        code = Code.of(node.segment, node.norm, self.tokens.contrast(node.segment, node.norm, self._ordinary))
        fits = math.ceil(code.digits / count) + 1 <= passes_left
        return code if fits and (code.digits < count or not self._is_concentrated(node.segment, count)) else None

    def _is_concentrated(self, segment: Segment, count: int) -> bool:
        """Whether the prior expects most of a segment's energy in `count` tokens."""
        prior = sorted((self.tokens.prior[t] for t in segment.candidates), reverse=True)
        return math.fsum(prior[:count]) > _CONCENTRATED * math.fsum(prior)

    def _split(self, node: _Node, *parts: Segment) -> None:
        """Opens a node's parts: by default the halves of its prior."""
        node.rest, node.energy = node.norm, node.norm**2 if math.isfinite(node.norm) else 1e300
        node.prior = self.tokens.expected(node.segment.candidates)
        parts = parts or self._halves(node.segment)
        node.parts = len(parts)
        self._open |= dict.fromkeys(parts, node)

    def _replace(self, segment: Segment, *parts: Segment) -> None:
        """Opens parts of an open segment in its place."""
        node = self._open.pop(segment)
        node.parts += len(parts) - 1
        self._open |= dict.fromkeys(parts, node)

    def _halves(self, segment: Segment) -> tuple[Segment, ...]:
        """Two parts with about half of the prior each, the likelier tokens in the first; of a single token, itself."""
        if len(segment.candidates) == 1:
            return (segment,)
        tokens = self.tokens
        ranked = sorted(segment.candidates, key=tokens.likeliest)
        sums = list(accumulate(tokens.prior[t] for t in ranked))
        cut = min(range(len(sums) - 1), key=lambda i: abs(sums[i] - sums[-1] / 2)) + 1
        return tokens.segment(ranked[:cut]), tokens.segment(ranked[cut:])

    def _suspect(self, candidate: int) -> None:
        """Has a token measured alone, and what is open beside it as one."""
        # Parts of what was read may have been measured over their threshold while its code was read.
        unsplit = [n for n in self._nodes if n.parts < 0 and candidate in n.segment.candidates]
        for node in unsplit:
            self._split(node, node.segment)
        holder = next((segment for segment in self._open if candidate in segment.candidates), None)
        if holder is None:
            return
        beside = set(holder.candidates) - {candidate}
        alone = self.tokens.segment([candidate])
        self.named.add(alone)
        self._replace(holder, alone, *([self.tokens.segment(beside)] if beside else []))

    def _widen(self) -> bool:
        """Splits what has the most expected energy, so that there is more to measure; whether there was anything."""
        reading = [node for node in self._nodes if node.parts < 0]
        widest = max((s for s in self._open if len(s.candidates) > 1), key=self._expected_energy, default=None)
        if reading:
            self._split(reading[0])
        elif widest is not None:
            self._replace(widest, *self._halves(widest))
        return bool(reading or widest)

    def _infer(self) -> None:
        """Splits what must be over its threshold because its siblings cannot account for the parent's norm."""
        for segment, node in list(self._open.items()):
            slack = _SLACK * node.norm if math.isfinite(node.norm) else 0.0
            if (
                node.parts == 1
                and node.rest > self.tokens.threshold(segment.candidates) + slack
                and len(segment.candidates) > 1
            ):
                self._replace(segment, *self._halves(segment))

    def _leave(self) -> None:
        """Gives up what is open, but for the likeliest tokens."""
        sample = set(sorted(range(len(self.tokens.prior)), key=self.tokens.likeliest)[:SAMPLE])
        sample -= self.tokens.alone.keys()
        for node in self._nodes:
            node.code = None
            if node.parts < 0:
                self._split(node, node.segment)
        for segment, node in list(self._open.items()):
            kept = [self.tokens.segment([t]) for t in segment.candidates if t in sample and not node.loud]
            rest = [t for t in segment.candidates if t not in sample]
            if rest and not node.loud:
                self.given_up.append(self.tokens.segment(rest))
            self._replace(segment, *kept)
        self._pointless = -math.inf

    def _ranked(self) -> list[Segment]:
        return sorted(self._open, key=self._rank)

    def _rank(self, segment: Segment) -> tuple[bool, float, int]:
        # Depth first: among many culprits of one size, the segment with the most energy is always a wide one.
        density = self._expected_energy(segment) / self.tokens.square(segment.candidates)
        return self._open[segment].loud, -density, segment.candidates[0]

    def _expected_energy(self, segment: Segment) -> float:
        node = self._open[segment]
        return node.energy * self.tokens.expected(segment.candidates) / max(node.prior, 1e-300)
