# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Watches the training passes, and on a spike of the gradient norm searches for the tokens that caused it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import drill
from .bundles.bundle_writer import BundleWriter
from .config import GradLocConfig
from .evidence.ordinary import HOLDS
from .evidence.scaling import SCALE_FIGURES, loss_scale_warning, own_scale_figures
from .fsdp import collectives
from .fsdp.unless_it_fails import is_known_on_all_ranks, unless_it_fails
from .measure.micro_batch import MicroBatch
from .measure.mini_batch import MiniBatch, OrdinaryGradient
from .measure.pass_recorder import LossInputs, PassRecorder, ReadTokens, unchanged, with_a_column
from .measure.passes import Cut, Forward
from .measure.watched_model import WatchedModel
from .metrics import UpdateMetrics, own_figures
from .run_checks import RunChecks, own_sums
from .search.time_limit import SearchTime
from .spike import Located, explain
from .threshold import Threshold

logger = logging.getLogger(__name__)


class GradLoc:
    """Watches the training passes of a (sharded) model and finds the tokens behind a spike of its gradient.

    For each micro-batch the trainer calls `begin_pass`, runs the forward, calls `observe`, runs the backward, and calls
    `end_pass`. Before the optimizer step it calls `locate`. All ranks make the same calls.

    Args:
        module (nn.Module): The model; ranks hold different data (FSDP1, FSDP2, or a single process).
        config (GradLocConfig): When a norm counts as a spike, and what to do; or an object with its fields.
        forward (Callable): `forward(inputs, rows, response_length)` computes (entropy or None, log_prob), each of shape
            (len(rows), response_length), for some rows of a micro-batch, with responses truncated to that length.
        device (str | torch.device): The device that the model computes on.
        loss_scale (Callable): Returns the loss scale of the backward passes (for fp16); 1 by default.
        squared_norms (Callable, optional): `LayerClip.squared_norms` if LayerClip is on as well; it measures the
            reduced gradient.
        sequence_parallel_size (int): How many neighbouring ranks work on the same data. If it is over 1, a rank's
            local gradient is not the gradient of its data, and the reduced meter is used.
        meter (str): "local": measure every rank's local gradient, in training passes as well. "reduced": measure only
            the gradient after FSDP's mean, in the passes of the search.
        recover (Callable, optional): Called on a rank where an error interrupted a pass, to reset state outside of the
            model and FSDP.
        cut (Cut, optional): `TokenClip.repeated` if TokenClip is on as well, for the passes of the action "drop".
        outliers (Callable, optional): `TokenClip.outliers` if TokenClip is on as well: what it saw of this rank's
            micro-batch with a given index.
        cut_tokens (Callable, optional): `TokenClip.cut_tokens` if TokenClip is on as well: no search looks for tokens
            whose signals training did not have. A collective call.
        bundle_writer (BundleWriter, optional): Keeps a bundle of each event, so that it can be replayed elsewhere.
        learning_rate (Callable, optional): Returns that of the next optimizer step, a number or a tensor; without
            it, all steps count alike.
        loss_agg_mode (str, optional): verl's name for how the losses are aggregated of which `observe` does not say it;
            None: the sum of their weights is not checked.

    Attributes:
        events (list[dict]): The events since `start_update` or `start_mini_batch`, the same on every rank, ready for
            `jsonable`.
        warnings (list[dict]): What is wrong with the run in the update so far; see `RunChecks.warnings`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: GradLocConfig,
        forward: Forward,
        device: str | torch.device = "cpu",
        loss_scale: Callable[[], float] = lambda: 1.0,
        squared_norms: Callable[[], Tensor] | None = None,
        sequence_parallel_size: int = 1,
        meter: str = "local",
        recover: Callable[[], None] | None = None,
        cut: Cut | None = None,
        outliers: Callable[[int], Tensor] | None = None,
        cut_tokens: Callable[[], list[Tensor]] | None = None,
        bundle_writer: BundleWriter | None = None,
        learning_rate: Callable[[], float | Tensor] = lambda: 1.0,
        loss_agg_mode: str | None = None,
    ) -> None:
        self.config = config
        self.events: list[dict[str, Any]] = []
        self.warnings: list[dict[str, str]] = []
        self._loss_agg_mode = loss_agg_mode
        self._model = WatchedModel(
            module,
            forward,
            torch.device(device),
            squared_norms=squared_norms,
            sequence_parallel_size=sequence_parallel_size,
            meter=meter,
            recover=recover,
            cut=cut,
        )
        self._loss_scale = loss_scale
        self._outliers = outliers
        self._cut_tokens = cut_tokens
        self._bundle_writer = bundle_writer
        self._learning_rate = learning_rate
        self._threshold = Threshold(config.grad_norm_threshold)
        self._ordinary = OrdinaryGradient()
        self._metrics = UpdateMetrics()
        self._run_checks = RunChecks()
        self._logged: set[str] = set()
        self._global_step: int | None = None
        # Whether a rank could not read its tokens in this update: no pass of the rest of it is recorded.
        self._is_off = False
        self._recorder = PassRecorder(self._model)
        self._search_time = SearchTime(config.bisect_budget_seconds)

    def start_mini_batch(self) -> None:
        """Discards the events and passes of the last mini-batch; the update's metrics still count the events."""
        self.events = []
        self._recorder.discard()

    def start_update(self, global_step: int | None = None) -> None:
        """Discards the events and metrics of the last update."""
        self.events = []
        self._metrics = UpdateMetrics()
        self._recorder.discard()
        self._is_off = False
        self._global_step = global_step
        self.warnings = []
        self._run_checks.start_update(global_step)

    def begin_pass(self, inputs: dict[str, Any], rows: Sequence[int]) -> None:
        """Starts recording a training pass; called before it.

        Args:
            inputs (dict): The inputs of `forward`; picklable. Kept until `locate`.
            rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
        """
        if not self._is_off:
            self._recorder.begin(inputs, rows)

    def observe(
        self,
        log_prob: Tensor,
        entropy: Tensor | None,
        weight: Tensor,
        loss_inputs: LossInputs | None = None,
        loss_agg_mode: str | None = None,
        **tokens: Tensor,
    ) -> None:
        """Records the tokens of the current pass, and their coefficients ∂L/∂log p during its backward.

        All tensors have shape (rows, response length).

        Args:
            log_prob (Tensor): The log-probs that the loss is computed from.
            entropy (Tensor, optional): The entropies that the loss is computed from.
            weight (Tensor): The weight w of each token in the loss, gradient accumulation included.
            loss_inputs (dict, optional): If the loss is computed from other tensors than those given: for "coefficient"
                (of log-probs) and "entropy_coefficient" the tensor, and a function that brings its gradient into the
                shape (rows, response length).
            loss_agg_mode (str, optional): verl's name for how this loss is aggregated.
            tokens (Tensor): The tensors that `token_evidence` reports; at least `response_mask` and `token_id`.
        """
        noted = {"log_prob": log_prob, "weight": weight, **tokens}
        if entropy is not None:
            noted["entropy"] = entropy
        if loss_inputs is None:
            given = {"coefficient": log_prob, "entropy_coefficient": entropy}
            loss_inputs = {name: (tensor, unchanged) for name, tensor in given.items() if tensor is not None}
        if not self._is_off:
            self._recorder.observe(noted, loss_inputs, loss_agg_mode)

    def observe_later(self, read_tokens: ReadTokens, loss_inputs: LossInputs, loss_agg_mode: str | None = None) -> None:
        """Like `observe`, but the tokens are read in `end_pass`, while the device computes the backward.

        An error in that is logged, and no spike is looked for in the rest of the update, on all ranks.

        Args:
            read_tokens (Callable): Returns what `observe` takes: `log_prob`, `weight`, `entropy` where the loss has it,
                and the tensors that `token_evidence` reports.
            loss_inputs (dict): As `observe` takes them.
            loss_agg_mode (str, optional): The same.
        """
        if not self._is_off:
            self._recorder.observe_later(read_tokens, loss_inputs, loss_agg_mode)

    def end_pass(self) -> None:
        """Stops recording a training pass; called after its backward."""
        if not self._is_off:
            self._recorder.end()

    def locate(self, epoch: int, mini_batch: int) -> Located:
        """Checks the mini-batch's gradient, and on a spike finds the culprits. A collective call.

        With the actions "log" and "skip", the gradients, the random state and the training flags are restored bit for
        bit. With "drop", the culprits' part is removed from the gradient.

        Args:
            epoch (int): The PPO epoch, for the event.
            mini_batch (int): The mini-batch's index in the update, for the event.

        Raises:
            RankLostError: An error on this rank that cannot be propagated to the other ranks: it aborts the run instead
                of deadlocking it. Any other error is logged, and training continues.
        """
        where = {"global_step": self._global_step, "epoch": epoch, "mini_batch": mini_batch}
        located = unless_it_fails(
            lambda: self._locate(where),
            Located(take_step=True),
            "the search for the tokens behind a gradient spike",
        )
        if located.take_step:
            self._run_checks.add_step(self._next_learning_rate())
        return located

    def close(self) -> None:
        """Removes its hooks from the model; nothing else is to be called after that."""
        self._model.meter.close()

    def metrics(self) -> dict[str, float]:
        """The update's metrics for the training log, the same on every rank.

        `misaligned_share` (only with rollout log-probs) is the fraction of response tokens whose log-prob differs from
        the rollout's by more than a nat. `threshold` is τ in the mini-batch with the largest norm, or in the last one
        if that was in the warm-up of an automatic threshold; it is missing before the warm-up has ended. `drill_found`
        (only after a drill) is 1 if the planted token was found. The other metrics do not count drills.
        """
        return self._metrics.metrics()

    def state_dict(self) -> dict[str, Any]:
        """What has been learned of the run: the same for any number of ranks, and on every rank but for the seconds.

        Rank 0's seconds count, so its state is to be saved.
        """
        return {
            **self._threshold.state_dict(),
            "run_checks": self._run_checks.state_dict(),
            "search_time": self._search_time.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict` after a checkpoint was loaded.

        With None (no saved state) the warm-up of an automatic threshold starts over.
        """
        self._threshold.load_state_dict(state)
        self._run_checks.load_state_dict(None if state is None else state.get("run_checks"))
        self._search_time.load_state_dict(None if state is None else state.get("search_time"))

    def _locate(self, where: dict[str, Any]) -> Located:
        started = time.perf_counter()
        gradient = None if self._is_off else self._measure(where)
        if gradient is None:
            return Located(take_step=True)
        if self._global_step is not None and tuple(where.values()) == (self.config.spike_drill_step, 0, 0):
            self._hold_drill(gradient, where)
            started = time.perf_counter()
        threshold = self._threshold.next(gradient.level.token_norm, gradient.level.finite)
        self._metrics.take_in_level(gradient.level, self._threshold.last)
        if not gradient.is_over(threshold):
            if gradient.is_ordinary(threshold):
                self._ordinary.take_in(gradient)
            return Located(True, gradient.squared_norms)
        if self._outliers is not None:
            for index, micro_batch in enumerate(gradient.micro_batches):
                micro_batch.tokens["outlier"] = with_a_column(self._outliers(index))
        if self._cut_tokens is not None:
            for micro_batch, cut in zip(gradient.micro_batches, self._cut_tokens(), strict=True):
                micro_batch.tokens["cut"] = with_a_column(cut)
        located = explain(
            gradient,
            threshold,
            self.config,
            self._ordinary,
            {**where, "steps_since_resume": self._run_checks.steps_since_resume},
            started,
            self._search_time,
            self._run_checks.warnings(of_mini_batch=True),
            self._bundle_writer,
        )
        if located.event is None:
            self._metrics.add_spike_without_event(skipped=not located.take_step)
        else:
            self._add(located.event)
        return located

    def _next_learning_rate(self) -> float:
        try:
            return float(self._learning_rate())  # an optimizer may have a tensor
        except Exception:
            if "learning_rate" not in self._logged:
                logger.warning("the learning rate cannot be read; run checks take it for 0", exc_info=True)
            self._logged.add("learning_rate")
            return 0.0

    def _measure(self, where: Mapping[str, Any]) -> MiniBatch | None:
        """The gradient of the passes since the last call; None if a rank cannot read its tokens. A collective call."""
        micro_batches = self._recorder.take()
        first = (where["epoch"], where["mini_batch"]) == (0, 0)
        tokens = [micro_batch.tokens for micro_batch in micro_batches]
        figures = own_figures(tokens)
        checked = [{**each, "unsampled": HOLDS["unsampled"](each, {})} for each in tokens]
        sums = own_sums(checked, first, self._run_checks.usual_gap, self._run_checks.bypass)
        scale = self._loss_scale()
        all_figures = torch.cat([figures, sums, own_scale_figures(tokens, scale, self._mode_of(micro_batches))])
        trigger, failed = self.config.spike_trigger, self._recorder.failed
        gradient = MiniBatch(self._model, micro_batches, scale, trigger, all_figures, failed)
        if gradient.failed:
            self._is_off = True
            return None
        of_update, of_run, of_scale = gradient.update_figures.split([len(figures), len(sums), SCALE_FIGURES], dim=1)
        self._metrics.take_in(of_update)
        self._check_run(of_run if where["epoch"] == 0 else None, loss_scale_warning(of_scale))
        return gradient

    def _mode_of(self, micro_batches: Sequence[MicroBatch]) -> str | None:
        """How the losses of these micro-batches are aggregated; None if that is unknown, or not the same for all."""
        modes = {micro_batch.loss_agg_mode or self._loss_agg_mode for micro_batch in micro_batches}
        return modes.pop() if len(modes) == 1 else None

    def _check_run(self, by_rank: Tensor | None, scaled: dict[str, str] | None) -> None:
        """Adds a mini-batch to the checks of the run; a warning is logged once."""
        self._run_checks.take_in(by_rank, scaled)
        self.warnings = self._run_checks.warnings()
        for warning in self.warnings:
            if warning["name"] not in self._logged and collectives.rank() == 0:
                logger.warning("Step %s: %s %s", self._global_step, warning["sentence"], warning["check"])
            self._logged.add(warning["name"])

    def _hold_drill(self, gradient: MiniBatch, where: dict[str, Any]) -> None:
        """Holds a drill. Whatever becomes of it, the real mini-batch is checked as usual. A collective call."""
        self._metrics.drill_found = False
        try:
            event = drill.hold(gradient, self._threshold, self.config, self._ordinary, where, self._search_time.drill())
        except Exception as error:
            if not is_known_on_all_ranks(error):
                raise
            logger.warning("the spike drill failed; training continues", exc_info=True)
        else:
            self._add(event)
            self._metrics.drill_found = event["drill"]["found"]

    def _add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._metrics.events.append(event)
