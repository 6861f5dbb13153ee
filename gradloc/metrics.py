# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics of an update, the same on every rank, and the warnings that need no spike."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import torch
from torch import Tensor

from . import judge
from .evidence.token_facts import off_the_rollout
from .facts import NAMES, SHIFTS, TrainedRow
from .fsdp import collectives
from .guarded import guarded
from .judging import asked, in_form
from .layers.reduced_norms import ReducedNorms
from .lines import Answer, Event, RunRecords, Where
from .measure.mini_batch import MiniBatch
from .measure.passes import WatchedModel
from .measure.update_facts import own_facts
from .sources import UNLIKELY

OWN_FIGURES = 6
# The part of the gradient that other passes have at least, where the last one alone can be told from all.
LAST = 0.1
# Figures of spikes that are added up over an update.
_OF_SPIKES = ("triggered", "culprits", "passes", "seconds", "out_of_time", "skipped")


def own_figures(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What one rank knows of a mini-batch, the tokens of its micro-batches, for `UpdateMetrics.take_in`. No host sync.

    Only response tokens with a weight in the loss count, except for those that are compared with the rollout.

    Returns:
        Tensor: float64 of shape (OWN_FIGURES,): the largest log-ratio and the largest size of a log-ratio to the
            rollout (−Inf without data); how many response tokens are misaligned with the rollout, of how many; how many
            tokens are unlikely, of how many.
    """
    known = [name for name in ("old_log_prob", "rollout_log_prob") if all(name in each for each in micro_batches)]
    names = ("response_mask", "weight", "log_prob", *known)
    # All together, for few operations.
    columns = [torch.stack([tokens[name] for name in names]).flatten(1) for tokens in micro_batches]
    of = dict(zip(names, values := torch.cat(columns, 1), strict=True))
    mask, has_weight = values[:2] != 0
    log_prob, counted = of["log_prob"], mask & has_weight
    ratios = log_prob.new_full((2, len(mask)), -math.inf)
    if "old_log_prob" in of:
        torch.sub(log_prob, of["old_log_prob"], out=ratios[0])
    if "rollout_log_prob" in of:
        torch.sub(log_prob, of["rollout_log_prob"], out=ratios[1]).abs_()
        compared = [mask & off_the_rollout(ratios[1]), mask]
    else:
        compared = [mask & False] * 2
    # NaN counts as unlikely, and as an infinite ratio.
    unlikely = counted & ~(log_prob >= math.log(UNLIKELY))
    counts = torch.stack([*compared, unlikely, counted]).sum(1, dtype=torch.float64)
    ratios.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf).masked_fill_(~counted, -math.inf)
    return torch.cat([ratios.amax(1), counts])


class UpdateMetrics:
    """Collects the figures of an update's mini-batches, and what is summed up of its spikes."""

    def __init__(self) -> None:
        self.drill_found: bool | None = None  # whether the update's drill found its token; None without a drill
        self._spikes: Counter[str] = Counter()  # what is summed up of the spikes, by the metric's name
        self._maxima, self._counts = [-math.inf] * 2, [0.0] * 4
        # The token-equivalent norm of each mini-batch, and its τ; None in the warm-up of an automatic one.
        self._levels: list[tuple[float, float | None]] = []

    def take_in(self, by_rank: Tensor) -> None:
        """Adds what `own_figures` returned on each rank, on the CPU."""
        for of_rank in by_rank.tolist():
            self._maxima = [*map(max, self._maxima, of_rank[:2])]
            self._counts = [*map(add, self._counts, of_rank[2:])]

    def take_in_level(self, token_norm: float, threshold: float | None) -> None:
        """Adds the token-equivalent norm of a mini-batch and its τ; None in the warm-up of an automatic one."""
        self._levels.append((token_norm, threshold))

    def add_spike(self, event: Event | None, skipped: bool = False) -> None:
        """Counts a spike, whose event an error may have prevented, and whether its step was skipped."""
        self._spikes.update(triggered=1, skipped=int(skipped))
        if event is not None:
            self._spikes.update({name: event[name] for name in ("passes", "seconds", "out_of_time")})
            self._spikes.update(culprits=len(event["culprits"]))

    def metrics(self) -> dict[str, float]:
        """The metrics of docs/use/configuration.md that have data. Drills count in `drill_found` alone.

        `threshold` is τ in the mini-batch with the largest norm, or in the last one if that was in the warm-up of an
        automatic threshold. For `ratio_max` small ratios do not count: a token's coefficient shrinks with its ratio. A
        log-prob that is NaN makes the ratios infinite and counts as unlikely.
        """
        # -inf is that of no token.
        ratio_max, rollout_ratio_max = (
            None if log_ratio == -math.inf else math.exp(log_ratio) if log_ratio < 700 else math.inf
            for log_ratio in self._maxima
        )
        misaligned, compared, unlikely, tokens = self._counts
        # The last of equal norms.
        largest, threshold = max(reversed(self._levels), key=lambda level: level[0], default=(0.0, None))
        margins = [norm / of_norm for norm, of_norm in self._levels if of_norm is not None]
        figures = {
            "misaligned_share": misaligned / compared if compared else None,
            "threshold": self._levels[-1][1] if threshold is None and self._levels else threshold,
            "drill_found": None if self.drill_found is None else float(self.drill_found),
            "ratio_max": ratio_max,
            "rollout_ratio_max": rollout_ratio_max,
            "unlikely_share": unlikely / tokens if tokens else None,
            "spike_margin": max(margins, default=None),
            "token_norm_max": largest,
            **{name: self._spikes[name] for name in _OF_SPIKES},
        }
        return {f"actor/gradloc/{name}": value for name, value in figures.items() if value is not None}


def figure_sizes(model: WatchedModel, is_first: bool) -> list[int]:
    """How many numbers each part of `RunFacts.own_figures` has; the last is the weights' of `own_squares`."""
    reduced, measured = len(model.reduced_norms.layers), len(model.meter.layers)
    layers = [5 + reduced, measured, measured, 2 * reduced, measured, reduced] if is_first else [0] * 6
    return [len(NAMES), 1, *layers]


class RunFacts:
    """Sums up each mini-batch of a run, the same on every rank; on rank 0, the judge says which identities hold.

    Args:
        learning_rate (Callable): See `GradLoc`.
    """

    def __init__(self, learning_rate: Callable[[], float | Tensor]) -> None:
        self.steps_since_resume: int | None = None  # 1 in the first step after a loaded checkpoint
        self.are_checked = True  # whether there was a judge on rank 0, when the last mini-batch was taken in
        # The judge's `Run`; None on other ranks, and after an error in the judge.
        self._run = asked(judge.Run) if collectives.rank() == 0 else None
        self._state: Any = None  # of the last checkpoint
        self._learning_rate = learning_rate
        self._said: set[str] = set()
        # Small weights before the last update's first step, and their gradients; and those after its last step.
        self._kept: tuple[Tensor, Tensor] | None = None
        self._ended: Tensor | None = None
        self._stepped = False  # whether that update had a step
        # The update so far: sums; whether all old log-probs were the rollout's; the layers' norms.
        self._sums, self._bypassed = dict.fromkeys(NAMES, 0.0), True
        self._layers: list[Any] = []

    def answer(self, rows: Sequence[TrainedRow] = ()) -> Answer | None:
        """What the judge says of the update so far, and of its rows; None where nothing has checked the run."""

        def question(run: Any) -> Any:
            if self._layers:
                run.take_in_layers(*self._layers)
            if rows:
                run.take_in_rows(rows)
            return run.answer()

        return self._ask(question, None, Answer)

    def misplaced_share(self) -> float | None:
        """The share of the responses whose log-probs fit those of neighbouring tokens; None without any."""
        sums = self._sums
        shares = [
            sum(sums[f"{pair} moved {k}"] for k in SHIFTS) / sums[f"{pair} told"]
            for pair in ("rollout", "reference")
            if sums[f"{pair} told"]
        ]
        return max(shares, default=0.0 if any(sums[f"{pair} rows"] for pair in ("rollout", "reference")) else None)

    def start_update(self, global_step: int | None, rollout_is_current: bool = False) -> None:
        """Begins an update; see `GradLoc.start_update`."""
        self._sums, self._bypassed, self._layers = dict.fromkeys(NAMES, 0.0), True, []
        if self.steps_since_resume is not None:
            self.steps_since_resume += 1
        self._ask(lambda run: run.start_update(global_step, rollout_is_current))

    def own_figures(self, gradient: MiniBatch, where: Where) -> Tensor:
        """What one rank knows of a mini-batch, for `take_in`: float64 of one dimension. No host sync.

        In the update's first mini-batch, what `ReducedNorms.own_squares` knows of weights is to follow.
        """
        is_first = (where["epoch"], where["mini_batch"]) == (0, 0)
        # None if it is unknown, or not the same for all.
        mode, *others = {micro_batch.loss_agg_mode for micro_batch in gradient.micro_batches}
        tokens = [micro_batch.tokens for micro_batch in gradient.micro_batches]
        mode = None if others else mode
        facts = own_facts(tokens, where["epoch"], is_first, gradient.scale, mode, self._bypassed)
        found = [facts, facts.new_full((1,), float(self._run is not None))]
        if is_first:
            norms, of_passes = gradient.model.reduced_norms, gradient.squares.sqrt()
            moves, small = self._own_moves(norms)
            sums = torch.stack([micro_batch.sums for micro_batch in gradient.micro_batches]).sum(0)
            found += [moves, of_passes.sum(0), of_passes[-1], norms.own_sums(small / gradient.scale)]
            found.append(sums / gradient.scale)
        return torch.cat(found)

    def _own_moves(self, norms: ReducedNorms) -> tuple[Tensor, Tensor]:
        """How this rank's small weights have moved in the last update, and since; see `Layers`. No host sync.

        Returns:
            tuple[Tensor, Tensor]: float64 of shape (5 + layers,): how many have changed since the update's end; Σ Δ²,
                twice Σ Δ·g, and Σ g², of its first gradient; and how many have moved, by layer; NaN where that is not
                known. And the present gradient of these weights.
        """
        weights, kept, ended = norms.small_weights(), self._kept, self._ended
        unknown = torch.full((5 + len(norms.layers),), math.nan, dtype=torch.float64, device=weights.device)
        found = [unknown]
        if kept is not None and ended is not None and len(kept[0]) == len(ended) == len(weights):
            found = [torch.ne(weights, ended).sum().view(1), unknown[1:]]
            if self._stepped:
                moves = torch.stack([ended - kept[0], kept[1]])
                found[1:] = [(moves @ moves.T).flatten(), norms.own_changes(moves[0])]
        self._kept, self._stepped = (weights, norms.small_weights(of_gradient=True)), False
        return torch.cat(found), self._kept[1]

    def end_update(self, model: WatchedModel) -> None:
        """Keeps small weights after the update's last step: until the next one's, nothing else is to change them."""
        self._ended = model.reduced_norms.small_weights()

    def take_in(self, figures: Tensor, where: Where, gradient: MiniBatch) -> None:
        """Adds what `own_figures` returned on each rank, on the CPU."""
        model, is_first = gradient.model, (where["epoch"], where["mini_batch"]) == (0, 0)
        facts, checked, moves, *of_passes, weights = figures.split(figure_sizes(model, is_first), dim=1)
        passes, last, reduced_sums, sums_of_passes = of_passes
        self.are_checked = bool(checked[0])
        copies = model.sequence_parallel_size
        sums = facts[::copies].sum(0).tolist()
        self._sums = {name: self._sums[name] + of for name, of in zip(NAMES, sums, strict=True)}
        self._bypassed = self._sums["bypass"] >= self._sums["mini_batches"]
        self._ask(lambda run: run.take_in(sums))
        if is_first and gradient.squared_norms is not None:
            norms, meter = model.reduced_norms, model.meter
            # The last pass alone is known on one rank, unless the others have hardly a gradient.
            one = passes[0] if model.data_parallel_size == 1 and not meter.reduces else None
            has_last = one is not None and bool((one - last[0]).norm() > LAST * one.norm())
            # Each rank has a part of the weights, whatever its data.
            between, moved, along, _, squares, *changes = moves.sum(0).tolist()
            of_weights = [*map(math.sqrt, norms.of_ranks(weights).tolist())], norms.numels, changes
            of_small = zip(*norms.of_ranks(reduced_sums).view(2, -1).tolist(), strict=True)
            self._layers = [
                dict(zip(norms.layers, zip(*of_weights, strict=True), strict=True)),
                dict(zip(norms.layers, gradient.squared_norms.sqrt().tolist(), strict=True)),
                dict(zip(meter.layers, passes[::copies].mean(0).tolist(), strict=True)),
                dict(zip(meter.layers, last[0].tolist(), strict=True)) if has_last else None,
                [moved, squares, along, between],
                None if meter.reduces else dict(zip(norms.layers, of_small, strict=True)),
                dict(zip(meter.layers, sums_of_passes[::copies].mean(0).tolist(), strict=True)),
            ]

    def add_step(self) -> None:
        """Adds an optimizer step that is about to be taken."""
        rate = 0.0
        with guarded("the learning rate cannot be read; run checks take it for 0", self._said):
            rate = float(self._learning_rate())  # an optimizer may have a tensor
        self._stepped = True
        self._ask(lambda run: run.add_step(rate))

    def state_dict(self) -> Any:
        """What the judge compares later updates with, on rank 0; without a judge, what was loaded."""
        return self._state if self._run is None else self._ask(lambda run: run.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores it."""
        self._state, self.steps_since_resume, self._kept, self._ended = state, 0, None, None
        self._ask(lambda run: run.load_state_dict(None if state is None else in_form(state, RunRecords)))

    def _ask(self, question: Callable[[Any], Any], otherwise: Any = None, form: Any = Any) -> Any:
        """What the judge answers. Other ranks go on: an error in it must not end this one.

        After a resume, an error may come from what was loaded: the judge starts over, once.
        """
        if (run := self._run) is not None:
            failed = object()
            undone = (
                "nothing checks the run from here on" if self._state is None else "the checks of the run start over"
            )
            if (answer := asked(lambda: question(run), failed, form, undone)) is not failed:
                return answer
            had_state, self._run, self._state = self._state is not None, None, None
            if had_state:
                self._run = asked(judge.Run)
                self._ask(lambda run: run.load_state_dict(None))
        return otherwise
