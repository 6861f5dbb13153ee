# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds every token over τ in a segment over its threshold, by best-first bisection and by codes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .probes import Code, Digit, Probe, Segment, is_single
from .tokens import UnitTokens

# A bound replaces a measurement only if it is over the threshold by this fraction of the norm that it was computed
# from: in half precision, two measurements of the same gradient can differ by this much.
_SLACK = 1e-2

# A part under its threshold is "loud", and still searched for a token over τ, if its norm is this many times the norm
# expected from ordinary tokens. Sets of ordinary tokens seldom reach it, although their norms have heavy tails.
_LOUD = 1.75

# After this many codes in a row without a culprit, a tree reads no more codes.
_READINGS = 3

# If the tokens that one pass can measure alone have more than this fraction of the prior, they are measured instead of
# a code.
_CONCENTRATED = 0.5

# How many of the likeliest tokens are still measured when the rest is given up.
SAMPLE = 3


def patience(candidates: int, count: int) -> float:
    """How many passes of `count` probes may point at no token before a search of this many candidates is given up."""
    return 2 * math.log(10 * candidates, count + 1) + 2


@dataclass(eq=False)
class _Node:
    """A segment that is over its threshold, or loud, with the state of its open parts.

    Args:
        segment (Segment): Its tokens.
        norm (float): Its norm.
        loud (bool): Whether it is loud but not over its threshold.
        code (Code | None): The code that is being read.
        parts (int): How many parts are open; -1 before the segment is split.
        rest (float): A lower bound on the norm of all open parts together, by the triangle inequality.
        energy (float), prior (float): The part of the squared norm, and of the prior, that the open parts have.
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

    A part S is over its threshold if its norm exceeds τ·sqrt(Σ_{t∈S} w_t²) or is not finite. A single token over its
    threshold is a culprit. A larger part over its threshold is read by a `Code`, or split into two halves of about
    equal prior. A part under its threshold is dropped, unless it is loud: then it is split too, but after all others,
    and only as long as this finds culprits. The states of a part:

    - open: to be measured; the part with the largest expected energy per squared weight comes first
    - reading: over its threshold; a code of its tokens is being read
    - split: over its threshold, or loud; its parts are open
    - settled: a measured single token, or measured under its threshold and not loud
    - given up: still open when the search was given up, after several passes in which no probe pointed at a token

    Args:
        tokens (UnitTokens): The unit.
        root (Segment): The segment to search.
        norm (float): Its norm.
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms; if None, no part is loud.

    Attributes:
        given_up (list[Segment]): The segments still unmeasured when the search was given up.
        named (set[Segment]): The single tokens found by a code.
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
        """The tokens measured alone over τ."""
        return self.tokens.over

    @property
    def rest(self) -> tuple[Segment, float] | None:
        """The root without the culprits, and the norm of that; None unless it was measured as one segment."""
        rest = set(self._root.candidates).difference(self.culprits)
        return next((found for found in self._settled if rest == set(found[0].candidates)), None)

    @property
    def has_named(self) -> bool:
        """Whether a token found by a code is still to be measured."""
        return not self.named.isdisjoint(self._open)

    @property
    def ended(self) -> bool:
        return not self._open and not self._unsplit

    @property
    def _unsplit(self) -> list[_Node]:
        return [node for node in self._nodes if node.parts < 0]

    @property
    def diffuse(self) -> list[tuple[Segment, float]]:
        """The segments over their threshold that have no part over its own threshold, with their norms."""
        return [(n.segment, n.norm) for n in self._nodes if n.parts == 0 and not n.loud and not n.explained]

    @property
    def open_segments(self) -> list[Segment]:
        """The unmeasured parts of segments over their threshold, best first, and the segments not yet split."""
        ranked = [segment for segment in self._ranked() if not self._open[segment].loud]
        return ranked + [node.segment for node in self._unsplit]

    def probes(self, count: int, passes_left: float) -> list[Probe]:
        """At most `count` probes to measure next, best first; none when the search is over."""
        for node in [node for node in self._unsplit if node.code is None]:
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
        """Records the norms of a pass of up to `count` probes; NaN and Inf count as over the threshold."""
        segments = [(probe, norm) for probe, norm in measured if probe in self._open]
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
        self._pointless = 0 if found or any(pointed) else self._pointless + 1
        if self._pointless > patience(len(self._root.candidates), count):
            self._leave()

    def _record(self, segment: Segment, norm: float) -> bool:
        """Records a part's norm; returns whether it points at a token."""
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
        """A code for a node's tokens; None if the budget is too small or suspicion already points at a few tokens."""
        size = len(node.segment.candidates)
        if self._vain_readings >= _READINGS or node.loud or not math.isfinite(node.norm) or size < 2:
            return None
        code = Code.of(node.segment, node.norm, self.tokens.contrast(node.segment, node.norm, self._ordinary))
        fits = math.ceil(code.digits / count) + 1 <= passes_left
        return code if fits and (code.digits < count or not self._is_concentrated(node.segment, count)) else None

    def _is_concentrated(self, segment: Segment, count: int) -> bool:
        """Whether `count` tokens have most of a segment's prior."""
        prior = sorted((self.tokens.prior[t] for t in segment.candidates), reverse=True)
        return math.fsum(prior[:count]) > _CONCENTRATED * math.fsum(prior)

    def _split(self, node: _Node, *parts: Segment) -> None:
        """Opens a node's parts; by default, its two halves."""
        node.rest, node.energy = node.norm, node.norm**2 if math.isfinite(node.norm) else 1e300
        node.prior = self.tokens.expected(node.segment.candidates)
        parts = parts or self._halves(node.segment)
        node.parts = len(parts)
        self._open |= dict.fromkeys(parts, node)

    def _replace(self, segment: Segment, *parts: Segment) -> None:
        """Replaces an open segment by parts of it."""
        node = self._open.pop(segment)
        node.parts += len(parts) - 1
        self._open |= dict.fromkeys(parts, node)

    def _halves(self, segment: Segment) -> tuple[Segment, ...]:
        """Two parts with about half of the prior each, likelier tokens first; a single token is returned as it is."""
        if len(segment.candidates) == 1:
            return (segment,)
        tokens = self.tokens
        ranked = sorted(segment.candidates, key=tokens.likeliest)
        sums = list(accumulate(tokens.prior[t] for t in ranked))
        cut = min(range(len(sums) - 1), key=lambda i: abs(sums[i] - sums[-1] / 2)) + 1
        return tokens.segment(ranked[:cut]), tokens.segment(ranked[cut:])

    def _suspect(self, candidate: int) -> None:
        """Opens a token as a segment of its own, and the other tokens of its open segment as another."""
        # While the code was read, parts of its segment may have been measured over their threshold.
        for node in self._unsplit:
            if candidate in node.segment.candidates:
                self._split(node, node.segment)
        holder = next((segment for segment in self._open if candidate in segment.candidates), None)
        if holder is None:
            return
        beside = set(holder.candidates) - {candidate}
        alone = self.tokens.segment([candidate])
        self.named.add(alone)
        self._replace(holder, alone, *([self.tokens.segment(beside)] if beside else []))

    def _widen(self) -> bool:
        """Splits the segment with the most expected energy, to have more probes; returns whether there was one."""
        reading = self._unsplit
        widest = max((s for s in self._open if len(s.candidates) > 1), key=self._expected_energy, default=None)
        if reading:
            self._split(reading[0])
        elif widest is not None:
            self._replace(widest, *self._halves(widest))
        return bool(reading or widest)

    def _infer(self) -> None:
        """Splits, without a measurement, each segment that must be over its threshold given its siblings' norms."""
        for segment, node in list(self._open.items()):
            slack = _SLACK * node.norm if math.isfinite(node.norm) else 0.0
            if (
                node.parts == 1
                and node.rest > self.tokens.threshold(segment.candidates) + slack
                and len(segment.candidates) > 1
            ):
                self._replace(segment, *self._halves(segment))

    def _leave(self) -> None:
        """Gives up all open segments, except for the likeliest tokens."""
        sample = set(sorted(range(len(self.tokens.prior)), key=self.tokens.likeliest)[:SAMPLE])
        sample -= self.tokens.alone.keys()
        for node in self._nodes:
            node.code = None
        for node in self._unsplit:
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
        # By density, for a depth-first search: among many culprits of similar size, the segment with the most energy
        # would always be a wide one.
        density = self._expected_energy(segment) / self.tokens.square(segment.candidates)
        return self._open[segment].loud, -density, segment.candidates[0]

    def _expected_energy(self, segment: Segment) -> float:
        node = self._open[segment]
        return node.energy * self.tokens.expected(segment.candidates) / max(node.prior, 1e-300)
