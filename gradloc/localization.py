# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""One search: from the units over their threshold to the culprits."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import distributed, evidence, gradients
from .passes import MicroBatch, Passes, Share, UnitName
from .search import Probe, Search, Segment

logger = logging.getLogger(__name__)

# How many of the largest tokens an event names for a spike without a culprit.
_LARGEST_TOKENS = 3

# What the search takes for one unit. With the local meter a micro-batch of one rank: (rank, index). With the reduced
# meter, which cannot tell ranks apart, the micro-batches of all ranks with the same index: (None, index).
GroupName = tuple[int | None, int]

# (unit, row in the micro-batch, position in the response).
Token = tuple[UnitName, int, int]


@dataclass(frozen=True)
class Unit:
    """The figures of one rank's micro-batch that all ranks share when a search begins.

    Args:
        rows (int): Its rows.
        tokens (int): Its response tokens.
        broken_tokens (int): Those of them whose log-prob or coefficient is not a finite number.
        root_square_weight (float): sqrt(Σ w_t²).
        norm (float | None): The norm of its gradient; None while that is not known.
        layer_norms (dict[str, float]): The norm in each layer.
    """

    rows: int
    tokens: int
    broken_tokens: int
    root_square_weight: float
    norm: float | None = None
    layer_norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def token_equivalent(self) -> float:
        if self.root_square_weight > 0 and math.isfinite(self.norm):
            return self.norm / self.root_square_weight
        return 0.0 if self.norm == 0 else math.inf

    def is_over(self, threshold: float) -> bool:
        """Whether its norm is known, and is over τ(S) for this τ."""
        return self.norm is not None and not self.token_equivalent <= threshold


