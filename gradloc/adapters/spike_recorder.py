# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Decides after an optimizer step whether it was a spike, and writes what was recorded. No collective call."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from ..bundles import bundle_writer, naming
from ..bundles.bundle_files import bundles_in
from ..bundles.layout import NotReplayableError
from ..bundles.recorded import NothingMovesError, write_recorded_bundle
from ..evidence.patient_disk import PatientDisk
from ..evidence.recorded_event import recorded_event
from ..evidence.writer import limit_texts
from ..guarded import guarded
from ..judge.sentences import summary
from ..measure.figures import Level
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..metrics import UpdateMetrics
from ..threshold import Threshold, is_over
from .engine_data import sample_of_row
from .recorded_loss import NotRecordedError, RecordedLoss
from .replay_bundles import ragged_rows
from .saved_state import read_state, write_state
from .update_evidence import facts_of_culprit, write_update


class SpikeRecorder:
    """Writes the spikes of one data-parallel rank, whose micro-batches were recorded.

    The ranks do not communicate: all see the same global norm and the same number of tokens, and so decide alike. Each
    keeps a bundle of its own micro-batches; rank 0 also writes the evidence. Nothing here raises: an error is one
    warning, and training goes on.

    Args:
        config (ActorConfig): verl's configuration of the actor.
        rank (int): The data-parallel rank.
        world_size (int): The number of data-parallel ranks.
        context (Callable): Returns what a bundle has of the trainer; see `BundleWriter`.
        tokenizer (PreTrainedTokenizer, optional): The actor's; without one, tokens have no text.
        eos_tokens (set[int]): Where a rollout stops.

    Attributes:
        events (list[dict]): Those of the last mini-batch: none or one.
    """

    def __init__(
        self,
        config: Any,
        rank: int,
        world_size: int,
        context: Callable[[], Mapping[str, Any]],
        tokenizer: Any = None,
        eos_tokens: set[int] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._context = context
        self._tokenizer = tokenizer
        self._eos_tokens = eos_tokens
        self._threshold = Threshold(config.grad_norm_threshold)
        self._metrics = UpdateMetrics()
        self._events_of_step: list[dict[str, Any]] = []
        self._disk = PatientDisk(Path(config.bisect_dump_dir))
        self._said: set[str] = set()

    def start_mini_batch(self, where: tuple[int, int]) -> None:
        """Begins a mini-batch, whose PPO epoch and number in the step are given; the first one begins a step."""
        self.events = []
        if where == (0, 0):
            self._metrics, self._events_of_step = UpdateMetrics(), []

    def guarded(self, what: str) -> AbstractContextManager[None]:
        """Within it, an error is a warning: what failed, of one kind of failure the first time only."""
        return guarded(f"data-parallel rank {self._rank}: {what}", self._said)

    def end_mini_batch(
        self,
        data: TensorDict,
        loss: RecordedLoss,
        norm: Any,
        where: Mapping[str, Any],
        has_scaler: bool,
        rng_state: Tensor,
    ) -> None:
        """Checks a mini-batch after its optimizer step, and on a spike writes its bundle.

        Args:
            data (TensorDict): What `train_batch` was given.
            loss (RecordedLoss): What its losses left.
            norm (float | Tensor): The norm of its gradient, of all ranks.
            where (Mapping): `global_step`, `epoch` and `mini_batch`.
            has_scaler (bool): Whether the engine has fp16's scaler, so that what it multiplies the loss by is the scale
                of this mini-batch; the scaler's own may have changed with the optimizer step.
            rng_state (Tensor): torch's random state on the CPU at its start.
        """
        started = time.perf_counter()
        count = loss.tokens_of_mini_batch
        if count is None:
            raise NotRecordedError("the engine does not say how many tokens a mini-batch has (batch_num_tokens)")
        norm, root = float(norm), math.sqrt(count)
        # With loss_agg_mode=token-mean, the gradient is Σ g_t / n, and the norm of n ordinary tokens s·√n / n.
        level = norm * root if math.isfinite(norm) else math.inf
        finite = level if math.isfinite(level) else 0.0
        threshold = self._threshold.next(level, finite)
        self._metrics.take_in_level(Level(level, finite, level, False), self._threshold.last)
        if not is_over(level, threshold):
            return
        micro_batches, factor = self._read(loss, rng_state)
        event = recorded_event(
            micro_batches,
            where=where,
            threshold=threshold,
            global_norm=norm,
            global_threshold=threshold / root if root else threshold,
            world_size=self._world_size,
            loss_scale=factor if has_scaler else 1.0,
        )
        # The optimizer step was taken as usual, which is all that the possible actions ask for.
        event |= {"action": self._config.spike_action, "applied": True}
        event["seconds"] = time.perf_counter() - started
        event["replay"] = self._keep_bundle(event, micro_batches)
        event["seconds"] = time.perf_counter() - started
        self._add_facts(event, data)
        self.events.append(event)
        self._events_of_step.append(event)
        self._metrics.events.append(event)

    def end_step(self, global_step: int | None) -> dict[str, float]:
        """Ends a step: rank 0 writes its events and figures, and returns its metrics; other ranks have none."""
        if self._rank != 0:
            return {}
        metrics: dict[str, float] = self._metrics.metrics()
        write_update(self._config.bisect_dump_dir, global_step, self._events_of_step, metrics)
        return metrics

    def save(self, folder: str) -> None:
        """Rank 0 writes what an automatic threshold has learned to a checkpoint's folder, beside what clips have."""
        if self._rank == 0:
            write_state(folder, {**read_state(folder), "gradloc": self._threshold.state_dict()})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `save` wrote, if it is in what `read_state` has read."""
        if "gradloc" in state:
            self._threshold.load_state_dict(state["gradloc"])

    def _read(self, loss: RecordedLoss, rng_state: Tensor) -> tuple[dict[MicroBatchName, MicroBatch], float]:
        """This rank's micro-batches on the CPU, none if they cannot be read, and what their losses were multiplied by.

        That factor is 1 where no loss had a gradient, and the same for all others.
        """
        with self.guarded("the tokens of a gradient spike are not recorded"):
            found, scale = {}, 1.0
            for index, recorded in enumerate(loss.micro_batches):
                micro_batch, factor = recorded.read(self._config, self._eos_tokens, rng_state)
                found[self._rank, index] = micro_batch.portable(factor)
                scale = factor if recorded.factor else scale
            return found, scale
        return {}, 1.0

    def _keep_bundle(self, event: Mapping[str, Any], micro_batches: Mapping[MicroBatchName, MicroBatch]) -> str | None:
        """The folder that this rank's bundle of the event is in, relative to the evidence; None without one."""
        if not self._config.spike_replay or not micro_batches:
            return None
        with self.guarded("no replay bundle is kept of a gradient spike"), suppress(NothingMovesError):
            return self._disk.run(partial(self._write, event, micro_batches), bundle_writer.PATIENCE)
        return None

    def _write(self, event: Mapping[str, Any], micro_batches: Mapping[MicroBatchName, MicroBatch]) -> str:
        """Writes the bundle; also what it says of the trainer is read from the disk."""
        directory, suffix = Path(self._config.bisect_dump_dir), f"-rank{self._rank}"
        folder, most = directory / naming.FOLDER, self._config.spike_replay
        kept = [path for path in bundles_in(folder) if path.name.endswith(suffix)]
        if len(kept) >= most:
            raise NotReplayableError(f"{folder} has {len(kept)} of this rank, of {most} (spike_replay): move some away")
        return write_recorded_bundle(directory, event, micro_batches, ragged_rows, self._context(), suffix)

    def _add_facts(self, event: dict[str, Any], data: TensorDict) -> None:
        """On rank 0, which writes the event: what the data say of its suspected tokens."""
        if self._rank != 0:
            return
        with self.guarded("a token of a gradient spike is written without its text"):
            for index, token in enumerate(event["suspected"]):
                sample = sample_of_row(data, token["row"])
                token |= limit_texts(facts_of_culprit(sample, token["position"], self._tokenizer), index)
        event["summary"] = summary(event)
