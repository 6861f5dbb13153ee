# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Records micro-batches, and on a spike writes them down, to be searched later. No collective call."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from ..bundles.bundle_writer import NothingMovesError, write_recorded_bundle
from ..evidence.event import recorded_event
from ..guarded import ForeseenError, PatientThread, guarded
from ..lines import Event, Where
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..measure.pass_recorder import LossInputs, ReadTokens
from ..metrics import UpdateMetrics
from ..threshold import Threshold, is_over
from .engine_data import ROW, LossData
from .replay_bundles import engine_context, ragged_rows


@dataclass
class Recorded:
    """References to what a micro-batch's loss is computed from; nothing is copied before `read`."""

    seen: LossData
    read_tokens: ReadTokens
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by the names of coefficients, after the backward
    # The derivative of what the engine computes the backward of with respect to the loss.
    factor: list[Tensor] = field(default_factory=list)

    def read(self, rng_state: Tensor) -> tuple[MicroBatch, float]:
        """The micro-batch as a training pass records it, and what to divide its coefficients by.

        Engines multiply the loss before the backward: by fp16's scale, by the number of micro-batches, by that of
        tokens. The derivative with respect to the loss itself says by how much, so that coefficients are those of the
        loss of a data-parallel rank, whatever the engine does.
        """
        coefficients = {name: self.seen.of_responses(gradient) for name, gradient in self.gradients.items()}
        factor = float(self.factor[0]) if self.factor else 1.0
        if not (math.isfinite(factor) and factor > 0):
            raise ForeseenError(f"the engine multiplies the loss by {factor}")
        tokens = {**self.read_tokens(), **coefficients}
        return MicroBatch(self.seen.inputs, self.seen.data[ROW].tolist(), (rng_state, None), tokens), factor


class SpikeRecorder:
    """Records the losses of one data-parallel rank, and on a spike writes its micro-batches to a bundle.

    The ranks do not communicate: all see the same global norm and the same number of tokens, and so decide alike. It
    measures nothing, and copies nothing from the device before a spike. Nothing here raises: an error is one warning,
    and training goes on.

    Args:
        engine (BaseEngine): verl's, on a rank that has the model's outputs.
        config (ActorConfig): verl's configuration of the actor.
    """

    def __init__(self, engine: Any, config: Any) -> None:
        self.rank: int = engine.get_data_parallel_rank()  # among the data-parallel ones
        self._engine = engine
        self._config = config
        self._threshold = Threshold(config.grad_norm_threshold)
        self._metrics = UpdateMetrics()
        self._disk = PatientThread(Path(config.bisect_dump_dir))
        self._said: set[str] = set()
        self.start_mini_batch()

    def start_update(self, global_step: int | None) -> None:
        """Discards the metrics of the last update."""
        self._metrics = UpdateMetrics()

    def start_mini_batch(self) -> None:
        """Discards the events of the last mini-batch; the update's metrics still count them."""
        self.events: list[Event] = []  # none or one
        self._failed = False
        self._micro_batches: list[Recorded] = []
        self._tokens: float | None = None  # how many the loss divides by, of all ranks
        self._rng_state = torch.get_rng_state()

    @contextmanager
    def recording(self, data: TensorDict) -> Iterator[None]:
        """Around a part of the recording of a micro-batch: after an error, nothing of the mini-batch is recorded."""
        with self._guarded("a mini-batch is not recorded"):
            if self._tokens is None and (count := tu.get(data, "batch_num_tokens")) is not None:
                self._tokens = float(count)
            had_failed, self._failed = self._failed, True
            yield
            self._failed = had_failed
        if self._failed:
            self._micro_batches = []

    def observe(self, seen: LossData, loss_inputs: LossInputs, read_tokens: ReadTokens, result: Any) -> None:
        """Records a micro-batch, between its loss, which gave this result, and its backward."""
        if "coefficient" not in loss_inputs:
            raise ForeseenError("the loss has no log-probs")
        if ROW not in seen.data.keys():
            raise ForeseenError("the engine does not hand all columns of the data to the loss")
        recorded = Recorded(seen, read_tokens)
        for name, (values, _) in loss_inputs.items():
            if values.requires_grad:
                values.register_hook(partial(recorded.gradients.__setitem__, name))
        loss = result[0] if isinstance(result, tuple) else result
        if loss.requires_grad:
            loss.register_hook(recorded.factor.append)
        self._micro_batches.append(recorded)

    def discard(self) -> None:
        """Drops what was recorded."""
        self._micro_batches = []

    def check(self, where: Where, norm: Any) -> None:
        """Called after a mini-batch's optimizer step: on a spike, it makes an event and writes its bundle.

        Args:
            where (Where): The mini-batch.
            norm (float | Tensor): The norm of its gradient, of all ranks.
        """
        started = time.perf_counter()
        with self._guarded("a mini-batch is not recorded"):
            if self._tokens is None:
                raise ForeseenError("the engine does not say how many tokens a mini-batch has (batch_num_tokens)")
            # With loss_agg_mode=token-mean, the gradient is Σ g_t / n, and the norm of n ordinary tokens s·√n / n.
            norm, root = float(norm), math.sqrt(self._tokens)
            level = norm * root if math.isfinite(norm) else math.inf
            threshold = self._threshold.next(level, level if math.isfinite(level) else 0.0)
            self._metrics.take_in_level(level, self._threshold.last)
            if not is_over(level, threshold):
                return
            micro_batches, factor = self._read()
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
                # The optimizer step was taken as usual, which is all that the possible actions ask for.
                action=self._config.spike_action,
                started=started,
                keep=partial(self._keep_bundle, micro_batches),
            )
            self.events.append(event)
            self._metrics.add_spike(event)

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

    def _read(self) -> tuple[dict[MicroBatchName, MicroBatch], float]:
        """This rank's micro-batches on the CPU, none if they cannot be read, and what their losses were multiplied by.

        That factor is 1 where no loss had a gradient, and the same for all others.
        """
        with self._guarded("the tokens of a gradient spike are not recorded"):
            found, scale = {}, 1.0
            for index, recorded in enumerate(self._micro_batches):
                micro_batch, factor = recorded.read(self._rng_state)
                found[self.rank, index] = micro_batch.portable(factor)
                scale = factor if recorded.factor else scale
            return found, scale
        return {}, 1.0

    def _keep_bundle(self, micro_batches: Mapping[MicroBatchName, MicroBatch], event: Event) -> str | None:
        """The folder that this rank's bundle of the event is in, relative to the evidence; None without one."""
        if not self._config.spike_replay or not micro_batches:
            return None

        def write() -> str:
            """What it says of the trainer is read from the disk, too."""
            config, suffix = self._config, f"-rank{self.rank}"
            context = engine_context(self._engine, config)
            to = Path(config.bisect_dump_dir)
            return write_recorded_bundle(to, event, micro_batches, ragged_rows, context, suffix, config.spike_replay)

        with self._guarded("no replay bundle is kept of a gradient spike"), suppress(NothingMovesError):
            return self._disk.run(write)
        return None
