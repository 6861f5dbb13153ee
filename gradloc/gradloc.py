# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Watches the training passes, and on a spike of the gradient norm searches for the tokens that caused it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import drill
from .actions import act, can_skip
from .bundles.bundle_writer import BundleWriter
from .config import GradLocConfig
from .evidence.event import build_event
from .facts import TrainedRow
from .fsdp import collectives
from .fsdp.state import set_aside, undisturbed
from .layers.layer_clip import LayerClip
from .lines import Answer, Event, Where
from .measure.mini_batch import MiniBatch, OrdinaryGradient
from .measure.pass_recorder import PassRecorder, with_a_column
from .measure.passes import Forward, Passes, WatchedModel
from .metrics import OWN_FIGURES, RunFacts, UpdateMetrics, figure_sizes, own_figures
from .search.findings import Findings
from .search.investigation import HEAD_START, SHARE, SearchTime, investigate
from .threshold import Threshold
from .token_clip.token_clip import TokenClip

logger = logging.getLogger(__name__)


class Located(NamedTuple):
    """What `GradLoc.locate` found; the same on every rank."""

    take_step: bool  # whether to take the optimizer step
    # The squared norms by layer of the gradient that is left, without the loss scale; None if they were not measured.
    squared_norms: Tensor | None = None
    norm: float | None = None  # with a spike, the norm of the reduced gradient before anything was done to it


