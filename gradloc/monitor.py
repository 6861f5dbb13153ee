# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Watches the training passes, and on a spike of the gradient norm searches for the tokens that caused it."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from . import actions, drill
from .auto_threshold import AutoThreshold
from .bundles.recorder import Recorder
from .config import GradLocConfig
from .drill import Planted
from .evidence.event import findings
from .evidence.in_words import describe
from .evidence.medians import token_medians
from .evidence.schema import SCHEMA
from .evidence.sources import MISALIGNED_FRACTION
from .evidence.token_facts import MISALIGNED_NATS, off_the_rollout
from .fsdp import collectives
from .fsdp.collective_replay import CollectiveReplay, RankLostError
from .fsdp.state import SetAside, clear_gradients, get_rng_state, undisturbed
from .layers.reduced_norms import ReducedNorms
from .measure.local_norms import LocalNorms
from .measure.meter import Level, LocalMeter, Meter, ReducedMeter, Unit
from .measure.passes import Forward, MicroBatch, Passes, UnitName
from .measure.token_weights import square_weight
from .search.investigation import Investigation
from .update_figures import UpdateFigures, own_figures
from .version import __version__

logger = logging.getLogger(__name__)

# During the warm-up of an automatic threshold only NaN and Inf are spikes: τ is _WARMUP_MARGIN times the largest finite
# norm so far, or _WARMUP_MOST if there is none.
_WARMUP_MARGIN = 10.0
_WARMUP_MOST = 1e30


@dataclass
class _Gradient:
    """The gradient of a mini-batch before its optimizer step, as it was measured.

    Args:
        micro_batches (list[MicroBatch]): This rank's.
        scale (float): The loss scale.
        squares (Tensor): The squared local norms of this rank's micro-batches, shape (micro-batches, layers).
        square_weights (Tensor): Σ w_t² over the movable tokens of each of this rank's micro-batches, shape
            (micro-batches,).
        by_rank (Tensor): The figures of all ranks, shape (ranks, figures).
        level (Level): Its size, the same on every rank.
        global_norm (float | None): The reduced gradient's norm; None while it has not been measured.
        squared_norms (Tensor | None): Its squared norms by layer; None while they have not been measured.
    """

    micro_batches: list[MicroBatch]
    scale: float
    squares: Tensor
    square_weights: Tensor
    by_rank: Tensor
    level: Level
    global_norm: float | None = None
    squared_norms: Tensor | None = None


