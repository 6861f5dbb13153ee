# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Decides what to measure next, over several groups at once."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..measure.passes import GroupName
from .bisection import Bisection
from .candidates import Candidates, Found, TokenSet
from .few_tokens import FewTokens

# A group whose search takes more passes than this from here waits until the others have been looked at. Once one of
# them is diffuse, so is the event, and each of the others gets this many passes.
_LONG = 8

# How many groups are searched at once, besides those that wait for the others. In a collapse every rank has some, and
# each costs all ranks time.
MOST_GROUPS = 16

# The norms of tokens measured alone are odd if together (root of the sum of squares) they are over this multiple of
# their group's norm. Gradients in random directions reach 1.
_ODD = 1.5


class Culprit(NamedTuple):
    """A single token over the threshold; `candidate` is its index among the candidates given to `add_group`."""

    group: GroupName
    candidate: int


class Group:
    """One group: the token sets to measure first (the whole group, or the empty token set), and then its search.

    There is none while the group is not measured, nor where it is under its threshold, broken, or given up.
    """

    def __init__(
        self, tokens: Candidates, until: str, ordinary: float | None, probe_empty: bool, may_overflow: bool
    ) -> None:
        self.tokens = tokens
        self.first: list[TokenSet] = []
        self.search: FewTokens | Bisection | None = None
        self._found = Found()  # without a search
        self.broken = self.gave_up = False
        self.norm = math.nan  # until it is measured
        self.whole = tokens.without([])
        self._empty = tokens.token_set([])
        self._until, self._ordinary = until, ordinary
        # Whether to measure the group without any token after its first non-finite norm.
        self._probe_empty = probe_empty
        self._may_overflow = may_overflow

    def begin(self, norm: float) -> None:
        """Starts the search if the group's norm is over its threshold."""
        self.norm = norm
        if self._may_overflow and not math.isfinite(norm):
            return  # each of its tokens would look broken
        self._look_at(norm)
        self._found = Found(rest=(self.whole, norm))
        if self.whole.is_over(norm):
            kind = FewTokens if self._until == "explained" else Bisection
            self.search = kind(self.whole, norm, self._ordinary)

    @property
    def found(self) -> Found:
        return self._found if self.search is None else self.search.found

    @property
    def ended(self) -> bool:
        return not self.first and (self.search is None or self.search.ended)

    @property
    def may_have_more_than_tokens(self) -> bool:
        """Whether a part of its gradient may come from no token: it is diffuse, or its tokens' norms are odd.

        The squared norms of tokens measured alone add up to far more than the group's, as they do if each contains the
        same other gradient.
        """
        if self.ended and self.found.diffuse and not (self.found.culprits and self._until == "exhaustive"):
            return True
        return math.hypot(*self.tokens.alone.values()) > _ODD * self.norm

    def give_up(self) -> None:
        """Ends the search, unless it has ended."""
        if not self.ended and self.whole not in self.first:
            whole = self.whole, self.norm
            self._found = Found(rest=whole, diffuse=[whole], given_up=[self.whole])
            self.first, self.search, self.gave_up = [], None, True

    def next_probes(self, count: int, passes_left: float) -> list[TokenSet]:
        found = self.first[:count]
        if len(found) < count and self.search is not None:
            found = found + self.search.next_probes(count - len(found), passes_left)
        return found

    def add_measurements(self, measured: Sequence[tuple[TokenSet, float]], count: int) -> None:
        self.tokens.alone |= {probe.candidates[0]: norm for probe, norm in measured if probe.is_single}
        first, self.first = self.first, [token_set for token_set in self.first if token_set not in dict(measured)]
        others = [(probe, norm) for probe, norm in measured if probe not in first]
        if others and self.search is not None:
            self.search.add_measurements(others, count)
        for probe, norm in measured:
            if probe is self._empty:
                self.broken = not norm <= 0
            elif probe in first:
                self.begin(norm)
            else:
                self._look_at(norm)
        if self.broken:
            self.first, self.search = [], None

    def _look_at(self, norm: float) -> None:
        if self._probe_empty and not math.isfinite(norm):
            self._probe_empty = False
            self.first.append(self._empty)