class GradLoc(PassRecorder):
    """Watches the training passes of a (sharded) model and finds the tokens behind a spike of its gradient.

    For each micro-batch the trainer calls `begin_pass`, runs the forward, calls `observe`, runs the backward, and calls
    `end_pass`. Before the optimizer step it calls `locate`. All ranks make the same calls, also this one. If it finds
    that it cannot work with the model and torch, it says so once, and does nothing on any rank.

    Args:
        module (nn.Module): The model; ranks hold different data (FSDP1, FSDP2, or a single process).
        forward (Callable): `forward(inputs, rows, response_length)` computes (entropy or None, log_prob), each of shape
            (len(rows), response_length), for some rows of a micro-batch, with responses truncated to that length.
        loss_scale (Callable): Returns the loss scale of the backward passes (for fp16); 1 by default.
        sequence_parallel_size (int): How many neighbouring ranks work on the same data. If it is over 1, a rank's
            local gradient is not the gradient of its data, and the reduced meter is used.
        meter (str): "local": measure every rank's local gradient, in training passes as well. "reduced": measure only
            the gradient after FSDP's mean, in the passes of the search.
        recover (Callable, optional): Called on a rank where an error interrupted a pass, to reset state outside of the
            model and FSDP.
        token_clip (TokenClip, optional): If it is on as well: it cuts the passes of the action "drop" as training's; a
            search begins with the tokens that it left over their bounds, and looks for none that it cut.
        layer_clip (LayerClip, optional): What clips the gradient after that, or learns its bounds alone.
        learning_rate (Callable, optional): Returns that of the next optimizer step, a number or a tensor; without
            it, all steps count alike.
    """

    # For the warning after an error: the feature that is off, and the work that is not done.
    SEARCH = "the search for the tokens behind a gradient spike"
    UNDONE = "the actor's gradient was not checked for a spike"

    def __init__(
        self,
        module: nn.Module,
        config: GradLocConfig,
        forward: Forward,
        device: str | torch.device = "cpu",
        loss_scale: Callable[[], float] = lambda: 1.0,
        sequence_parallel_size: int = 1,
        meter: str = "local",
        recover: Callable[[], None] | None = None,
        token_clip: TokenClip | None = None,
        bundle_writer: BundleWriter | None = None,
        layer_clip: LayerClip | None = None,
        learning_rate: Callable[[], float | Tensor] = lambda: 1.0,
    ) -> None:
        model = None
        try:
            model = WatchedModel(
                module,
                forward,
                torch.device(device),
                sequence_parallel_size=sequence_parallel_size,
                meter=meter,
                recover=recover,
                cut=None if token_clip is None else token_clip.repeated,
            )
        except collectives.RankFailedError as error:
            if collectives.rank() == 0:
                logger.warning("%s is off, and training goes on without it: %s", self.SEARCH, error)
        super().__init__(model)
        self.config = config
        # Those since `start_update` or `start_mini_batch`, for `record_events`; the judge's answer is on rank 0 alone.
        self.events: list[Any] = []
        self._loss_scale = loss_scale
        self._token_clip = token_clip
        self._bundle_writer = bundle_writer
        self._layer_clip = layer_clip
        self._threshold = Threshold(config.grad_norm_threshold)
        self._ordinary = OrdinaryGradient()
        self._metrics = UpdateMetrics()
        self._facts = RunFacts(learning_rate)
        self._global_step: int | None = None
        self._search_time = SearchTime(config.bisect_budget_seconds)
        self._has_rehearsed = False

    def answer(self, rows: Sequence[TrainedRow] = ()) -> Answer | None:
        """Which identities hold in the update so far; see `RunFacts.answer`."""
        return None if self.is_off else self._facts.answer(rows)

    def start_mini_batch(self) -> None:
        """Discards the events and passes of the last mini-batch; the update's metrics still count the events."""
        self.events = []
        self.discard()

    def start_update(self, global_step: int | None = None, rollout_is_current: bool = False) -> None:
        """Discards the events and metrics of the last update.

        Args:
            rollout_is_current (bool): Whether the trainer says that the policy's own weights sampled the responses;
                else the rollout may be late.
        """
        self.start_mini_batch()
        self._metrics = UpdateMetrics()
        self.is_off = self._model is None
        self._global_step = global_step
        self._facts.start_update(global_step, rollout_is_current)

    def locate(self, epoch: int, mini_batch: int) -> Located:
        """Checks the mini-batch's gradient, and on a spike finds the culprits. A collective call.

        With the actions "log" and "skip", the gradients, the random state and the training flags are restored bit for
        bit. With "drop", the culprits' part is removed from the gradient.

        Raises:
            RankLostError: An error on this rank that cannot be propagated to the other ranks: it aborts the run instead
                of deadlocking it. Any other error is logged, and training continues.
        """
        where: Where = {"global_step": self._global_step, "epoch": epoch, "mini_batch": mini_batch}
        located = Located(take_step=True)
        with collectives.guarded_on_all_ranks(self.UNDONE):
            located = self._locate(where)
        if located.take_step:
            self._facts.add_step()
        return located

    def close(self) -> None:
        """Removes its hooks from the model; nothing else is to be called after that."""
        if self._model is not None:
            self._model.meter.close()

    def metrics(self) -> dict[str, float]:
        """The update's metrics for the training log, the same on every rank; see `UpdateMetrics.metrics`.

        `misplaced_share` is the share of responses whose log-probs belong to other tokens. `checked` is 0 where nothing
        has checked the run: rank 0 has no judge, or the update's tokens cannot be read.
        """
        if self._model is not None and not self.is_off:
            self._facts.end_update(self._model)
        share = self._facts.misplaced_share()
        of_run = {"misplaced_share": share, "checked": float(self._facts.are_checked and not self.is_off)}
        known = {f"actor/gradloc/{name}": value for name, value in of_run.items() if value is not None}
        return self._metrics.metrics() | known

    def state_dict(self) -> dict[str, Any]:
        """What has been learned of the run, for any number of ranks; to be saved by rank 0, whose seconds count."""
        return {
            **self._threshold.state_dict(),
            "run_checks": self._facts.state_dict(),
            "search_time": self._search_time.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None (no saved state) the warm-up of an automatic threshold starts over."""
        self._threshold.load_state_dict(state)
        self._facts.load_state_dict(None if state is None else state.get("run_checks"))
        self._search_time.load_state_dict(None if state is None else state.get("search_time"))

    def _locate(self, where: Where) -> Located:
        started = time.perf_counter()
        gradient = None if self.is_off else self._measure(where)
        if gradient is None:
            return Located(take_step=True)
        if not self._has_rehearsed:
            self._rehearse(gradient)
            started = time.perf_counter()
        if self._global_step is not None and tuple(where.values()) == (self.config.spike_drill_step, 0, 0):
            # Whatever becomes of it, the real mini-batch is checked as usual.
            self._metrics.drill_found = False
            with collectives.guarded_on_all_ranks("the spike drill failed"):
                event = drill.hold(gradient, self._threshold, self.config, self._ordinary, where, self._search_time)
                self._metrics.drill_found = event["drill"] is not None and event["drill"]["found"]
                self.events.append(event)
            started = time.perf_counter()
        threshold = self._threshold.next(gradient.token_norm, gradient.finite_norm)
        self._metrics.take_in_level(gradient.token_norm, self._threshold.last)
        if not gradient.is_over(threshold):
            if gradient.is_ordinary(threshold):
                self._ordinary.take_in(gradient)
            return Located(True, gradient.squared_norms)
        if self._token_clip is not None:
            for micro_batch, marks in zip(gradient.micro_batches, self._token_clip.marks(), strict=True):
                micro_batch.tokens |= {name: with_a_column(marked) for name, marked in marks.items()}
        located = self._explain(gradient, threshold, where, started)
        return located

    def _explain(self, gradient: MiniBatch, threshold: float, where: Where, started: float) -> Located:
        """Searches for the tokens behind a spike, applies the action and builds the event. A collective call.

        After an error in the search or the event that all ranks know of, there is no event. The step is skipped all the
        same where that is the action.
        """
        model, action, ordinary = gradient.model, self.config.spike_action, self._ordinary
        norm = gradient.global_norm()
        located = Located(not (action == "skip" and can_skip(gradient)), gradient.squared_norms, norm)
        event = None
        with collectives.guarded_on_all_ranks(f"a gradient spike in step {where['global_step']} has no event"):
            with undisturbed(model.module, model.device), self._search_time.search() as time_limit:
                with set_aside(model.module):
                    findings = investigate(
                        gradient, threshold, self.config, ordinary.token_norm, time_limit, reserve=action == "drop"
                    )
                done = act(action, gradient, findings)
            located = located._replace(squared_norms=done.squared_norms)
            if findings.out_of_time and collectives.rank() == 0:
                setting = self.config.bisect_budget_seconds
                if setting == "auto":
                    setting = f"auto (over the run, {SHARE:.0%} of its time and {HEAD_START:g} seconds)"
                logger.warning(
                    "Step %s: the search for the tokens behind a gradient spike was ended after %d passes, because "
                    "bisect_budget_seconds=%s left it %.0f seconds.",
                    self._global_step,
                    findings.passes,
                    setting,
                    findings.budget_seconds,
                )
            layer_clip = None
            if self._layer_clip is not None and self._layer_clip.is_on and done.squared_norms is not None:
                layer_clip = self._layer_clip.preview(done.squared_norms)
            event = build_event(
                gradient,
                findings,
                ordinary,
                where,
                action,
                done,
                started,
                steps_since_resume=self._facts.steps_since_resume,
                answer=self._facts.answer,
                layer_clip=layer_clip,
                keep=partial(self._keep_bundle, gradient, findings),
            )
            self.events.append(event)
        self._metrics.add_spike(event, skipped=not located.take_step)
        return located

    def _keep_bundle(self, gradient: MiniBatch, findings: Findings, event: Event) -> str | None:
        """See `BundleWriter.keep`. A collective call."""
        if self._bundle_writer is not None:
            with collectives.guarded_on_all_ranks("a gradient spike is reported without a replay bundle"):
                return self._bundle_writer.keep(event, gradient, findings)
        return None

    def _rehearse(self, gradient: MiniBatch) -> None:
        """Runs the kinds of pass that a search needs on a dummy input, in the first update. A collective call."""
        self._has_rehearsed = True
        model = gradient.model
        try:
            with ExitStack() as restored:
                with collectives.raised_on_all_ranks(model.device):
                    restored.enter_context(undisturbed(model.module, model.device))
                    restored.enter_context(set_aside(model.module))
                passes = Passes(model, gradient.micro_batches, gradient.scale)
                for reduce in {model.meter.reduces, model.meter.reduces or self.config.spike_action == "drop"}:
                    if model.recorded[reduce].needs_rehearsal:
                        passes.measure(lambda _: None, lambda: None, reduce)
        except collectives.RankFailedError as error:
            if collectives.rank() == 0:
                logger.warning(
                    "Training goes on, but until this is solved, no search will find the tokens behind a gradient "
                    "spike, as the pass that each of them begins with has failed: %s",
                    error,
                )

    def _measure(self, where: Where) -> MiniBatch | None:
        """The gradient of the passes since the last call; None if a rank cannot read its tokens. A collective call."""
        model = self._model
        assert model is not None  # else the recorder is off
        micro_batches = self.take()
        scale, trigger = self._loss_scale(), self.config.spike_trigger

        is_first = (where["epoch"], where["mini_batch"]) == (0, 0)
        gradient = MiniBatch(model, micro_batches, scale)
        # They are measured in any case: to start a search, to clip, or to be compared with what the passes gave.
        with_squares = is_first or self._layer_clip is not None or trigger == "global" or model.meter.reduces

        def read() -> Tensor:
            found = [own_figures([micro_batch.tokens for micro_batch in micro_batches])]
            found.append(self._facts.own_figures(gradient, where))
            return torch.cat([*found, model.reduced_norms.own_squares(is_first)] if with_squares else found)

        sizes = [OWN_FIGURES, sum(figure_sizes(model, is_first)), len(model.reduced_norms.layers) * with_squares]
        gradient.gather(trigger, self.figures(read, sum(sizes)), self.failed, with_squares)
        if gradient.failed:
            self.is_off = True  # for the rest of the update
            return None
        for_metrics, for_warnings, _ = gradient.update_figures.split(sizes, dim=1)
        self._metrics.take_in(for_metrics[:: model.sequence_parallel_size])
        self._facts.take_in(for_warnings, where, gradient)
        return gradient
