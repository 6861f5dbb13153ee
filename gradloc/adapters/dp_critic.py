# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the `DataParallelPPOCritic` of verl 0.7: the worker makes a `WatchedCritic` in its place."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from verl.utils import hf_tokenizer
from verl.workers.critic import dp_critic

from ..guarded import guarded
from ..measure.pass_recorder import unchanged
from .dp_actor import write_evidence
from .update_evidence import VALUE_KEYS
from .watch import Watch, watch_critic

if TYPE_CHECKING:
    from verl import DataProto


class WatchedCritic(dp_critic.DataParallelPPOCritic):
    """verl's critic, watched where `critic.spike_detection` turns that on; arguments as in verl.

    Attributes:
        watch (Watch | None): None where it is off.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.watch: Watch | None = None
        if self.critic_optimizer is not None and config.get("spike_detection", False):
            self.watch = watch_critic(self.critic_module, config, lambda: 1.0, self.ulysses_sequence_parallel_size)
        self._training = False

    def update_critic(self, data: "DataProto") -> dict[str, Any]:
        if self.watch is None:
            return super().update_critic(data)
        self.watch.start_update(data.meta_info.get("global_steps"))
        self._steps = self._next_row = 0
        self._mini_batches = -(-len(data) // self.config.ppo_mini_batch_size)
        self._rows: list[list[int]] = []
        try:
            with self._watching():
                metrics = super().update_critic(data)
        finally:
            self.watch.stop()
        own = self.watch.metrics()
        write_evidence(self, data, self._tokenizer if self.watch.lines() else None, own)
        return {**metrics, **{f"critic/{name}": value for name, value in own.items()}}

    def _forward_micro_batch(self, micro_batch: Mapping[str, Any]) -> Tensor:
        if not self._training:
            return super()._forward_micro_batch(micro_batch)
        assert self.watch is not None
        watch, mask = self.watch, micro_batch["response_mask"]
        watch.begin_pass({}, self._take_rows(len(mask)))
        values = super()._forward_micro_batch(micro_batch)
        tokens = {name: micro_batch[key] for name, key in VALUE_KEYS.items()} | {"value": values.detach()}
        dynamic = self.config.use_dynamic_bsz
        factor = len(mask) / self.config.ppo_mini_batch_size if dynamic else 1 / self.gradient_accumulation
        # verl computes the loss of these very values next, and nothing of ours runs between it and its backward.
        watch.aggregation.start(
            lambda _: watch.observe({"coefficient": (values, unchanged)}, lambda: tokens, lambda: mask.shape, factor)
        )
        return values

    def _optimizer_step(self) -> Tensor:
        if not self._training:
            return super()._optimizer_step()
        assert self.watch is not None
        epoch, mini_batch = divmod(self._steps, self._mini_batches)
        self._steps, self._next_row = self._steps + 1, 0
        norm = self.watch.step(epoch, mini_batch, super()._optimizer_step)
        assert isinstance(norm, Tensor)  # every step is taken, and no layer is clipped
        return norm

    def _take_rows(self, count: int) -> list[int]:
        """The rows of the next micro-batch in its mini-batch."""
        if self._rows:
            return self._rows.pop(0)
        self._next_row += count
        return [*range(self._next_row - count, self._next_row)]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Within it, passes are those of training, and verl's dynamic micro-batches have their rows noted."""
        prepare = dp_critic.prepare_dynamic_batch

        @functools.wraps(prepare)
        def noting(*arguments: Any, **options: Any) -> Any:
            micro_batches, rows = prepare(*arguments, **options)
            self._rows = [[int(row) for row in of_micro_batch] for of_micro_batch in rows]
            return micro_batches, rows

        dp_critic.prepare_dynamic_batch, self._training = noting, True
        try:
            yield
        finally:
            dp_critic.prepare_dynamic_batch, self._training = prepare, False

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The critic's tokenizer, read when there is a spike, as verl keeps it elsewhere; None if that fails."""
        model = self.config.model
        with guarded("values of a critic's spike are written without their texts"):
            return hf_tokenizer(model.tokenizer_path, trust_remote_code=model.get("trust_remote_code", False))
        return None