class Search:
    """Finds the tokens behind the spikes of the groups added to it.

    It makes no collective call. Every rank makes the same calls to it and gets the same results.

    Args:
        until (str): "explained": search until a few tokens explain each group's spike (see `FewTokens`).
            "exhaustive": search until every token over τ is found (see `Bisection`).
        ordinary (float, optional): The root mean square of ordinary tokens' gradient norms.
    """

    def __init__(self, threshold: float, until: str = "explained", ordinary: float | None = None) -> None:
        self._threshold = threshold
        self._until = until
        self._ordinary = ordinary
        self.groups: dict[GroupName, Group] = {}  # those with at least one candidate
        self._last_open: list[Group] = []  # those whose search had not ended when `_open` was last read
        self.gave_up = False  # whether all searches were ended, because a spike comes from no token

    @property
    def culprits(self) -> list[Culprit]:
        """The culprits found so far, each measured alone over τ."""
        return [Culprit(name, candidate) for name, group in self.groups.items() for candidate in group.found.culprits]

    @property
    def broken(self) -> list[GroupName]:
        """Groups whose gradient is non-finite even without any token."""
        return [name for name, group in self.groups.items() if group.broken]

    @property
    def open_sets(self) -> list[TokenSet]:
        """The token sets over their thresholds whose search has not ended."""
        waiting = [token_set for group in self._open for token_set in group.first if len(token_set.places)]
        return waiting + [token_set for group in self._open for token_set in group.found.open_sets]

    @property
    def _open(self) -> list[Group]:
        """The groups whose search has not ended. One that has is not asked again: there may be thousands."""
        self._last_open = [group for group in self._last_open if not group.ended]
        return self._last_open

    @property
    def given_up(self) -> list[TokenSet]:
        """The unmeasured token sets of groups whose search was given up."""
        return [token_set for group in self.groups.values() for token_set in group.found.given_up]

    @property
    def diffuse(self) -> list[tuple[TokenSet, float]]:
        """The smallest token sets with a spike but no culprit, with their norms."""
        return [found for group in self.groups.values() for found in group.found.diffuse]

    def more_over(self) -> int | None:
        """Estimates from suspicion how many more tokens are over τ; None if no norm was measured to scale it."""
        ratios: list[float] = []
        scores, more = [], 0
        for group in self.groups.values():
            if group.search is None and not group.gave_up:
                continue
            culprits, tokens = set(group.found.culprits), group.tokens
            suspicion = tokens.suspicion
            of_group = suspicion / tokens.square_of.sqrt()
            of_group[[*tokens.alone]] = 0.0
            scores.append(of_group)
            for candidate, norm in tokens.alone.items():
                if math.isfinite(norm):
                    ratios += [norm / float(suspicion[candidate])] if suspicion[candidate] > 0 else []
                    more += candidate not in culprits and tokens.is_over_alone(candidate, norm)
        if not ratios:
            return None
        scale = statistics.median(ratios)
        return more + sum(int((scale * of_group > self._threshold).sum()) for of_group in scores)

    @property
    def may_have_more_than_tokens(self) -> bool:
        """Whether a part of some group's gradient may come from no token."""
        return any(group.may_have_more_than_tokens for group in self.groups.values())

    def loudest(self) -> tuple[GroupName, float] | None:
        """The group with the largest finite norm over its threshold, and that norm; None without any over it."""
        over = [
            (group.norm / group.whole.threshold, name, group.norm)
            for name, group in self.groups.items()
            if group.search is not None and math.isfinite(group.norm)
        ]
        return max(over, key=lambda found: found[0])[1:] if over else None

    def add_norm_without_tokens(self, group: GroupName, norm: float) -> None:
        """Records the norm of a group's gradient without any token.

        If it is over the group's threshold, no token can explain the spike, and all searches end: the gradient that
        comes from no token is in the probes of other groups, too.
        """
        state = self.groups[group]
        state.tokens.without_tokens = norm
        self._last_open = [*self.groups.values()]  # with this norm, what was found over τ may no longer be
        if state.whole.is_over(norm):
            self.gave_up = True
            for each in self.groups.values():
                each.give_up()

    def add_group(
        self,
        group: GroupName,
        norm: float | None,
        suspicion: Tensor,
        weights: Tensor,
        probe_empty: bool = True,
        may_overflow: bool = False,
    ) -> None:
        """Adds a group to search, its s_t and w_t as for `Candidates`.

        Args:
            norm (float | None): The norm of the candidates' gradient; None if it must be measured first.
            probe_empty (bool): Whether to measure the group without any token after a non-finite norm.
            may_overflow (bool): Whether a non-finite norm may come from the loss scale, so that no token is at fault.
        """
        if len(weights) == 0:
            return
        tokens = Candidates(group, self._threshold, suspicion, weights)
        self.groups[group] = added = Group(tokens, self._until, self._ordinary, probe_empty, may_overflow)
        self._last_open.append(added)
        if norm is None:
            added.first.append(added.whole)
        else:
            added.begin(norm)

    def next_probes(self, count: int, passes_left: float = math.inf) -> list[TokenSet]:
        """The probes to measure in the next pass, to be asked for once; none when the search is over.

        What needs more than the passes left in the budget, such as a code, is not started.
        """
        for_few_tokens = [group.search for group in self.groups.values() if isinstance(group.search, FewTokens)]
        if any(search.is_diffuse for search in for_few_tokens):
            for search in for_few_tokens:
                search.curtail(_LONG)
        later = self._later(count, passes_left)
        first = [group for group in self._open if group not in later]
        probes: list[TokenSet] = []
        for groups in first, later:
            while groups and len(probes) < count:
                group = groups.pop(0)
                # The remaining probes are divided equally among the remaining groups.
                part = max((count - len(probes)) // (len(groups) + 1), 1)
                probes += group.next_probes(part, passes_left)
        return probes

    def has_room(self, count: int, passes_left: float = math.inf) -> bool:
        """Whether another group should be added before the next pass of `count` probes."""
        later = len(self._later(count, passes_left))
        return len(self._open) - later < MOST_GROUPS and len(self.open_sets) - later < count

    def _later(self, count: int, passes_left: float) -> list[Group]:
        """The groups with a long search ahead; none if the passes that are left would not be enough for them."""
        ahead = [
            (group, group.search.passes_ahead(count)) for group in self._open if isinstance(group.search, FewTokens)
        ]
        if math.fsum(passes for _, passes in ahead) >= passes_left:
            return []
        return [group for group, passes in ahead if passes > _LONG]

    def add_measurements(self, measured: Sequence[tuple[TokenSet, float]]) -> None:
        """Records the norms of the probes that `next_probes` returned. NaN and Inf count as over the threshold."""
        by_group: dict[GroupName, list[tuple[TokenSet, float]]] = {}
        for probe, norm in measured:
            by_group.setdefault(probe.group, []).append((probe, norm))
        for name, mine in by_group.items():
            self.groups[name].add_measurements(mine, len(mine))
