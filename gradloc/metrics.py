# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics of an update, the same on every rank, and the warnings that need no spike."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import judge
from .evidence.token_facts import off_the_rollout
from .fsdp import collectives
from .guarded import guarded
from .judging import asked
from .lines import Event, RunWarning, Where
from .measure.alignment import misplaced_share, own_alignment
from .measure.micro_batch import MicroBatch
from .measure.mini_batch import MiniBatch
from .measure.passes import WatchedModel
from .measure.run_sums import own_columns, own_loss_figures, own_sums
from .sources import HOLDS, UNLIKELY
from .sums import ALIGNMENT_SUMS, COLUMN_SUMS, LOSS_FIGURES, SUMS

OWN_FIGURES = 6
# What is summed up of an update's spikes.
_OF_SPIKES = ("triggered", "culprits", "passes", "seconds", "out_of_time", "skipped")


def own_figures(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What one rank knows of a mini-batch, the tokens of its micro-batches, for `UpdateMetrics.take_in`. No host sync.

    Only response tokens with a weight in the loss count, except for those that are compared with the rollout.

    Returns:
        Tensor: float64 of shape (OWN_FIGURES,): the largest log-ratio and the largest size of a log-ratio to the
            rollout (−Inf without data); how many response tokens are misaligned with the rollout, of how many; how many
            tokens are unlikely, of how many.
    """
    device = micro_batches[0]["weight"].device
    maxima = torch.full((2,), -math.inf, dtype=torch.float64, device=device)
    counts = torch.zeros(4, dtype=torch.float64, device=device)
    for tokens in micro_batches:
        mask = tokens["response_mask"].bool()
        counted = mask & (tokens["weight"] != 0)
        log_prob = tokens["log_prob"].double()
        if "old_log_prob" in tokens:
            log_ratio = log_prob - tokens["old_log_prob"].double()
            maxima[0] = torch.maximum(maxima[0], _largest(log_ratio, counted))
        if "rollout_log_prob" in tokens:
            difference = (log_prob - tokens["rollout_log_prob"].double()).abs()
            maxima[1] = torch.maximum(maxima[1], _largest(difference, counted))
            off = off_the_rollout(tokens["log_prob"] - tokens["rollout_log_prob"])
            counts[:2] += torch.stack([(mask & off).sum(), mask.sum()])
        # NaN counts as unlikely.
        unlikely = counted & ~(log_prob >= math.log(UNLIKELY))
        counts[2:] += torch.stack([unlikely.sum(), counted.sum()])
    return torch.cat([maxima, counts])


class UpdateMetrics:
    """Collects the figures of an update's mini-batches, and what is summed up of its spikes."""

    def __init__(self) -> None:
        self.drill_found: bool | None = None  # whether the update's drill found its token; None without a drill
        self._spikes: Counter[str] = Counter()  # what is summed up of the spikes, by the metric's name
        self._maxima = torch.full((2,), -math.inf, dtype=torch.float64)
        self._counts = torch.zeros(4, dtype=torch.float64)
        # The token-equivalent norm of each mini-batch, and its τ; None in the warm-up of an automatic one.
        self._levels: list[tuple[float, float | None]] = []

    def take_in(self, by_rank: Tensor) -> None:
        """Adds what `own_figures` returned on each rank, on the CPU."""
        self._maxima = torch.maximum(self._maxima, by_rank[:, :2].amax(0))
        self._counts += by_rank[:, 2:].sum(0)

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
            for log_ratio in self._maxima.tolist()
        )
        misaligned, compared, unlikely, tokens = self._counts.tolist()
        # Of equal norms the last.
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
    """How many numbers each part of `RunWarnings.own_figures` has."""
    layers = [len(model.reduced_norms.layers), len(model.meter.layers)] if is_first else [0, 0]
    return [len(SUMS), ALIGNMENT_SUMS, COLUMN_SUMS, len(LOSS_FIGURES), 1, *layers]


