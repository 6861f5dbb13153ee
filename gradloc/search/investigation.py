# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""One investigation: from the micro-batches over their threshold to the tokens that cause it, in limited time."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..config import GradLocConfig
from ..fsdp import collectives
from ..measure.micro_batch import MicroBatchFigures, MicroBatchName, Token
from ..measure.mini_batch import MiniBatch
from ..measure.passes import GroupName
from ..saved import checked
from ..threshold import largest_first
from .candidates import TokenSet
from .findings import Alone, Findings, Part, WithoutTokens
from .groups import BrokenGradients, Groups, nonfinite_coefficients, nonfinite_log_probs, uncut
from .search import MOST_GROUPS, Search

# Most searches have ended after so many passes.
_LONG_SEARCH = 8

# With "auto", searches may take this fraction of the run's time so far, and this many seconds more, so that the first
# search of a run is not refused because the run is young.
SHARE = 0.03
HEAD_START = 300.0


class TimeLimit:
    """How long one search may take: on rank 0's clock, so that all ranks stop together."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds  # the same on every rank; None for no limit
        self._clock, self._begun = clock, clock()
        self.has_ended_search = False  # whether the search was told to end

    def is_up(self) -> bool:
        """Whether the search must end, the same on every rank. A collective call, unless there is no limit."""
        if self.seconds is not None and not self.has_ended_search:
            limit = self.seconds
            self.has_ended_search = collectives.broadcast(lambda: self._clock() - self._begun >= limit, 0)
        return self.has_ended_search


class SearchTime:
    """How long the searches of a run took, and how long the next one may take.

    Every rank counts by its own clock, and only what rank 0 has counted is used.
    """

    def __init__(self, setting: float | str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._setting = setting  # `bisect_budget_seconds`
        self._clock = clock
        self._begun = clock()  # when the run would have begun without interruptions
        self._spent = 0.0

    @contextmanager
    def search(self) -> Iterator[TimeLimit]:
        """Wraps a search, whose time is counted, also after an error. A collective call."""
        begun = self._clock()
        try:
            yield self._limit(lambda: max(HEAD_START + SHARE * self._run() - self._spent, 0.0))
        finally:
            self._spent += self._clock() - begun

    def drill(self) -> TimeLimit:
        """The limit for a drill, which is not counted: that of a run's first search. A collective call."""
        return self._limit(lambda: HEAD_START)

    def state_dict(self) -> dict[str, float]:
        """The seconds of the run and of its searches; those of rank 0 are saved."""
        return {"run": self._run(), "searches": self._spent}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None the run starts over."""
        new = {"run": 0.0, "searches": 0.0}
        state = new if state is None else checked(state, new, "search_time")
        self._begun, self._spent = self._clock() - float(state["run"]), float(state["searches"])

    def _run(self) -> float:
        return self._clock() - self._begun

    def _limit(self, auto: Callable[[], float]) -> TimeLimit:
        """One of `bisect_budget_seconds`; with "auto", of what `auto` returns on rank 0. A collective call."""
        setting = self._setting
        if setting is None:
            return TimeLimit(None, self._clock)
        seconds = collectives.broadcast(lambda: auto() if setting == "auto" else float(setting), 0)
        return TimeLimit(seconds, self._clock)


def investigate(
    mini_batch: MiniBatch,
    threshold: float,
    config: GradLocConfig,
    ordinary: float | None,
    time_limit: TimeLimit,
    reserve: bool = False,
    prevented_by: str | None = None,
) -> Findings:
    """Finds the tokens behind the spikes of a mini-batch. A collective call, which leaves no gradient.

    Args:
        ordinary (float | None): The root mean square of ordinary tokens' gradient norms in an earlier mini-batch.
        reserve (bool): Whether to leave budget for recomputing every micro-batch.
        prevented_by (str, optional): An error that all ranks know of, for which nothing is measured.

    Returns:
        Findings: The same on every rank; the budget, one of passes and of seconds, or a failed pass may have ended it.

    Raises:
        RankFailedError: The data could not be exchanged, or what was found could not be put together.
    """
    figures, global_norm = mini_batch.gather_figures(), mini_batch.global_norm()
    search = _Investigation(mini_batch, figures, global_norm, threshold, config, ordinary, time_limit, reserve)
    if prevented_by is None:
        search.run()
    else:
        search.error = prevented_by
    with collectives.raised_on_all_ranks(mini_batch.model.device):
        return search.findings()


@dataclass
class _Investigation:
    """Measures what `Search` asks for until the search ends. All ranks make the same calls and get the same results."""

    mini_batch: MiniBatch
    figures: dict[MicroBatchName, MicroBatchFigures]
    global_norm: float
    threshold: float
    config: GradLocConfig
    ordinary: float | None
    time_limit: TimeLimit
    reserve: bool
    error: str | None = None
    _measured: dict[Token, Alone] = field(default_factory=dict)
    _without_tokens: WithoutTokens | None = None

    def __post_init__(self) -> None:
        figures, threshold = self.figures, self.threshold
        self._device = self.mini_batch.model.device
        recomputed = 1 + max(index for _, index in figures) if self.reserve else 0
        budget = self.config.bisect_budget_steps
        self._budget = budget - recomputed if recomputed < budget else budget
        # The other micro-batches give a better estimate for ordinary tokens than an earlier mini-batch.
        below = [each.token_equivalent for each in figures.values() if each.norm and not each.is_over(threshold)]
        levels = [level for level in below if level]
        ordinary = statistics.median(levels) if levels else self.ordinary
        self._search = Search(threshold, self.config.bisect_until, ordinary)
        self._groups = Groups(self.mini_batch, figures, threshold)
        self._meter, self._passes = self._groups.meter, self._groups.passes
        self._waiting = list(self._groups.members)
        self._broken = BrokenGradients(self.global_norm, figures, self._groups)

    @property
    def _culprits(self) -> list[Token]:
        return self._broken.culprits + [self._groups.tokens_of(*culprit)[0] for culprit in self._search.culprits]

    def findings(self) -> Findings:
        """The result so far."""
        search, culprits = self._search, self._culprits
        # Whether the search ended by itself, not by an error or the budget.
        ended = self.error is None and not (self._broken.unsettled or self._waiting or search.open_sets)
        # Whether a group is diffuse; in an exhaustive search, whether a token set was given up.
        left = bool(search.diffuse if self.config.bisect_until == "explained" else search.given_up)
        rests = {name: search.groups[name].found.rest for name in self._groups.members if name in search.groups}
        return Findings(
            threshold=self.threshold,
            until=self.config.bisect_until,
            layers=self._meter.layers,
            figures=self.figures,
            micro_batches=self._groups.micro_batches,
            groups=list(self._groups.members),
            culprits=culprits,
            measured=self._measured,
            rests={group: self._part(*rest) for group, rest in rests.items() if rest is not None},
            diffuse=[self._diffuse(token_set, norm) for token_set, norm in search.diffuse],
            open=self._open_parts(),
            without_tokens=self._without_tokens,
            more_over=search.more_over(),
            diagnosis=self._diagnosis(culprits, ended, left),
            explained=self._explained() if culprits and ended else False,
            complete=ended and not left,
            passes=self._passes.count,
            budget=self.config.bisect_budget_steps,
            budget_seconds=self.time_limit.seconds,
            out_of_time=self.time_limit.has_ended_search and not ended,
            error=self.error,
        )

    def _diagnosis(self, culprits: list[Token], ended: bool, left: bool) -> str:
        if self._broken.are_everything:
            return "nonfinite"
        if culprits and self.config.bisect_until == "explained":
            return "incomplete" if not ended else "diffuse" if left else "tokens"
        if culprits:
            return "tokens"
        if self._broken.may_be_overflow:
            return "overflow"
        if self._broken.groups:
            return "nonfinite"
        return "diffuse" if ended else "incomplete"

    def _explained(self) -> bool | None:
        """Of a search that ended with culprits; see `Findings`."""
        broken = {row.micro_batch for row in self._broken.rows}
        found: set[bool | None] = {None if self._broken.groups or self._broken.may_be_overflow else True}
        for name in self._groups.candidates:
            members, searched = self._groups.members[name], self._search.groups.get(name)
            norm = self.figures[members[0]].norm
            if searched is not None or self._broken.tokens_of(name):
                rest = None if searched is None or broken & set(members) else searched.found.rest
                found.add(None if rest is None else not rest[0].is_over(rest[1]))
            elif norm is not None and math.isfinite(norm):
                found.add(False)  # it is over its threshold, and has no token that can move
        return False if False in found else None if None in found else True

    def _part(self, token_set: TokenSet, norm: float | None = None) -> Part:
        rank, micro_batch = token_set.group
        return Part(rank, micro_batch, len(token_set.places), token_set.threshold, norm)

    def _diffuse(self, token_set: TokenSet, norm: float) -> Part:
        places = self._groups.candidates[token_set.group][token_set.places, :2]
        index, micro_batches = token_set.group[1], self._groups.micro_batches
        responses = {(rank, row) for rank, row in places.tolist()}
        ranks = {rank for rank, _ in responses}
        rows = sorted({micro_batches[rank, index].rows[row] for rank, row in responses})
        # The largest tokens of the whole micro-batch, because this set may lack them.
        tokens = self._groups.tokens_of(token_set.group, *token_set.of.alone)
        largest = sorted(tokens, key=lambda token: largest_first(self._measured[token].grad_norm))
        rank = ranks.pop() if len(ranks) == 1 else None
        return replace(self._part(token_set, norm), rank=rank, rows=tuple(rows), largest=tuple(largest))

    def _open_parts(self) -> list[Part]:
        found = [self._part(token_set) for token_set in (*self._search.open_sets, *self._search.given_up)]
        for rank, micro_batch in self._waiting:
            of_group = [self.figures[name] for name in self._groups.members[rank, micro_batch]]
            threshold = self.threshold * math.hypot(*(each.root_square_weight for each in of_group))
            found.append(Part(rank, micro_batch, sum(each.tokens for each in of_group), threshold))
        return found

    def run(self) -> None:
        """Measures until every suspect group is settled, passes or seconds are spent, or a pass fails. Collective."""
        if self._broken.are_everything:
            self._waiting = []
        if self._broken.may_be_overflow:
            self._waiting = [group for group in self._waiting if self._broken.tokens_of(group)]
        try:
            if self._waiting and not self.time_limit.is_up():
                if self._broken.are_without_tokens(self._waiting):
                    self._waiting = []
                self._search_tokens()
            self._measure_micro_batches_of_culprits()
        except collectives.RankFailedError as error:
            self.error = str(error)

    def _search_tokens(self) -> None:
        while (left := self._budget - self._passes.count) > 0:
            for opened in range(1, MOST_GROUPS + 1):
                if not (self._waiting and self._search.has_room(self._meter.width, left)):
                    break
                self._open()
                # Not after each one: to ask takes all ranks about as long.
                if opened % 4 == 0 and self.time_limit.is_up():
                    return
            with collectives.raised_on_all_ranks(self._device):
                measure = self._next_pass(left)
            if (measure is None and not self._waiting) or self.time_limit.is_up():
                return
            (measure or self._open)()

    def _next_pass(self, passes_left: int) -> Callable[[], None] | None:
        """Returns what makes the next pass, a collective call; None if nothing is to be measured of the groups so far.

        Where a part of some group's gradient may come from no token, or after `_LONG_SEARCH` passes, the loudest is
        measured once without any: a loss that depends on the rows is in every probe, and so every token is over τ.
        """
        if self._broken.unsettled:
            return self._broken.narrow
        if self._without_tokens is None:
            suspicious = self._search.may_have_more_than_tokens or self._passes.count >= _LONG_SEARCH
            if suspicious and (loudest := self._search.loudest()) is not None:
                return partial(self._measure_without_tokens, *loudest)
        probes = self._search.next_probes(self._meter.width, passes_left)
        return partial(self._measure, probes) if probes else None

    def _measure(self, probes: Sequence[TokenSet]) -> None:
        squares = self._groups.measure([partial(self._groups.subsets, p.group, p.places, p.factors) for p in probes])
        for probe, of_probe in zip(probes, squares, strict=True):
            if probe.is_single:
                self._record_alone(self._groups.tokens_of(probe.group, *probe.candidates)[0], of_probe)
        with collectives.raised_on_all_ranks(self._device):
            self._search.add_measurements(list(zip(probes, squares.sum(1).sqrt().tolist(), strict=True)))
            for group in self._search.broken:
                self._broken.add_group(group)

    def _record_alone(self, token: Token, squares: Tensor) -> None:
        name, row, position = token
        weight = abs(float(self._groups.micro_batches[name].tokens["weight"][row, position]))
        self._measured[token] = Alone(weight, float(squares.sum().sqrt()), squares.sqrt() / weight)

    def _measure_without_tokens(self, group: GroupName, whole: float) -> None:
        (squares,) = self._groups.measure([partial(self._groups.subsets, group)])
        with collectives.raised_on_all_ranks(self._device):
            layer_norms = dict(zip(self._meter.layers, squares.sqrt().tolist(), strict=True))
            self._without_tokens = found = WithoutTokens(group, whole, layer_norms)
            if math.isfinite(found.norm):
                self._search.add_norm_without_tokens(group, found.norm)
            if self._search.gave_up:
                self._waiting = []

    def _open(self) -> None:
        """Adds the next group to the search, or all groups if their norms are unknown. A collective call."""
        groups = self._waiting[:1]
        known = all(self.figures[name].norm is not None for name in self._groups.members[groups[0]])
        if not known:
            groups = self._waiting
        for group in groups:
            self._groups.obtain(group)
        with collectives.raised_on_all_ranks(self._device):
            found = [(group, *self._groups.list_candidates(group)) for group in groups]
            # The group of which suspicion predicts the most energy (squared norm) first.
            for group, suspicion, weights in sorted(found, key=lambda f: -math.fsum(f[1].double().square().tolist())):
                self._broken.look_into(group)
                self._add_to_search(group, suspicion, weights, known)
        self._waiting = self._waiting[len(groups) :]

    def _add_to_search(self, group: GroupName, suspicion: Tensor, weights: Tensor, known: bool) -> None:
        tokens = self._groups.tokens(group).values()
        # With broken tokens, the group's norm says nothing about its other tokens.
        known &= not (self._broken.tokens_of(group) or any(nonfinite_coefficients(t).any() for t in tokens))
        norm = self.figures[self._groups.members[group][0]].norm if known else None
        # An overflow caused by the loss scale would look like broken tokens.
        may_overflow = self.mini_batch.scale != 1
        if len(weights):
            healthy = not any(nonfinite_log_probs(t).any() for t in tokens)
            self._search.add_group(group, norm, suspicion, weights, healthy, may_overflow)
        elif norm is not None and not math.isfinite(norm) and not may_overflow:
            self._broken.add_group(group)

    def _measure_micro_batches_of_culprits(self) -> None:
        """Measures the unknown norms of micro-batches with culprits, within the budget. A collective call."""
        for name in sorted({name for name, _, _ in self._culprits if self.figures[name].norm is None}):
            if self._passes.count >= self._budget or self.time_limit.is_up():
                return
            whole = partial(self._groups.part, name, uncut(self._groups.micro_batches[name].tokens))
            (squares,) = self._groups.measure([whole])
            measured = {"norm": float(squares.sum().sqrt()), "layers": self._meter.layers, "by_layer": squares.sqrt()}
            self.figures[name] = replace(self.figures[name], **measured)