class GradLoc:
    """Watches the training passes of a (sharded) model and finds the tokens behind a spike of its gradient.

    For each micro-batch the trainer calls `begin_pass`, runs the forward, calls `observe`, runs the backward, and calls
    `end_pass`. Before the optimizer step it calls `locate`. All ranks make the same calls.

    Args:
        module (nn.Module): The model; ranks hold different data (FSDP1, FSDP2, or a single process).
        config (GradLocConfig): When a norm counts as a spike, and what to do.
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
        recorder (Recorder, optional): Keeps a bundle of each event, so that it can be replayed elsewhere.

    Attributes:
        squared_norms (Tensor | None): The squared norms by layer of the gradient that `locate` leaves, without the loss
            scale; None if they were not measured.
        events (list[dict]): The events since `start_update` or `start_mini_batch`, the same on every rank, ready for
            `jsonable`.
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
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.squared_norms: Tensor | None = None
        self.events: list[dict[str, Any]] = []
        self._module = module
        self._forward = forward
        self._device = torch.device(device)
        self._recover = recover
        self._recorder = recorder
        self._loss_scale = loss_scale
        self._event: dict[str, Any] | None = None
        self._events_of_update: list[dict[str, Any]] = []
        self._sequence_parallel_size = sequence_parallel_size
        self._data_parallel_size = collectives.world_size() // sequence_parallel_size
        self._reduced_norms = ReducedNorms(module, self._device)
        self._measure = squared_norms or self._reduced_norms.squared_norms
        reduced = meter == "reduced" or sequence_parallel_size > 1
        self._meter: Meter = (
            ReducedMeter(self._reduced_norms, self._device, sequence_parallel_size)
            if reduced
            else LocalMeter(LocalNorms(module, self._device), self._device)
        )
        self._replay = CollectiveReplay(can_replay=sequence_parallel_size == 1)
        self._micro_batches: list[MicroBatch] = []
        self._current: MicroBatch | None = None
        self._global_step: int | None = None
        self._auto_threshold = AutoThreshold()
        self._update_figures = UpdateFigures()
        self._threshold: float | None = None
        # τ of the mini-batch that `_token_norm_max` is from.
        self._threshold_of_max: float | None = None
        self._drill_found: float | None = None
        self._ordinary: float | None = None
        # Of the last mini-batch without a spike, this rank's squared norms by layer, and Σ w².
        self._ordinary_squares: tuple[Tensor, Tensor] | None = None
        self._token_norm_max = 0.0
        self._misaligned = self._compared = 0.0

    def start_mini_batch(self) -> None:
        """Discards the events of the last mini-batch; the update's metrics still count them."""
        self.events = []

    def start_update(self, global_step: int | None = None) -> None:
        """Discards the events and metrics of the last update."""
        self.events = []
        self._events_of_update = []
        self._micro_batches = []
        self._global_step = global_step
        self._token_norm_max = 0.0
        self._threshold_of_max = None
        self._misaligned = self._compared = 0.0
        self._update_figures.start_update()
        self._drill_found = None

    def begin_pass(self, inputs: dict[str, Any], rows: Sequence[int]) -> None:
        """Starts recording a training pass; called before it.

        Args:
            inputs (dict): The inputs of `forward`; picklable. Kept until `locate`.
            rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
        """
        self._current = MicroBatch(inputs, [int(row) for row in rows], get_rng_state(self._device))
        self._meter.start()

    def observe(
        self,
        log_prob: Tensor,
        entropy: Tensor | None,
        weight: Tensor,
        sources: Mapping[str, tuple[Tensor, Callable[[Tensor], Tensor]]] | None = None,
        **tokens: Tensor,
    ) -> None:
        """Records the tokens of the current pass, and their coefficients ∂L/∂log p during its backward.

        All tensors have shape (rows, response length).

        Args:
            log_prob (Tensor): The log-probs that the loss is computed from.
            entropy (Tensor, optional): The entropies that the loss is computed from.
            weight (Tensor): The weight w of each token in the loss, gradient accumulation included.
            sources (dict, optional): If the loss is computed from other tensors than those given: for "coefficient"
                (of log-probs) and "entropy_coefficient" the tensor, and a function that brings its gradient into the
                shape (rows, response length).
            tokens (Tensor): The tensors that `token_evidence` reports; at least `response_mask` and `token_id`.
        """
        current = self._current
        if current is None:
            raise RuntimeError("observe() belongs between begin_pass() and end_pass().")
        noted = {"log_prob": log_prob, "weight": weight, **tokens}
        if entropy is not None:
            noted["entropy"] = entropy
        shapes = {name: tuple(tensor.shape) for name, tensor in noted.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"all token tensors must be of one shape (rows, response length), got {shapes}.")
        current.tokens = {name: _with_a_column(tensor.detach()) for name, tensor in noted.items()}
        if sources is None:
            given = {"coefficient": log_prob, "entropy_coefficient": entropy}
            sources = {name: (tensor, _unchanged) for name, tensor in given.items() if tensor is not None}
        for name, (source, reshape) in sources.items():
            if source.requires_grad:
                source.register_hook(_catch(current.tokens, name, reshape))

    def end_pass(self) -> None:
        """Stops recording a training pass; called after its backward."""
        if self._current is None:
            raise RuntimeError("end_pass() comes after begin_pass().")
        self._current.squares = self._meter.stop()
        self._micro_batches.append(self._current)
        self._current = None

    def locate(self, epoch: int, mini_batch: int) -> bool:
        """Checks the mini-batch's gradient, and on a spike finds the culprits. A collective call.

        With the actions "log" and "skip", the gradients, the random state and the training flags are restored bit for
        bit. With "drop", the culprits' part is removed from the gradient.

        Args:
            epoch (int): The PPO epoch, for the event.
            mini_batch (int): The mini-batch's index in the update, for the event.

        Returns:
            bool: Whether to take the optimizer step.

        Raises:
            RankLostError: An error on this rank that cannot be propagated to the other ranks: it aborts the run instead
                of deadlocking it. Any other error is logged, and training continues.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        self._event = self.squared_norms = None
        try:
            return self._locate(micro_batches, epoch, mini_batch)
        except RankLostError:
            raise
        except Exception as error:
            if collectives.world_size() > 1 and not isinstance(error, collectives.RankFailedError):
                raise RankLostError(
                    f"the search for the tokens behind a gradient spike failed on this rank ({type(error).__name__}: "
                    f"{error}), which cannot be propagated to the other ranks"
                ) from error
            logger.warning(
                "the search for the tokens behind a gradient spike failed; training continues", exc_info=True
            )
            return True

    def add_to_event(self, **facts: Any) -> None:
        """Adds facts to the event of the last `locate`, if it found a spike."""
        if self._event is not None:
            self._event.update(facts)

    def metrics(self) -> dict[str, float]:
        """The update's metrics for the training log, the same on every rank.

        `misaligned_share` (only with rollout log-probs) is the fraction of response tokens whose log-prob differs from
        the rollout's by more than a nat. `threshold` is τ in the mini-batch with the largest norm, or in the last one
        if that was in the warm-up of an automatic threshold; it is missing before the warm-up has ended. `drill_found`
        (only after a drill) is 1 if the planted token was found. The other metrics do not count drills.
        """
        optional = {"actor/gradloc/misaligned_share": self._misaligned / self._compared} if self._compared else {}
        threshold = self._threshold if self._threshold_of_max is None else self._threshold_of_max
        if threshold is not None:
            optional["actor/gradloc/threshold"] = threshold
        if self._drill_found is not None:
            optional["actor/gradloc/drill_found"] = self._drill_found
        spikes = [event for event in self._events_of_update if event["drill"] is None]
        return (
            optional
            | self._update_figures.metrics()
            | {
                "actor/gradloc/token_norm_max": self._token_norm_max,
                "actor/gradloc/triggered": len(spikes),
                "actor/gradloc/culprits": sum(len(event["culprits"]) for event in spikes),
                "actor/gradloc/passes": sum(event["passes"] for event in spikes),
                "actor/gradloc/seconds": sum(event["seconds"] for event in spikes),
                "actor/gradloc/skipped": sum(event["action"] == "skip" and event["applied"] for event in spikes),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """The automatic threshold's norms: the same on every rank and for any number of ranks."""
        return {"token_norms": self._auto_threshold.norms()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; with None (no saved state) the warm-up of an automatic threshold starts over."""
        norms = state["token_norms"] if state is not None else ()
        if not norms and self.config.threshold == "auto":
            logger.warning(
                "No norms are loaded for grad_norm_threshold=auto (the checkpoint or checkpoint.load_contents is "
                "without them, which are part of 'extra'); its warm-up starts over."
            )
        self._auto_threshold.restart_from(norms)

    def _locate(self, micro_batches: list[MicroBatch], epoch: int, mini_batch: int) -> bool:
        started = time.perf_counter()
        gradient = self._measured(micro_batches, self._loss_scale())
        self._compare_with_rollout(*gradient.by_rank[:, 4:6].sum(0).tolist())
        self._update_figures.take_in(gradient.by_rank[:, 6:])
        where = {"global_step": self._global_step, "epoch": epoch, "mini_batch": mini_batch}
        if self._global_step is not None and tuple(where.values()) == (self.config.drill_step, 0, 0):
            self._hold_drill(gradient, where)
            started = time.perf_counter()

        level = gradient.level
        threshold = self._next_threshold(level)
        if level.token_norm >= self._token_norm_max:
            self._token_norm_max, self._threshold_of_max = level.token_norm, self._threshold
        self._update_figures.take_in_margin(level.token_norm, self._threshold)
        if not self._is_spike(gradient, threshold):
            if level.token_norm <= threshold and level.root_mean_square:  # else no token could move
                self._ordinary = level.root_mean_square
                self._ordinary_squares = gradient.squares.sum(0), gradient.square_weights.sum()
            return True

        investigation, passes = self._investigation(gradient, threshold, reserve=self.config.action == "drop")
        with undisturbed(self._module, self._device):
            with SetAside(self._module):
                investigation.run()
            applied = self._act(investigation, passes, micro_batches, self._global_norm(gradient), gradient.scale)
        self._event = self._describe(
            gradient, investigation, started, **where, passes=passes.count, action=self.config.action, applied=applied
        )
        self._event["replay"] = self._keep_bundle(gradient, investigation, self._event)
        self._add(self._event)
        return not (self.config.action == "skip" and applied)

    def _add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._events_of_update.append(event)

    def _keep_bundle(self, gradient: _Gradient, investigation: Investigation, event: Mapping[str, Any]) -> str | None:
        """The folder that the event's bundle is in; None without one. A collective call."""
        if self._recorder is None:
            return None
        try:
            return self._recorder.keep(
                event,
                investigation,
                gradient.micro_batches,
                gradient.scale,
                self._sequence_parallel_size,
                gradient.squared_norms,
            )
        except collectives.RankFailedError:
            logger.warning("a gradient spike is reported without a replay bundle", exc_info=True)
            return None

    def _hold_drill(self, gradient: _Gradient, where: dict[str, Any]) -> None:
        """Holds a drill. Whatever becomes of it, the real mini-batch is checked as usual. A collective call."""
        self._drill_found = 0.0
        try:
            event = self._drill(gradient, where)
        except Exception as error:
            if collectives.world_size() > 1 and not isinstance(error, collectives.RankFailedError):
                raise
            logger.warning("the spike drill failed; training continues", exc_info=True)
        else:
            self._add(event)
            self._drill_found = float(event["drill"]["found"])
        finally:
            self.squared_norms = gradient.squared_norms

    def _drill(self, gradient: _Gradient, where: dict[str, Any]) -> dict[str, Any]:
        """Plants a spike in a copy of the mini-batch, searches for it, and restores everything. A collective call.

        Returns:
            dict: The drill's event; of a drill that failed, it has an error or no culprit at the planted place.
        """
        started = time.perf_counter()
        threshold = self._spike_threshold(gradient.level)
        place: dict[str, int] | None = None
        if self._kind(gradient) == "global":
            self._global_norm(gradient)  # now: it is set aside below
        try:
            with undisturbed(self._module, self._device), SetAside(self._module):
                units = self._exchange_units(gradient)
                passes = self._passes(gradient)
                passes.rehearse()
                planted = drill.choose(units, self._meter, passes, gradient.micro_batches, where["global_step"])
                place = planted.place()
                if threshold == _WARMUP_MOST:  # all gradients so far were zero
                    threshold = _WARMUP_MARGIN * planted.norm
                searched = self._drilled(gradient, planted, units, threshold)
                if not self._is_spike(searched, threshold):
                    raise drill.DrillFailedError("the planted token did not put its micro-batch over the threshold")
                investigation, passes = self._investigation(searched, threshold)
                clear_gradients(self._module)  # the drill's own, which is measured by now
                investigation.run()
        except (drill.DrillFailedError, collectives.RankFailedError) as error:
            searched = gradient
            investigation, passes = self._investigation(gradient, threshold)
            investigation.error = str(error)
        event = self._describe(
            searched, investigation, started, **where, passes=passes.count, action="log", applied=True
        )
        found = (
            any(place == {name: culprit[name] for name in place} for culprit in event["culprits"]) if place else False
        )
        if not found and collectives.rank() == 0:
            logger.warning(
                "The spike drill in step %d FAILED: the planted token was not found (diagnosis: %s; error: %s; %d of "
                "%d passes). Do not rely on spike_detection in this configuration before a drill succeeds.",
                where["global_step"],
                event["diagnosis"],
                event["error"],
                passes.count,
                self.config.budget,
            )
        event["drill"] = {"planted": place, "found": found, "passes": passes.count}
        event["summary"] = _summary(event)
        return event

    def _drilled(
        self, gradient: _Gradient, planted: Planted, units: Mapping[UnitName, Unit], threshold: float
    ) -> _Gradient:
        """The mini-batch's gradient with the planted token's coefficient raised; it replaces the current gradient."""
        unit, scale = units[planted.unit], gradient.scale
        # The planted token may be one that could not move, and so did not count.
        needed = threshold * math.hypot(unit.root_square_weight, planted.weight) + _known(unit.norm)
        if self._kind(gradient) == "global":
            # The data-parallel mean gives each token 1/W of its weight in the reduced gradient.
            share = threshold * planted.weight / self._data_parallel_size
            norms = math.hypot(self._global_threshold(gradient, threshold), share) + _known(self._global_norm(gradient))
            needed = max(needed, self._data_parallel_size * norms)
        raised = drill.coefficient(planted, needed)
        new_scale = drill.loss_scale(scale, raised, planted.weight)
        mine = collectives.rank() // self._sequence_parallel_size == planted.unit[0]
        micro_batches: list[MicroBatch] = []
        # An exchange, so that an error on one rank (out of memory, say) fails the drill on all.
        collectives.exchange(
            lambda: micro_batches.extend(drill.plant(gradient.micro_batches, mine, planted, raised, scale, new_scale))
        )
        copy = replace(gradient, micro_batches=micro_batches, scale=new_scale)
        drill.rerun(micro_batches, self._meter, self._passes(copy), units, reduced=self._kind(gradient) == "global")
        return self._measured(micro_batches, new_scale)

    def _measured(self, micro_batches: list[MicroBatch], scale: float) -> _Gradient:
        """The current gradient, measured. A collective call."""
        squares = torch.stack([micro_batch.squares for micro_batch in micro_batches]).to(self._device) / scale**2
        square_weights = torch.stack([square_weight(micro_batch.tokens) for micro_batch in micro_batches])
        largest, largest_finite = _largest_token_equivalents(squares.sum(1), square_weights)
        figures = [largest, largest_finite, squares.sum(), square_weights.sum(), *_count_misaligned(micro_batches)]
        of_tokens = own_figures([micro_batch.tokens for micro_batch in micro_batches])
        by_rank = torch.stack(collectives.gather(torch.cat([torch.stack(figures), of_tokens]).to(self._device)))
        by_rank = by_rank[:: self._sequence_parallel_size]
        self.squared_norms = None
        level = self._meter.level(by_rank[:, :4], lambda: self._reduced_norm(scale))
        return _Gradient(
            micro_batches, scale, squares, square_weights, by_rank, level, level.global_norm, self.squared_norms
        )

    def _kind(self, gradient: _Gradient) -> str:
        return self.config.trigger if gradient.level.by_unit else "global"

    def _is_spike(self, gradient: _Gradient, threshold: float) -> bool:
        """Whether to start a search. A collective call."""
        if self._kind(gradient) == "unit":
            return not gradient.level.token_norm <= threshold
        return not self._global_norm(gradient) <= self._global_threshold(gradient, threshold)

    def _global_norm(self, gradient: _Gradient) -> float:
        """The reduced gradient's norm, measured on the first call, which is collective."""
        if gradient.global_norm is None:
            gradient.global_norm = self._reduced_norm(gradient.scale)
            gradient.squared_norms = self.squared_norms
        return gradient.global_norm

    def _global_threshold(self, gradient: _Gradient, threshold: float) -> float:
        # The data-parallel mean gives each token 1/W of its weight in the reduced gradient.
        return threshold * math.sqrt(float(gradient.by_rank[:, 3].sum())) / self._data_parallel_size

    def _passes(self, gradient: _Gradient) -> Passes:
        return Passes(
            self._module,
            self._forward,
            self._device,
            self._replay,
            gradient.scale,
            own=gradient.micro_batches,
            sequence_parallel_size=self._sequence_parallel_size,
            recover=self._recover,
        )

    def _investigation(
        self, gradient: _Gradient, threshold: float, reserve: bool = False
    ) -> tuple[Investigation, Passes]:
        """A search that has not begun; with `reserve`, it leaves budget for recomputing every micro-batch."""
        units = self._exchange_units(gradient)
        passes = self._passes(gradient)
        budget = self.config.budget
        if reserve and (recomputed := 1 + max(index for _, index in units)) < budget:
            budget -= recomputed
        investigation = Investigation(
            threshold,
            self.config.until,
            budget,
            self._meter,
            passes,
            gradient.micro_batches,
            units,
            gradient.scale,
            self._global_norm(gradient),
            self._ordinary,
        )
        return investigation, passes

    def _describe(
        self, gradient: _Gradient, investigation: Investigation, started: float, **facts: Any
    ) -> dict[str, Any]:
        """The event of a search, with some more facts. A collective call."""
        medians = token_medians(gradient.micro_batches, self._sequence_parallel_size)
        ordinary = self._ordinary_layer_norms()
        clocks = collectives.gather_objects((time.perf_counter() - started, datetime.now(timezone.utc).isoformat()))
        with collectives.same_on_all_ranks():
            threshold, global_norm = investigation.threshold, self._global_norm(gradient)
            global_threshold = self._global_threshold(gradient, threshold)
            trigger = {"kind": "global", "norm": global_norm, "threshold": global_threshold}
            if self._kind(gradient) == "unit":
                worst = max(investigation.units.values(), key=lambda unit: unit.token_equivalent)
                trigger = {"kind": "unit", "norm": worst.norm, "threshold": threshold * worst.root_square_weight}
            event = {
                "schema": SCHEMA,
                "gradloc_version": __version__,
                "time": clocks[0][1],
                **facts,
                "trigger": trigger,
                "threshold": threshold,
                "global_norm": global_norm,
                "global_threshold": global_threshold,
                **findings(investigation, medians, ordinary),
                "budget": self.config.budget,
                "seconds": max(seconds for seconds, _ in clocks),
                "search": self._meter.kind,
                "world_size": self._data_parallel_size,
                "loss_scale": gradient.scale,
                "layer_clip": None,
                "drill": None,
                "replay": None,
            }
            event["summary"] = _summary(event)
        return event

    def _ordinary_layer_norms(self) -> dict[str, float] | None:
        """Each layer's norm/sqrt(Σw²) in the last mini-batch without a spike; None if unknown. A collective call."""
        if self._ordinary_squares is None:
            return None
        squares, square_weight = self._ordinary_squares
        by_rank = torch.stack(collectives.gather(torch.cat([squares, square_weight.unsqueeze(0)])))
        *of_layers, square_weight_sum = by_rank[:: self._sequence_parallel_size].sum(0).tolist()
        if not (any(of_layers) and square_weight_sum):
            return None
        return {
            layer: math.sqrt(square / square_weight_sum)
            for layer, square in zip(self._meter.layers, of_layers, strict=True)
        }

    def _spike_threshold(self, level: Level) -> float:
        """τ for a mini-batch."""
        if self.config.threshold != "auto":
            return float(self.config.threshold)
        known = [level.finite, *self._auto_threshold.norms()]
        return self._auto_threshold.value or _WARMUP_MARGIN * max(known) or _WARMUP_MOST

    def _next_threshold(self, level: Level) -> float:
        """τ for a mini-batch, which an automatic threshold then takes in."""
        threshold = self._spike_threshold(level)
        self._threshold = self._auto_threshold.value if self.config.threshold == "auto" else threshold
        # Also with a fixed threshold, so that a resumed run can switch to an automatic one.
        self._auto_threshold.take_in(level.token_norm)
        return threshold

    def _compare_with_rollout(self, misaligned: float, tokens: float) -> None:
        self._misaligned += misaligned
        self._compared += tokens
        if misaligned > MISALIGNED_FRACTION * tokens and collectives.rank() == 0:
            logger.warning(
                "%.0f of %.0f response tokens have log-probs that differ from the rollout's by more than %g nat: "
                "they may belong to other positions, weights or temperatures",
                misaligned,
                tokens,
                MISALIGNED_NATS,
            )

    def _reduced_norm(self, scale: float) -> float:
        self.squared_norms = self._measure() / scale**2
        # On the host, where the sum of the same numbers is the same on all ranks.
        return math.sqrt(math.fsum(self.squared_norms.tolist()))

    def _act(
        self,
        investigation: Investigation,
        passes: Passes,
        micro_batches: list[MicroBatch],
        global_norm: float,
        scale: float,
    ) -> bool:
        """Applies `spike_action`; returns whether it was applied. The same on every rank."""
        if self.config.action == "skip":
            # After an overflow the gradient scaler skips the step itself, and must see the overflow to lower its scale.
            return scale == 1 or math.isfinite(global_norm)
        if self.config.action == "drop":
            squared_norms = self.squared_norms
            dropped = actions.drop(
                investigation,
                passes,
                micro_batches,
                self.config.budget,
                self._module,
                lambda: self._reduced_norm(scale),
            )
            if not dropped:
                self.squared_norms = squared_norms
            return dropped
        return True

    def _exchange_units(self, gradient: _Gradient) -> dict[UnitName, Unit]:
        by_rank = collectives.exchange(lambda: self._own_units(gradient))
        by_rank = by_rank[:: self._sequence_parallel_size]
        return {(rank, i): unit for rank, units in enumerate(by_rank) for i, unit in enumerate(units)}

    def _own_units(self, gradient: _Gradient) -> list[Unit]:
        own = []
        for micro_batch, by_layer, sum_of_squares in zip(
            gradient.micro_batches, gradient.squares.tolist(), gradient.square_weights.tolist(), strict=True
        ):
            mask = micro_batch.tokens["response_mask"].bool()
            norm, layer_norms = self._meter.norms(by_layer)
            broken = micro_batch.broken(gradient.scale != 1)
            own.append(
                Unit(
                    rows=len(micro_batch.rows),
                    tokens=int(mask.sum()),
                    broken_tokens=int((broken & mask).sum()),
                    usable_tokens=int(drill.usable_tokens(micro_batch.tokens, broken).sum()),
                    root_square_weight=math.sqrt(sum_of_squares),
                    norm=norm,
                    layer_norms=layer_norms,
                )
            )
        return own


def _summary(event: dict[str, Any]) -> str:
    """The event in one sentence; wording must not cost the event."""
    try:
        return describe(event)
    except Exception:
        logger.warning("an event is written without its summary", exc_info=True)
        return ""


def _known(norm: float | None) -> float:
    """The norm; 0 if it is unknown or not finite."""
    return norm if norm is not None and math.isfinite(norm) else 0.0


def _catch(tokens: dict[str, Tensor], name: str, reshape: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        tokens[name] = _with_a_column(reshape(gradient.detach()))

    return hook


def _with_a_column(values: Tensor) -> Tensor:
    """Values of shape (rows, response length), masked ones if all responses are empty: maxima need a value."""
    return values if values.shape[1] else nn.functional.pad(values, (0, 1))


def _unchanged(gradient: Tensor) -> Tensor:
    return gradient


def _count_misaligned(micro_batches: list[MicroBatch]) -> tuple[Tensor, Tensor]:
    """Counts the response tokens that are misaligned with the rollout, and all of them; each float64 of shape ()."""
    counts = micro_batches[0].tokens["weight"].new_zeros(2, dtype=torch.float64)
    for tokens in (micro_batch.tokens for micro_batch in micro_batches):
        if "rollout_log_prob" in tokens:
            mask = tokens["response_mask"].bool()
            off = off_the_rollout(tokens["log_prob"] - tokens["rollout_log_prob"])
            counts += torch.stack([(mask & off).sum(), mask.sum()])
    return counts[0], counts[1]


def _largest_token_equivalents(squares: Tensor, square_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The largest norm/sqrt(Σw²) of a rank's micro-batches, and the largest finite one.

    Returns:
        tuple[Tensor, Tensor]: Each of shape (); NaN counts as infinite. No host sync.
    """
    ratio = (squares / square_weights).sqrt()
    ratio = torch.where((squares == 0) & (square_weights == 0), 0.0, ratio)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).max(), torch.where(ratio.isfinite(), ratio, 0.0).max()
