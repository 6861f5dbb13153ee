# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Decides after an optimizer step whether it was a spike, and writes what was recorded. No collective call."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..bundles import bundle_writer
from ..bundles.recorded import NothingMovesError, write_recorded_bundle
from ..evidence.patient_disk import PatientDisk
from ..evidence.recorded_event import recorded_event
from ..guarded import ForeseenError, guarded
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..metrics import UpdateMetrics
from ..threshold import Threshold, is_over
from .actor_config import SpikeConfig
from .engine_data import bound_config
from .loss_weights import eos_tokens
from .recorded_loss import RecordedLoss
from .replay_bundles import engine_context, ragged_rows

_NOT_RECORDED = "a mini-batch is not recorded"


class SpikeRecorder:
    """Records the losses of one data-parallel rank, and on a spike writes its micro-batches to a bundle.

    The ranks do not communicate: all see the same global norm and the same number of tokens, and so decide alike. It
    measures nothing, and copies nothing from the device before a spike. Nothing here raises: an error is one warning,
    and training goes on.

    Args:
        engine (BaseEngine): verl's, on a rank that has the model's outputs.
        config (ActorConfig): verl's configuration of the actor.

    Attributes:
        rank (int): The data-parallel rank.
        events (list[dict]): Those of the last mini-batch: none or one.
    """

    def __init__(self, engine: Any, config: Any) -> None:
        self.rank: int = engine.get_data_parallel_rank()
        self.events: list[dict[str, Any]] = []
        self._engine = engine
        self._config = config
        # FSDP's module has what transformers loaded; other engines have a model of their own.
        self._eos_tokens = eos_tokens(getattr(engine, "module", None)) or eos_tokens(engine.model_config)
        self._loss: RecordedLoss | None = None
        self._threshold = Threshold(config.grad_norm_threshold)
        self._metrics = UpdateMetrics()
        self._disk = PatientDisk(Path(config.bisect_dump_dir))
        self._said: set[str] = set()

    def start_update(self, global_step: int | None) -> None:
        """Discards the events and metrics of the last update."""
        self.events, self._metrics = [], UpdateMetrics()

    def start_mini_batch(self) -> None:
        """Discards the events of the last mini-batch; the update's metrics still count them."""
        self.events = []

    def recorded(self, loss_function: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function that the engine is to be given for a mini-batch."""
        config = bound_config(loss_function, SpikeConfig) or self._config
        self._loss = RecordedLoss(loss_function, config, partial(self._guarded, _NOT_RECORDED))
        return self._loss

    def discard(self) -> None:
        """Drops what was recorded."""
        self._loss = None

    def check(self, where: Mapping[str, Any], norm: Any) -> None:
        """Called after a mini-batch's optimizer step: on a spike, it makes an event and writes its bundle.

        Args:
            where (Mapping): `global_step`, `epoch` and `mini_batch`.
            norm (float | Tensor): The norm of its gradient, of all ranks.
        """
        with self._guarded(_NOT_RECORDED):
            if self._loss is not None:
                self._check(self._loss, where, float(norm))

    def metrics(self) -> dict[str, float]:
        """The update's metrics, on rank 0; other ranks have none."""
        return self._metrics.metrics() if self.rank == 0 else {}

    def state_dict(self) -> dict[str, Any]:
        """See `Threshold.state_dict`."""
        return self._threshold.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """See `Threshold.load_state_dict`."""
        self._threshold.load_state_dict(state)

    def _guarded(self, what: str) -> AbstractContextManager[None]:
        """Within it, an error is a warning: what failed, of one kind of failure the first time only."""
        return guarded(f"data-parallel rank {self.rank}: {what}", self._said)

    def _check(self, loss: RecordedLoss, where: Mapping[str, Any], norm: float) -> None:
        started = time.perf_counter()
        count = loss.tokens_of_mini_batch
        if count is None:
            raise ForeseenError("the engine does not say how many tokens a mini-batch has (batch_num_tokens)")
        # With loss_agg_mode=token-mean, the gradient is Σ g_t / n, and the norm of n ordinary tokens s·√n / n.
        root = math.sqrt(count)
        level = norm * root if math.isfinite(norm) else math.inf
        finite = level if math.isfinite(level) else 0.0
        threshold = self._threshold.next(level, finite)
        self._metrics.take_in_level(level, self._threshold.last)
        if not is_over(level, threshold):
            return
        micro_batches, factor = self._read(loss)
        # With fp16's scaler the factor is the scale of this mini-batch: its own may have changed with the step.
        has_scaler = getattr(self._engine, "scaler", None) is not None
        event = recorded_event(
            micro_batches,
            where=where,
            threshold=threshold,
            global_norm=norm,
            global_threshold=threshold / root if root else threshold,
            world_size=self._engine.get_data_parallel_size(),
            loss_scale=factor if has_scaler else 1.0,
        )
        # The optimizer step was taken as usual, which is all that the possible actions ask for.
        event |= {"action": self._config.spike_action, "applied": True}
        event["seconds"] = time.perf_counter() - started
        event["replay"] = self._keep_bundle(event, micro_batches)
        event["seconds"] = time.perf_counter() - started
        self.events.append(event)
        self._metrics.events.append(event)

    def _read(self, loss: RecordedLoss) -> tuple[dict[MicroBatchName, MicroBatch], float]:
        """This rank's micro-batches on the CPU, none if they cannot be read, and what their losses were multiplied by.

        That factor is 1 where no loss had a gradient, and the same for all others.
        """
        with self._guarded("the tokens of a gradient spike are not recorded"):
            found, scale = {}, 1.0
            for index, recorded in enumerate(loss.micro_batches):
                micro_batch, factor = recorded.read(self._config, self._eos_tokens, loss.rng_state)
                found[self.rank, index] = micro_batch.portable(factor)
                scale = factor if recorded.factor else scale
            return found, scale
        return {}, 1.0

    def _keep_bundle(self, event: Mapping[str, Any], micro_batches: Mapping[MicroBatchName, MicroBatch]) -> str | None:
        """The folder that this rank's bundle of the event is in, relative to the evidence; None without one."""
        if not self._config.spike_replay or not micro_batches:
            return None

        def write() -> str:
            """What it says of the trainer is read from the disk, too."""
            directory, suffix, most = Path(self._config.bisect_dump_dir), f"-rank{self.rank}", self._config.spike_replay
            context = engine_context(self._engine, self._config)
            return write_recorded_bundle(directory, event, micro_batches, ragged_rows, context, suffix, most)

        with self._guarded("no replay bundle is kept of a gradient spike"), suppress(NothingMovesError):
            return self._disk.run(write, bundle_writer.PATIENCE)
        return None
