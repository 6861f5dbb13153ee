# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the `DataParallelPPOCritic` of verl 0.7: the worker makes a `WatchedCritic` in its place."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from verl.utils import hf_tokenizer
from verl.workers.critic import dp_critic

from .critic import build_watch, describe, recorded_value_loss, write
from .dp_actor import sample_of_row
from .update_evidence import Sample

if TYPE_CHECKING:
    from verl import DataProto


class WatchedCritic(dp_critic.DataParallelPPOCritic):
    """verl's critic, watched where `critic.spike_detection` turns that on; arguments as in verl.

    Attributes:
        watch (CriticWatch | None): None where it is off.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        trains = self.critic_optimizer is not None
        self.watch = (
            build_watch(self.critic_module, config, lambda: 1.0, self.ulysses_sequence_parallel_size)
            if trains
            else None
        )
        self._training = False

    def update_critic(self, data: "DataProto") -> dict[str, Any]:
        if self.watch is None:
            return super().update_critic(data)
        step = data.meta_info.get("global_steps")
        self.watch.start_update(step)
        self._steps = self._next_row = 0
        self._mini_batches = -(-len(data) // self.config.ppo_mini_batch_size)
        self._rows: list[list[int]] = []
        self._training = True
        try:
            with self._rows_noted(), recorded_value_loss(self.watch.observe, self._factor):
                metrics = super().update_critic(data)
        finally:
            self._training = False
        spikes = self.watch.spikes
        sample_of = self._sample_of(data, spikes)
        describe(spikes, lambda: self._tokenizer, sample_of, self.ulysses_sequence_parallel_size)
        write(self.config.bisect_dump_dir, step, spikes)
        return {**metrics, **{f"critic/{name}": value for name, value in self.watch.metrics().items()}}

    def _forward_micro_batch(self, micro_batch: Mapping[str, Any]) -> Tensor:
        if self._training:
            assert self.watch is not None
            self.watch.begin_pass(self._take_rows(len(micro_batch["input_ids"])))
        return super()._forward_micro_batch(micro_batch)

    def _optimizer_step(self) -> Tensor:
        if self._training:
            assert self.watch is not None
            self.watch.check(*divmod(self._steps, self._mini_batches))
            self._steps, self._next_row = self._steps + 1, 0
        return super()._optimizer_step()

    def _take_rows(self, count: int) -> list[int]:
        """The rows of the next micro-batch in its mini-batch."""
        if self._rows:
            return self._rows.pop(0)
        self._next_row += count
        return [*range(self._next_row - count, self._next_row)]

    @contextmanager
    def _rows_noted(self) -> Iterator[None]:
        """Within it, the rows of dynamic micro-batches are noted when verl makes them."""
        prepare = dp_critic.prepare_dynamic_batch

        @functools.wraps(prepare)
        def noting(*arguments: Any, **options: Any) -> Any:
            micro_batches, rows = prepare(*arguments, **options)
            self._rows = [[int(row) for row in of_micro_batch] for of_micro_batch in rows]
            return micro_batches, rows

        dp_critic.prepare_dynamic_batch = noting
        try:
            yield
        finally:
            dp_critic.prepare_dynamic_batch = prepare

    def _factor(self, response_mask: Tensor) -> float:
        """What verl multiplies a micro-batch's loss by."""
        if self.config.use_dynamic_bsz:
            return len(response_mask) / self.config.ppo_mini_batch_size
        return 1 / self.gradient_accumulation

    def _sample_of(self, data: "DataProto", spikes: list[dict[str, Any]]) -> Callable[[Mapping[str, Any]], Sample]:
        mini_batch_of = {id(value): spike["mini_batch"] for spike in spikes for value in spike["values"]}

        def sample_of(value: Mapping[str, Any]) -> Sample:
            row = mini_batch_of[id(value)] * self.config.ppo_mini_batch_size + value["row"]
            return sample_of_row(data[row])

        return sample_of

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The critic's tokenizer, read when there is a spike: verl keeps it elsewhere."""
        model = self.config.model
        return hf_tokenizer(model.tokenizer_path, trust_remote_code=model.get("trust_remote_code", False))
