# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""One investigation: from the micro-batches over their threshold to the tokens that cause it."""

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..config import GradLocConfig
from ..fsdp import collectives
from ..measure.mini_batch import MiniBatch
from ..measure.probes import GroupName
from .broken_gradients import BrokenGradients
from .codes import is_single
from .groups import Groups, Token
from .search import Search
from .time_limit import TimeLimit


class WithoutTokens(NamedTuple):
    """The gradient of a group with all coefficients zero: that of an auxiliary loss, if there is one.

    Args:
        group (GroupName): The group.
        whole (float): The norm of its gradient with all tokens.
        layer_norms (dict[str, float]): By layer, the norm without any.
    """

    group: GroupName
    whole: float
    layer_norms: dict[str, float]

    @property
    def norm(self) -> float:
        return math.hypot(*self.layer_norms.values())


class Investigation:
    """Measures what `Search` asks for until the search ends. All ranks make the same calls and get the same results.

    Making one is a collective call, too.

    Args:
        mini_batch (MiniBatch): The current gradient.
        threshold (float): τ.
        config (GradLocConfig): How to search, and how many passes it may take.
        ordinary (float | None): The root mean square of ordinary tokens' gradient norms in an earlier mini-batch.
        time_limit (TimeLimit): How long it may take.
        reserve (bool): Whether to leave budget for recomputing every micro-batch.

    Attributes:
        mini_batch (MiniBatch), threshold (float), config (GradLocConfig), time_limit (TimeLimit): As given.
        search (Search): Decides what to measure.
        error (str | None): The error that stopped it.
        passes (Passes): Runs its passes, and counts them.
        figures (dict[MicroBatchName, MicroBatchFigures]): Of the micro-batches of all ranks, with the norms measured
            during the search.
        groups (Groups): The groups to search.
        layers (list[str]): The layers, in the order of the norms.
        measured (dict[Token, list[float]]): The norms of the weighted gradient of each token measured alone, by layer.
        without_tokens (WithoutTokens | None): What a group's gradient is without any token; None if not measured.
    """

    def __init__(
        self,
        mini_batch: MiniBatch,
        threshold: float,
        config: GradLocConfig,
        ordinary: float | None,
        time_limit: TimeLimit,
        reserve: bool = False,
    ) -> None:
        self.error: str | None = None
        self.mini_batch = mini_batch
        self.figures = figures = mini_batch.gather_figures()
        self.measured: dict[Token, list[float]] = {}
        self.config = config
        self.time_limit = time_limit
        self.threshold = threshold
        self._meter = mini_batch.model.meter
        self.layers = self._meter.layers
        self.passes = mini_batch.model.passes(mini_batch.micro_batches, mini_batch.scale)
        recomputed = 1 + max(index for _, index in figures) + self.passes.rehearsals_due(True) if reserve else 0
        budget = config.bisect_budget_steps
        self._budget = budget - recomputed if recomputed < budget else budget
        self._scale = mini_batch.scale
        self._device = mini_batch.model.device
        # The other micro-batches give a better estimate for ordinary tokens than an earlier mini-batch.
        below = [each.token_equivalent for each in figures.values() if each.norm and not each.is_over(threshold)]
        levels = [level for level in below if level]
        self.search = Search(threshold, config.bisect_until, statistics.median(levels) if levels else ordinary)
        self.groups = Groups(mini_batch, figures, threshold)
        self._waiting = list(self.groups.members)
        self._broken = BrokenGradients(mini_batch, figures, self.groups)
        self.without_tokens: WithoutTokens | None = None

    @property
    def waiting(self) -> list[GroupName]:
        """The groups whose search has not started."""
        return list(self._waiting)

    @property
    def everything_broken(self) -> bool:
        """See `BrokenGradients.are_everything`."""
        return self._broken.are_everything

    @property
    def overflow(self) -> bool:
        """See `BrokenGradients.may_be_overflow`."""
        return self._broken.may_be_overflow

    @property
    def broken(self) -> list[GroupName]:
        """The groups whose gradient is non-finite even without any token."""
        return self._broken.groups + self.search.broken

    @property
    def ended(self) -> bool:
        """Whether the search ended by itself, not by an error or the budget."""
        settled = not self._broken.rows.unsettled
        return self.error is None and settled and not self._waiting and not self.search.open_sets

    @property
    def out_of_time(self) -> bool:
        """Whether the search was ended by its limit in seconds, the same on every rank."""
        return self.time_limit.has_ended_search and not self.ended

    @property
    def explained(self) -> bool | None:
        """Whether each micro-batch over its threshold was measured under it without the culprits; None if unknown.

        It is unknown if a rest could not be measured (a row has non-finite log-probs) or was not measured (in an
        exhaustive search).
        """
        if not (self.culprits and self.ended):
            return False
        broken, members = {row.micro_batch for row in self._broken.rows.rows}, self.groups.members
        if any(self._is_over_without_tokens(group) for group in self.groups.candidates):
            return False
        rests = [
            self.search.rest(group) if self.search.knows(group) and not broken & set(members[group]) else None
            for group in self.groups.candidates
            if self.search.knows(group) or self._broken.tokens_of(group)
        ]
        if any(rest is not None and self.search.is_over(*rest) for rest in rests):
            return False
        return None if None in rests or self.broken or self.overflow else True

    @property
    def complete(self) -> bool:
        """Whether the search ended by itself without a diffuse group; if exhaustive, without an unmeasured token."""
        return self.ended and not self.left

    @property
    def left(self) -> bool:
        """Whether a group is diffuse; in an exhaustive search, whether a token set was given up."""
        return bool(self.search.diffuse if self.config.bisect_until == "explained" else self.search.given_up)

    @property
    def culprits(self) -> list[Token]:
        """The tokens found."""
        found = []
        for culprit in self.search.culprits:
            rank, row, position = self.groups.candidates[culprit.group][culprit.candidate].tolist()
            found.append(((rank, culprit.group[1]), row, position))
        return self._broken.rows.culprits + found

    def run(self) -> None:
        """Measures until every suspect group is settled, the budget is spent, or a pass fails. A collective call.

        The budget is one of passes and of seconds.
        """
        if self.everything_broken:
            self._waiting = []
        if self.overflow:
            self._waiting = [group for group in self._waiting if self._broken.tokens_of(group)]
        try:
            if self._waiting and not self.time_limit.is_up():
                self.passes.rehearse(self._meter.reduces)
                if self._broken.are_without_tokens(self._waiting, self.passes):
                    self._waiting = []
                self._search_tokens()
            self._measure_micro_batches_of_culprits()
        except collectives.RankFailedError as error:
            self.error = str(error)

    def _search_tokens(self) -> None:
        width = self._meter.width
        while self.passes.count < self._budget:
            while self._waiting and self.search.has_room(width, self._budget - self.passes.count):
                self._open()
            rows = self._broken.rows.unsettled[:width]
            if rows:
                if self.time_limit.is_up():
                    return
                self._broken.narrow(rows, self.passes)
                continue
            if self._measure_without_tokens():
                continue
            if self.time_limit.has_ended_search:
                return
            with collectives.raised_on_all_ranks(self._device):
                probes = self.search.next_probes(width, self._budget - self.passes.count)
            if not probes:
                if not self._waiting:
                    return
                self._open()
                continue
            if self.time_limit.is_up():
                return
            squares = self._meter.measure(self.passes, [partial(self.groups.subsets_of, probe) for probe in probes])
            for probe, norms in zip(probes, squares.sqrt().tolist(), strict=True):
                if is_single(probe):
                    self.measured[self.groups.tokens_of(probe)[0]] = norms
            known = set(self.search.broken)
            with collectives.raised_on_all_ranks(self._device):
                self.search.add_measurements(list(zip(probes, squares.sum(1).sqrt().tolist(), strict=True)))
                for group in self.search.broken:
                    if group not in known:
                        self._broken.suspect_rows(group)

    def _measure_without_tokens(self) -> bool:
        """Measures the loudest group, once, if a part of some group's gradient may come from no token.

        A collective call.

        Returns:
            bool: Whether it ran a pass.
        """
        suspicious = self.without_tokens is None and self.search.suspicious
        loudest = self.search.loudest() if suspicious else None
        if loudest is None or self.time_limit.is_up():
            return False
        group, whole = loudest
        (squares,) = self._meter.measure(self.passes, [partial(self.groups.empty_subsets, group)])
        with collectives.raised_on_all_ranks(self._device):
            layer_norms = dict(zip(self.layers, squares.sqrt().tolist(), strict=True))
            self.without_tokens = found = WithoutTokens(group, whole, layer_norms)
            if math.isfinite(found.norm):
                self.search.add_norm_without_tokens(group, found.norm)
            if self.search.gave_up:
                self._waiting = []
        return True

    def _is_over_without_tokens(self, group: GroupName) -> bool:
        """Whether a group over its threshold has no token that can move, so that there was nothing to search."""
        norm = self.figures[self.groups.members[group][0]].norm
        searched = self.search.knows(group) or self._broken.tokens_of(group)
        return not searched and norm is not None and math.isfinite(norm)

    def _open(self) -> None:
        """Adds the next group to the search, or all groups if their norms are unknown. A collective call."""
        groups = self._waiting[:1]
        known = all(self.figures[name].norm is not None for name in self.groups.members[groups[0]])
        if not known:
            groups = self._waiting
        for group in groups:
            self.groups.obtain(group)
        with collectives.raised_on_all_ranks(self._device):
            for group in groups if known else sorted(groups, key=self.groups.suspicion, reverse=True):
                self._broken.look_into(group)
                self._add_to_search(group, known)
        self._waiting = self._waiting[len(groups) :]

    def _add_to_search(self, group: GroupName, known: bool) -> None:
        found = self.groups.list_candidates(group)
        # With broken tokens, the group's norm says nothing about its other tokens.
        known &= not self._broken.tokens_of(group) and found.all_measurable
        norm = self.figures[self.groups.members[group][0]].norm if known else None
        # An overflow caused by the loss scale would look like broken tokens.
        if self._scale != 1 and norm is not None and not math.isfinite(norm):
            return
        if len(found.weights):
            self.search.add_group(group, norm, found.suspicion, found.weights, probe_empty=found.healthy)
        elif norm is not None and not math.isfinite(norm):
            self._broken.groups.append(group)
            self._broken.suspect_rows(group)

    def _measure_micro_batches_of_culprits(self) -> None:
        """Measures the unknown norms of micro-batches with culprits, within the budget. A collective call."""
        for name in sorted({name for name, _, _ in self.culprits if self.figures[name].norm is None}):
            if self.passes.count >= self._budget or self.time_limit.is_up():
                return
            (squares,) = self._meter.measure(self.passes, [partial(self.groups.whole, name)])
            layer_norms = dict(zip(self._meter.layers, squares.sqrt().tolist(), strict=True))
            self.figures[name] = replace(self.figures[name], norm=float(squares.sum().sqrt()), layer_norms=layer_norms)