class RunWarnings:
    """Sums up each mini-batch of a run, the same on every rank; on rank 0, the judge says what is wrong by these sums.

    Args:
        learning_rate (Callable): See `GradLoc`.
    """

    def __init__(self, learning_rate: Callable[[], float | Tensor]) -> None:
        self.steps_since_resume: int | None = None  # 1 in the first step after a loaded checkpoint
        self.are_checked = True  # whether there was a judge on rank 0, when the last mini-batch was taken in
        self._is_first_rank = collectives.rank() == 0
        # The judge's `RunChecks`; None on other ranks, and after an error in the judge.
        self._checks = asked(judge.RunChecks) if self._is_first_rank else None
        self._state: Any = None  # of the last checkpoint
        self._learning_rate = learning_rate
        self._said: set[str] = set()
        # Of the update so far.
        self._sums = torch.zeros(len(SUMS) + ALIGNMENT_SUMS, dtype=torch.float64)

    def warnings(self, of_mini_batch: bool = False) -> list[RunWarning] | None:
        """See `RunChecks.warnings`; None where nothing has checked the run, and nothing on other ranks than 0."""
        unasked: list[RunWarning] | None = None if self._is_first_rank else []
        return self._ask(lambda checks: checks.warnings(of_mini_batch), unasked, list[RunWarning])

    def misplaced_share(self) -> float | None:
        """See `measure.alignment`, of the update so far."""
        return misplaced_share(self._sums[len(SUMS) :])

    def start_update(self, global_step: int | None) -> None:
        """Begins an update."""
        self._sums.zero_()
        if self.steps_since_resume is not None:
            self.steps_since_resume += 1
        self._ask(lambda checks: checks.start_update(global_step))

    def own_figures(
        self, micro_batches: Sequence[MicroBatch], scale: float, is_first: bool, model: WatchedModel
    ) -> Tensor:
        """What one rank knows of a mini-batch, for `take_in`: float64 of one dimension. No host sync."""
        tokens = [micro_batch.tokens for micro_batch in micro_batches]
        checked = [{**each, "unsampled": HOLDS["unsampled"](each, {})} for each in tokens]
        # Whether the update so far had the rollout's log-probs for the old ones, as in verl's bypass mode.
        bypass = not self._sums[SUMS.index("differing")]
        sums = own_sums(checked, is_first, bypass)
        # None if it is unknown, or not the same for all.
        mode, *others = {micro_batch.loss_agg_mode for micro_batch in micro_batches}
        scales = own_loss_figures(tokens, scale, None if others else mode)
        found = [sums, own_alignment(tokens), own_columns(tokens), scales]
        found.append(sums.new_full((1,), float(self._checks is not None)))
        if is_first:
            passes = torch.stack([micro_batch.squares for micro_batch in micro_batches]).sqrt().sum(0) / scale
            found += [model.reduced_norms.own_squares(of_weights=True), passes]
        return torch.cat(found)

    def take_in(self, figures: Tensor, where: Where, gradient: MiniBatch) -> None:
        """Adds what `own_figures` returned on each rank, on the CPU."""
        model, is_first = gradient.model, (where["epoch"], where["mini_batch"]) == (0, 0)
        *to_add, of_loss, checked, weights, passes = figures.split(figure_sizes(model, is_first), dim=1)
        self.are_checked = bool(checked[0])
        copies = model.sequence_parallel_size
        sums, alignment, columns = (each[::copies].sum(0) for each in to_add)
        # All PPO epochs after the first have the same responses again.
        is_new = where["epoch"] == 0
        if is_new:
            self._sums += torch.cat([sums, alignment])
        of_tokens = [each.tolist() if is_new else None for each in (sums, alignment, columns)]
        self._ask(lambda checks: checks.take_in(*of_tokens, of_loss[::copies].tolist()))
        if is_first and gradient.squared_norms is not None:
            norms = model.reduced_norms
            of_weights = zip(norms.of_ranks(weights).sqrt().tolist(), norms.numels, strict=True)
            most = (passes[::copies].sum(0) / model.data_parallel_size).tolist()
            of_layers = (
                dict(zip(norms.layers, of_weights, strict=True)),
                dict(zip(norms.layers, gradient.squared_norms.sqrt().tolist(), strict=True)),
                dict(zip(model.meter.layers, most, strict=True)),
            )
            self._ask(lambda checks: checks.layers.take_in(*of_layers))

    def add_step(self) -> None:
        """Adds an optimizer step that is about to be taken."""
        rate = 0.0
        with guarded("the learning rate cannot be read; run checks take it for 0", self._said):
            rate = float(self._learning_rate())  # an optimizer may have a tensor
        self._ask(lambda checks: checks.add_step(rate))

    def state_dict(self) -> Any:
        """What the judge compares later updates with, on rank 0; without a judge, what was loaded."""
        return self._state if self._checks is None else self._ask(lambda checks: checks.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores it."""
        self._state, self.steps_since_resume = state, 0
        self._ask(lambda checks: checks.load_state_dict(state))

    def _ask(self, question: Callable[[Any], Any], otherwise: Any = None, form: Any = Any) -> Any:
        """What the checks answer. Other ranks go on: an error in them must not end this one.

        After a resume, an error may come from what was loaded: the checks start over, once.
        """
        if (checks := self._checks) is not None:
            failed = object()
            undone = "nothing checks the run from here on" if self._state is None else "run checks start over"
            if (answer := asked(lambda: question(checks), failed, form, undone)) is not failed:
                return answer
            had_state, self._checks, self._state = self._state is not None, None, None
            if had_state:
                self._checks = asked(lambda: judge.RunChecks())
                self._ask(lambda checks: checks.load_state_dict(None))
        return otherwise


def _largest(log_ratios: Tensor, counted: Tensor) -> Tensor:
    """The largest of those counted, NaN as infinity; −Inf without any."""
    return torch.where(counted, log_ratios.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf), -math.inf).max()