@dataclass
class _BrokenRow:
    """A row that may give log-probs or gradients that are not numbers, and where it may begin to.

    A NaN may show before its place, too: attention multiplies it with the zeros of its causal mask. So the row is
    computed up to this or that token: with the input that breaks it, some are not numbers; without it, all are.

    Args:
        positions (list[int]): Its response tokens.
        low (int), high (int): Indices into `positions`: the first prefix that is broken ends between them, inclusive.
            One behind the last token means that none is.
    """

    unit: UnitName
    row: int
    positions: list[int]
    low: int
    high: int

    @classmethod
    def of(cls, unit: UnitName, row: int, mask: Tensor, broken: Tensor) -> "_BrokenRow":
        """From a row's masks of response tokens and of broken ones among them, each of shape (response length,)."""
        positions = mask.nonzero().flatten().tolist()
        first = int(broken[mask].nonzero()[0])
        # Finite log-probs before it mean that nothing spreads backwards here.
        return cls(unit, row, positions, first, first if first else len(positions) - 1)

    @property
    def settled(self) -> bool:
        return self.low == self.high

    @property
    def found(self) -> bool:
        return self.settled and self.low < len(self.positions)

    def cuts(self, count: int) -> list[int]:
        """Up to `count` indices that cut the interval into even parts."""
        width = self.high - self.low
        return sorted({self.low + (i + 1) * width // (count + 1) for i in range(count)})

    def record(self, index: int, broken: bool) -> None:
        """Takes in whether the prefix that ends with a token is broken."""
        if broken:
            self.high = min(self.high, index)
        else:
            self.low = max(self.low, index + 1)


class Localization:
    """One search, from the suspect units to the culprits; all ranks make the same calls and learn the same.

    With the local meter the units over their threshold are known, and every rank measures a segment of its own in each
    pass. With the reduced meter no unit's norm is known: micro-batches are measured over all ranks first, then their
    segments, one in each pass.

    Args:
        threshold (float): τ.
        budget (int): At most so many passes.
        reserve (int): So many of them are for `drop`, if the budget is larger than that.
        passes (Passes): Measures segments.
        micro_batches (list[MicroBatch]): This rank's.
        units (dict[UnitName, Unit]): Those of all ranks.
        scale (float): The loss scale of the training passes.
        global_norm (float): The norm of the reduced gradient.
        ordinary (float | None): The root mean square of ordinary tokens' gradient norms in an earlier mini-batch.
    """

    def __init__(
        self,
        threshold: float,
        budget: int,
        reserve: int,
        passes: Passes,
        micro_batches: list[MicroBatch],
        units: dict[UnitName, Unit],
        scale: float,
        global_norm: float,
        ordinary: float | None,
    ) -> None:
        self.error: str | None = None
        self.units = units
        self._threshold = threshold
        self._budget = budget
        self._search_budget = budget - reserve if budget > reserve else budget
        self._passes = passes
        self._micro_batches = micro_batches
        self._scale = scale
        self._global_norm = global_norm
        # The units of this very mini-batch tell the level of ordinary tokens better than an earlier one.
        levels = [unit.token_equivalent for unit in units.values() if unit.norm and not unit.is_over(threshold)]
        self._search = Search(threshold, statistics.median(levels) if levels else ordinary)
        self._shared: dict[UnitName, MicroBatch] = {}
        # The tokens that can be culprits, (rank, row, position) each, int64 of shape (n, 3).
        self._candidates: dict[GroupName, Tensor] = {}
        self._groups: dict[GroupName, list[UnitName]] = {}
        if passes.reduced:
            for rank, index in units:
                self._groups.setdefault((None, index), []).append((rank, index))
        else:
            self._groups = {name: [name] for name in self.suspects}
        self._waiting = list(self._groups)
        # Each token's share of the gradient in each layer.
        self._measured: dict[Token, list[float]] = {}
        # Tokens whose coefficient is not a number, and rows whose log-probs are not: known without a measurement.
        self._unmeasurable: list[Token] = []
        self._broken_rows: list[_BrokenRow] = []

    @property
    def suspects(self) -> list[UnitName]:
        """The units known to be over their threshold, the largest first."""
        over = [name for name, unit in self.units.items() if unit.is_over(self._threshold)]
        return sorted(over, key=lambda name: (-self.units[name].token_equivalent, name))

    @property
    def everything_broken(self) -> bool:
        """Whether no token of any rank has a number for its log-prob and coefficient: it is none of them alone."""
        return any(unit.tokens for unit in self.units.values()) and all(
            unit.broken_tokens == unit.tokens for unit in self.units.values()
        )

    @property
    def overflow(self) -> bool:
        """Whether the loss scale may be all that is wrong: fp16 gradients overflowed without a broken token."""
        if self._scale == 1:
            return False
        if self._passes.reduced:
            return not (math.isfinite(self._global_norm) or any(unit.broken_tokens for unit in self.units.values()))
        worst = [self.units[name] for name in self.suspects]
        return any(not math.isfinite(unit.norm) and not unit.broken_tokens for unit in worst)

    @property
    def complete(self) -> bool:
        return self._ended and not self._search.given_up

    @property
    def _ended(self) -> bool:
        """Whether the search came to its end by itself."""
        settled = all(row.settled for row in self._broken_rows)
        return self.error is None and settled and not self._waiting and not self._search.open_segments

    @property
    def diagnosis(self) -> str:
        """What the event is, in a word; the README states the rules."""
        if self.everything_broken:
            return "nonfinite"
        if self._culprits():
            return "tokens"
        if self.overflow:
            return "overflow"
        if self._search.broken:
            return "nonfinite"
        return "diffuse" if self._ended else "incomplete"

    def run(self) -> None:
        """Measures until every suspect unit is settled, the budget is spent, or a pass failed. A collective call."""
        if self.everything_broken:
            self._waiting = []
        if self.overflow:
            self._waiting = [group for group in self._waiting if self._broken_tokens_of(group)]
        try:
            if self._waiting:
                self._passes.rehearse()
            if self._broken_without_tokens():
                self._waiting = []
            self._search_tokens()
            if self._passes.reduced:
                self._measure_units_of_culprits()
        except distributed.RankFailedError as error:
            self.error = str(error)

    def drop(self, module: nn.Module, reduced_norm: Callable[[], float]) -> bool:
        """Computes the mini-batch's gradient anew, without the culprits. A collective call.

        To subtract the culprits' gradient would take fewer passes, but in half precision what is left of a spike would
        be rounding errors.

        Args:
            module (nn.Module): The model.
            reduced_norm (Callable): Measures its gradient.

        Returns:
            bool: Whether the culprits are out; if not, the gradient is as it was.
        """
        culprits = self._shares_by_unit(self._culprits())
        if not culprits or self.error is not None:
            return False
        count = 1 + max(index for _, index in self.units)
        if self._passes.count + count > self._budget:
            logger.warning(
                "The culprits' gradient is not dropped: that takes %d passes, and of bisect_budget_steps=%d the search "
                "has used %d.",
                count,
                self._budget,
                self._passes.count,
            )
            return False
        try:
            with gradients.SetAside(module) as gradient:
                for index in range(count):
                    self._passes.accumulate(partial(self._share_without, culprits, index))
                finite = math.isfinite(reduced_norm())
                if finite:
                    gradient.replace()
            return finite
        except distributed.RankFailedError as error:
            self.error = str(error)
            return False

    def culprit_evidence(self) -> list[dict[str, Any]]:
        """The evidence on each culprit, the largest first."""
        found = [self._evidence_on(token) for token in self._culprits()]
        return sorted(found, key=lambda culprit: -_finite(culprit["grad_norm"]))

    def unit_evidence(self) -> list[dict[str, Any]]:
        """The units known to be over their threshold, the largest first."""
        return [
            {
                "rank": name[0],
                "micro_batch": name[1],
                "rows": unit.rows,
                "tokens": unit.tokens,
                "broken_tokens": unit.broken_tokens,
                "norm": unit.norm,
                "threshold": self._threshold * unit.root_square_weight,
                "token_equivalent": unit.token_equivalent,
                "layer_norms": unit.layer_norms,
            }
            for name, unit in ((name, self.units[name]) for name in self.suspects)
        ]

    def ordinary_layer_norms(self) -> dict[str, float] | None:
        """Each layer's norm for one ordinary token: the median of norm/sqrt(Σw²) over the units under their thresholds.

        What a suspect's norm leaves without its culprits would not do: where a culprit outweighs its unit, the
        remainder is smaller than the rounding and the correlation between the two.

        Returns:
            dict: By layer; None when no other unit has a gradient, or none is known.
        """
        ordinary = [unit for unit in self.units.values() if unit.norm and not unit.is_over(self._threshold)]
        if not ordinary:
            return None
        return {
            layer: statistics.median(unit.layer_norms[layer] / unit.root_square_weight for unit in ordinary)
            for layer in ordinary[0].layer_norms
        }

    def diffuse_evidence(self) -> list[dict[str, Any]]:
        """The smallest parts over their threshold without a token over its own, with the largest tokens measured."""
        found = []
        for segment, norm in self._search.diffuse:
            tokens = self._tokens_of(segment)
            ranks = {name[0] for name, _, _ in tokens}
            largest = sorted((t for t in tokens if t in self._measured), key=self._grad_norm, reverse=True)
            found.append(
                {
                    "rank": ranks.pop() if len(ranks) == 1 else None,
                    "micro_batch": segment.unit[1],
                    "rows": sorted({self._shared[name].rows[row] for name, row, _ in tokens}),
                    "tokens": segment.size,
                    "norm": norm,
                    "threshold": self._search.threshold(segment),
                    "largest_tokens": [
                        {
                            "row": self._shared[name].rows[row],
                            "position": position,
                            "grad_norm": self._grad_norm((name, row, position)),
                        }
                        for name, row, position in largest[:_LARGEST_TOKENS]
                    ],
                }
            )
        return found

    def open_segments(self) -> list[dict[str, Any]]:
        """What the search did not get to, best first; a unit not begun is a segment of all its tokens."""
        unmeasured = self._search.open_segments + self._search.given_up
        begun = [(s.unit, s.size, self._search.threshold(s)) for s in unmeasured if s.size]
        waiting = [
            (
                group,
                sum(self.units[name].tokens for name in self._groups[group]),
                self._threshold * math.hypot(*(self.units[name].root_square_weight for name in self._groups[group])),
            )
            for group in self._waiting
        ]
        return [
            {"rank": rank, "micro_batch": index, "tokens": tokens, "threshold": threshold}
            for (rank, index), tokens, threshold in begun + waiting
        ]

    def _search_tokens(self) -> None:
        width = self._passes.width
        while self._passes.count < self._search_budget:
            if self._passes.reduced and self._waiting:
                self._open_all()
            while self._waiting and len(self._search.open_segments) < width:
                self._open(self._waiting[0])
                del self._waiting[0]
            rows = [row for row in self._broken_rows if not row.settled][:width]
            if rows:
                self._narrow(rows)
                continue
            with distributed.alike():
                probes = self._search.next(width, self._search_budget - self._passes.count)
            if not probes:
                return
            squares = self._passes.measure([partial(self._shares_of, probe) for probe in probes])
            for probe, norms in zip(probes, squares.sqrt().tolist(), strict=True):
                if isinstance(probe, Segment) and probe.size == 1:
                    self._measured[self._tokens_of(probe)[0]] = norms
            known = len(self._search.broken)
            with distributed.alike():
                self._search.record(list(zip(probes, squares.sum(1).sqrt().tolist(), strict=True)))
                for group in self._search.broken[known:]:
                    self._suspect_rows(group)

    def _broken_tokens_of(self, group: GroupName) -> int:
        return sum(self.units[name].broken_tokens for name in self._groups[group])

    def _broken_without_tokens(self) -> bool:
        """Where every gradient is broken and no token is: whether that is so without any token, too.

        One pass over one unit for each rank tells, where a search would go through all units. A collective call.
        """
        units = [unit for unit in self.units.values() if unit.tokens]
        norms = [self._global_norm] if self._passes.reduced else [unit.norm for unit in units]
        if not units or self._scale != 1 or any(map(math.isfinite, norms)) or any(unit.broken_tokens for unit in units):
            return False
        begun = [group for group in self._waiting if any(self.units[name].tokens for name in self._groups[group])]
        sample = begun[: self._passes.width]
        for group in sample:
            self._obtain(group)
        squares = self._passes.measure([partial(self._shares_of, Segment(group, [])) for group in sample])
        broken = not squares.sum(1).isfinite().any()
        self._search.broken += sample if broken else []
        return broken

    def _obtain(self, group: GroupName) -> None:
        """Gives every rank the tokens of a group, and what it needs to measure them. A collective call."""
        if all(name in self._shared for name in self._groups[group]):
            return
        if not self._passes.reduced:
            rank, index = group
            self._shared[group] = distributed.broadcast(lambda: self._micro_batches[index].portable(self._scale), rank)
            return
        # Every rank computes its own data, so that all of them can be had at once, without their inputs.
        tokens = self._passes.exchange(lambda: [mb.portable(self._scale, inputs=False) for mb in self._micro_batches])
        for rank, micro_batches in enumerate(tokens):
            self._shared.update(((rank, index), micro_batch) for index, micro_batch in enumerate(micro_batches))
        for index, micro_batch in enumerate(self._micro_batches):
            self._shared[self._passes.rank, index].inputs = micro_batch.inputs

    def _open(self, name: UnitName) -> None:
        """Opens a suspect for the search. A collective call."""
        self._obtain(name)
        with distributed.alike():
            self._look_into(name)
            self._add_to_search(name, self.units[name].norm)

    def _open_all(self) -> None:
        """Opens all units for the search; none of their norms is known. A collective call."""
        for group in self._waiting:
            self._obtain(group)
        with distributed.alike():
            self._add_all_to_search()

    def _add_all_to_search(self) -> None:
        for group in self._waiting:
            for name in self._groups[group]:
                self._look_into(name)
        energies = {
            group: math.fsum(energy for name in names for energy in self._suspicion(name).square().tolist())
            for group, names in self._groups.items()
        }
        whole = sum(energies.values())
        for group in self._waiting:
            share = math.sqrt(energies[group] / whole) if 0 < whole < math.inf else 1.0
            self._add_to_search(group, self._global_norm * share, measured=False)
        self._waiting = []

    def _look_into(self, name: UnitName) -> None:
        """Notes what of a unit is not a number already."""
        tokens = self._shared[name].tokens
        mask, broken = tokens["response_mask"].bool(), _broken(tokens)
        for row in broken.any(1).nonzero().flatten().tolist():
            self._broken_rows.append(_BrokenRow.of(name, row, mask[row], broken[row]))
        nonfinite = _nonfinite_coefficients(tokens) & tokens["broken"]
        # Padding counts where nothing else is wrong with a row: some aggregations multiply it by zero, which keeps NaN.
        named = nonfinite & (mask | ~(nonfinite & mask).any(1, keepdim=True)) & ~broken.any(1, keepdim=True)
        self._unmeasurable += [(name, row, position) for row, position in named.nonzero().tolist()]

    def _add_to_search(self, group: GroupName, norm: float, measured: bool = True) -> None:
        candidates, suspicion, weights, healthy = [], [], [], True
        for name in self._groups[group]:
            tokens = self._shared[name].tokens
            involved = _involved(tokens)
            places = involved.nonzero()
            candidates.append(torch.cat([torch.full((len(places), 1), name[0]), places], 1))
            suspicion.append(tokens["suspicion"][involved])
            weights.append(tokens["weight"][involved])
            healthy &= not _broken(tokens).any()
        self._candidates[group] = torch.cat(candidates)
        # A loss scale that is too large would pass for broken tokens.
        if self._scale == 1 or math.isfinite(norm):
            self._search.add_unit(
                group, norm, torch.cat(suspicion), torch.cat(weights), probe_empty=healthy, measured=measured
            )

    def _suspicion(self, name: UnitName) -> Tensor:
        tokens = self._shared[name].tokens
        return tokens["suspicion"][_involved(tokens)].double()

    def _suspect_rows(self, group: GroupName) -> None:
        """Has the rows of a group narrowed down whose gradient is broken without a broken token."""
        for name in self._groups[group]:
            mask = self._shared[name].tokens["response_mask"].bool()
            for row in mask.any(1).nonzero().flatten().tolist():
                positions = mask[row].nonzero().flatten().tolist()
                self._broken_rows.append(_BrokenRow(name, row, positions, 0, len(positions)))

    def _narrow(self, rows: list[_BrokenRow]) -> None:
        """One pass that narrows down where in some rows the forward breaks. A collective call."""
        cuts = [(row, index) for row in rows for index in row.cuts(self._passes.width // len(rows))]
        squares = self._passes.measure(
            [partial(self._shares, [(row.unit, row.row, row.positions[i])]) for row, i in cuts]
        )
        for (row, index), broken in zip(cuts, ~squares.sum(1).isfinite(), strict=True):
            row.record(index, bool(broken))

    def _measure_units_of_culprits(self) -> None:
        """With the reduced meter: the norms of the units that hold culprits, as far as the budget goes."""
        for name in sorted({name for name, _, _ in self._culprits()}):
            if self._passes.count >= self._search_budget:
                return
            (squares,) = self._passes.measure([partial(self._whole, name)])
            layer_norms = dict(zip(self._passes.layers, squares.sqrt().tolist(), strict=True))
            self.units[name] = replace(self.units[name], norm=float(squares.sum().sqrt()), layer_norms=layer_norms)

    def _whole(self, name: UnitName) -> dict[int, Share]:
        return {name[0]: Share(self._shared[name], self._shared[name].tokens["response_mask"].bool())}

    def _share_without(self, culprits: Mapping[UnitName, Share], index: int, rank: int) -> Share | None:
        """A rank's own micro-batch less the culprits."""
        if (rank, index) not in self.units:
            return None
        micro_batch = self._micro_batches[index].portable(self._scale)
        keep = micro_batch.tokens["response_mask"].bool()
        culprit = culprits.get((rank, index))
        return Share(micro_batch, keep if culprit is None else keep & ~culprit.keep)

    def _shares_of(self, probe: Probe) -> dict[int, Share]:
        """What the ranks compute for a probe: without any token, their whole micro-batches."""
        if probe.candidates:
            return self._shares(self._tokens_of(probe), probe.factors)
        empty = {
            name: torch.zeros_like(self._shared[name].tokens["response_mask"], dtype=torch.bool)
            for name in self._groups[probe.unit]
        }
        return {name[0]: Share(self._shared[name], keep) for name, keep in empty.items()}

    def _shares(self, tokens: Sequence[Token], factors: Sequence[float] | None = None) -> dict[int, Share]:
        """Tokens of one group, by the rank whose they are."""
        return {name[0]: share for name, share in self._shares_by_unit(tokens, factors).items()}

    def _shares_by_unit(self, tokens: Sequence[Token], factors: Sequence[float] | None = None) -> dict[UnitName, Share]:
        places: dict[UnitName, list[tuple[int, int, float]]] = {}
        for (name, row, position), factor in zip(tokens, factors or [1.0] * len(tokens), strict=True):
            places.setdefault(name, []).append((row, position, factor))
        shares = {}
        for name, found in places.items():
            rows, positions, values = zip(*found, strict=True)
            keep = torch.zeros_like(self._shared[name].tokens["response_mask"], dtype=torch.float32)
            keep[list(rows), list(positions)] = torch.tensor(values)
            shares[name] = Share(self._shared[name], keep.bool() if factors is None else keep)
        return shares

    def _tokens_of(self, probe: Probe) -> list[Token]:
        places = self._candidates[probe.unit][probe.candidates].tolist()
        return [((rank, probe.unit[1]), row, position) for rank, row, position in places]

    def _culprits(self) -> list[Token]:
        rows = [(row.unit, row.row, row.positions[row.low]) for row in self._broken_rows if row.found]
        found = []
        for culprit in self._search.culprits:
            rank, row, position = self._candidates[culprit.unit][culprit.candidate].tolist()
            found.append(((rank, culprit.unit[1]), row, position))
        return self._unmeasurable + rows + found

    def _weight(self, token: Token) -> float:
        name, row, position = token
        return abs(float(self._shared[name].tokens["weight"][row, position]))

    def _grad_norm(self, token: Token) -> float:
        return math.sqrt(sum(norm**2 for norm in self._measured[token])) / self._weight(token)

    def _evidence_on(self, token: Token) -> dict[str, Any]:
        name, row, position = token
        micro_batch, unit = self._shared[name], self.units[name]
        tokens = micro_batch.tokens
        suspicion = tokens["suspicion"][row]
        if token in self._measured:
            grad_norm = self._grad_norm(token)
            layer_norms = [norm / self._weight(token) for norm in self._measured[token]]
        else:
            grad_norm, layer_norms = math.nan, [math.nan] * len(self._passes.layers)
        found = {
            "rank": name[0],
            "micro_batch": name[1],
            "row": micro_batch.rows[row],
            "position": position,
            "grad_norm": grad_norm,
            "threshold": self._threshold,
            "suspicion": float(suspicion[position]),
            "share": grad_norm * self._weight(token) / unit.norm if unit.norm else None,
            **evidence.token_evidence(tokens, row, position),
            "layer_norms": dict(zip(self._passes.layers, layer_norms, strict=True)),
            "response_suspicion": evidence.response_window(suspicion, tokens["response_mask"][row], position),
            "response_kl": evidence.response_kl(tokens, row, position),
        }
        return {**found, "source": evidence.classify(found)}


def _broken(tokens: Mapping[str, Tensor]) -> Tensor:
    return ~tokens["log_prob"].isfinite() & tokens["response_mask"].bool()


def _nonfinite_coefficients(tokens: Mapping[str, Tensor]) -> Tensor:
    return ~(tokens["coefficient"].isfinite() & tokens["entropy_coefficient"].isfinite())


def _involved(tokens: Mapping[str, Tensor]) -> Tensor:
    """The tokens whose share of the gradient is not zero and can be measured, bool of shape (rows, response length)."""
    moved = (tokens["coefficient"] != 0) | (tokens["entropy_coefficient"] != 0)
    return moved & (tokens["weight"] != 0) & ~_nonfinite_coefficients(tokens) & ~_broken(tokens).any(1, keepdim=True)


def _finite(norm: float) -> float:
    """The norm for sorting, NaN on top."""
    return norm if math.isfinite(norm) else math.inf
