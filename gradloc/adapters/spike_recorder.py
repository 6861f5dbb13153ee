# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Records micro-batches, and on a spike writes them down, to be searched later. No collective call."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import math
import time
from collections.abc import Callable, Iterator, Mapping
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
from ..guarded import ForeseenError, PatientDisk, guarded
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..metrics import UpdateMetrics
from ..threshold import Threshold, is_over
from .actor_config import SpikeConfig
from .engine_data import FORWARD_SETTINGS, OUTPUTS, ROW, ResponseCutter, bound_config, inputs_of, read_tokens
from .loss_weights import AggregationCall, RecordedAggregation, eos_tokens, with_derived
from .replay_bundles import engine_context, ragged_rows
from .update_evidence import EVIDENCE_KEYS

# What is kept of a micro-batch's data. Images are not: a bundle cannot have them.
_SETTINGS = [name for name in FORWARD_SETTINGS if name != "multi_modal_inputs"]
_COLUMNS = (*EVIDENCE_KEYS.values(), "input_ids", "position_ids", "attention_mask", ROW, *_SETTINGS)


@dataclass
class Recorded:
    """References to what a micro-batch's loss is computed from; nothing is copied before `read`."""

    data: TensorDict  # the columns and settings of the micro-batch, on its device
    has_images: list[bool]  # for each row; empty without such a column
    flat: dict[str, Tensor]  # log-probs and entropies of whole sequences, one after the other, without a graph
    call: AggregationCall | None = None  # what the loss called
    gradients: dict[str, Tensor] = field(default_factory=dict)  # those of `flat`, after the backward
    # The derivative of what the engine computes the backward of with respect to the loss.
    factor: list[Tensor] = field(default_factory=list)

    def read(self, config: Any, eos_tokens: set[int], rng_state: Tensor) -> tuple[MicroBatch, float]:
        """The micro-batch as a training pass records it, and what to divide its coefficients by.

        Engines multiply the loss before the backward: by fp16's scale, by the number of micro-batches, by that of
        tokens. The derivative with respect to the loss itself says by how much, so that coefficients are those of the
        loss of a data-parallel rank, whatever the engine does.
        """
        data = self.data
        if "position_ids" not in data.keys():
            rows = [torch.arange(len(row), device=row.device) for row in data["input_ids"].unbind()]
            data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        inputs = inputs_of(data)
        if self.has_images:
            inputs["settings"]["multi_modal_inputs"] = self.has_images
        as_response = ResponseCutter(inputs, data["response_mask"])
        tokens = read_tokens(data, self.flat, as_response)
        # verl's loss has set what it aggregates the terms of KL and entropy with, the same for the whole mini-batch.
        tokens = with_derived(tokens, self.call, config, eos_tokens, 1.0, config.global_batch_info)
        tokens |= {OUTPUTS[key].coefficient: as_response(gradient) for key, gradient in self.gradients.items()}
        factor = float(self.factor[0]) if self.factor else 1.0
        if not (math.isfinite(factor) and factor > 0):
            raise ForeseenError(f"the engine multiplies the loss by {factor}")
        return MicroBatch(inputs, data[ROW].tolist(), (rng_state, None), tokens), factor


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
        self.events: list[dict[str, Any]] = []  # those of the last mini-batch: none or one
        self._engine = engine
        self._config = config
        # FSDP's module has what transformers loaded; other engines have a model of their own.
        self._eos_tokens = eos_tokens(getattr(engine, "module", None)) or eos_tokens(engine.model_config)
        self._threshold = Threshold(config.grad_norm_threshold)
        self._metrics = UpdateMetrics()
        self._disk = PatientDisk(Path(config.bisect_dump_dir))
        self._said: set[str] = set()
        self.discard()

    def start_update(self, global_step: int | None) -> None:
        """Discards the events and metrics of the last update."""
        self.events, self._metrics = [], UpdateMetrics()

    def start_mini_batch(self) -> None:
        """Discards the events of the last mini-batch; the update's metrics still count them."""
        self.events = []

    def recorded(self, loss_function: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function that the engine is to be given for a mini-batch, which also records each micro-batch.

        Its result is that of `loss_function`; engines may call it with other arguments to process logits. After an
        error in recording, nothing more of the mini-batch is recorded.
        """
        self._config = bound_config(loss_function, SpikeConfig) or self._config
        self.discard()
        self._rng_state = torch.get_rng_state()
        return partial(self._computed, loss_function)

    def discard(self) -> None:
        """Drops what was recorded."""
        self._failed = False
        self._micro_batches: list[Recorded] = []
        self._tokens: float | None = None  # how many the loss divides by, of all ranks

    def check(self, where: Mapping[str, Any], norm: Any) -> None:
        """Called after a mini-batch's optimizer step: on a spike, it makes an event and writes its bundle.

        Args:
            where (Mapping): `global_step`, `epoch` and `mini_batch`.
            norm (float | Tensor): The norm of its gradient, of all ranks.
        """
        with self._guarded("a mini-batch is not recorded"):
            self._check(where, float(norm))

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

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Around a part of the recording: after an error, nothing is recorded any more."""
        self._failed = True
        with self._guarded("a mini-batch is not recorded"):
            yield
            self._failed = False
        if self._failed:
            self._micro_batches = []

    def _computed(self, loss_function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What the loss function returns."""
        if self._failed or "model_output" not in named or "data" not in named:
            return loss_function(*arguments, **named)
        with self._recording():
            flat, recorded = self._begin(named["model_output"], named["data"])
        if self._failed:
            return loss_function(*arguments, **named)
        # Only a tensor that the loss was given itself sees its gradient.
        named["model_output"] = {**named["model_output"], **flat}
        aggregation = RecordedAggregation()
        aggregation.start()
        try:
            result = loss_function(*arguments, **named)
        finally:
            recorded.call = aggregation.take()
        with self._recording():
            self._observe(result, recorded)
        return result

    def _begin(self, model_output: Mapping[str, Tensor], data: TensorDict) -> tuple[dict[str, Tensor], Recorded]:
        if self._tokens is None and (count := tu.get(data, "batch_num_tokens")) is not None:
            self._tokens = float(count)
        if "log_probs" not in model_output:
            raise ForeseenError("the loss has no log-probs")
        if ROW not in data.keys():
            raise ForeseenError("the engine does not hand all columns of the data to the loss")
        flat = {name: _flat(model_output[name]) for name in OUTPUTS if name in model_output}
        images = tu.get(data, "multi_modal_inputs") if "multi_modal_inputs" in data.keys() else ()
        recorded = Recorded(
            data.select(*(key for key in _COLUMNS if key in data.keys())),
            [bool(of_row) for of_row in images],
            {name: values.detach() for name, values in flat.items()},
        )
        for name, values in flat.items():
            if values.requires_grad:
                values.register_hook(partial(recorded.gradients.__setitem__, name))
        return flat, recorded

    def _observe(self, result: Any, recorded: Recorded) -> None:
        loss = result[0] if isinstance(result, tuple) else result
        if loss.requires_grad:
            loss.register_hook(recorded.factor.append)
        self._micro_batches.append(recorded)

    def _check(self, where: Mapping[str, Any], norm: float) -> None:
        started = time.perf_counter()
        if self._tokens is None:
            raise ForeseenError("the engine does not say how many tokens a mini-batch has (batch_num_tokens)")
        # With loss_agg_mode=token-mean, the gradient is Σ g_t / n, and the norm of n ordinary tokens s·√n / n.
        root = math.sqrt(self._tokens)
        level = norm * root if math.isfinite(norm) else math.inf
        finite = level if math.isfinite(level) else 0.0
        threshold = self._threshold.next(level, finite)
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

    def _read(self) -> tuple[dict[MicroBatchName, MicroBatch], float]:
        """This rank's micro-batches on the CPU, none if they cannot be read, and what their losses were multiplied by.

        That factor is 1 where no loss had a gradient, and the same for all others.
        """
        with self._guarded("the tokens of a gradient spike are not recorded"):
            found, scale = {}, 1.0
            for index, recorded in enumerate(self._micro_batches):
                micro_batch, factor = recorded.read(self._config, self._eos_tokens, self._rng_state)
                found[self.rank, index] = micro_batch.portable(factor)
                scale = factor if recorded.factor else scale
            return found, scale
        return {}, 1.0

    def _keep_bundle(self, micro_batches: Mapping[MicroBatchName, MicroBatch], event: Mapping[str, Any]) -> str | None:
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


def _flat(values: Tensor) -> Tensor:
    flat = values.values() if values.is_nested else values
    if flat.dim() != 1:
        raise ForeseenError(f"log-probs or entropies have the shape {tuple(flat.shape)}: they are not one per token")
    return flat
