# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the critic of verl 0.9: a mixin over the FSDP engine with a value head."""

# The mixin uses what only the engine behind it has.
# mypy: disable-error-code="attr-defined"

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from ..critic_watch import CriticWatch
from .critic import build_watch, describe, recorded_value_loss, write
from .critic_config import CriticSpikeConfig
from .engine_data import ROW, as_metric, bound_config, loss_scale, sample_of_row


class WatchedValueEngine:
    """Watches the training passes of an FSDP engine with a value head, which comes behind it in the order of bases.

    It acts only within `train_batch`, and only if the critic configuration that the loss is bound to turns it on. Each
    `train_batch` makes one optimizer step; the data say which mini-batch of an update it is.

    Attributes:
        watch (CriticWatch | None): None where it is off, and before the first `train_batch`.
    """

    watch: CriticWatch | None = None
    _settings: CriticSpikeConfig | None = None
    _watching = False

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        config = bound_config(loss_function, CriticSpikeConfig)
        if self._settings is None and config is not None:
            self._settings = config
            self.watch = build_watch(
                self.module, config, partial(loss_scale, self), self.ulysses_sequence_parallel_size
            )
        if self.watch is None or self._settings is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        step = tu.get(data, "training_step")
        self._where = tuple(tu.get(data, "epoch_and_mini_batch", (0, 0)))
        if self._where == (0, 0):
            self.watch.start_update(step)
        else:
            self.watch.start_mini_batch()
        data[ROW] = torch.arange(len(data))
        self._watching = True
        try:
            with recorded_value_loss(self.watch.observe):
                outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        finally:
            self._watching = False
            data.pop(ROW, None)
        describe(
            self.watch.spikes,
            lambda: getattr(self.model_config, "tokenizer", None),
            lambda value: sample_of_row(data, value["row"]),
            self.ulysses_sequence_parallel_size,
        )
        write(self._settings.bisect_dump_dir, step, self.watch.spikes)
        if tu.get(data, "update_lr_scheduler", True) and self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({name: as_metric(value) for name, value in self.watch.metrics().items()})
        return outputs

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        if self._watching and not forward_only:
            assert self.watch is not None
            # Before the engine moves it to the device, where reading would wait for the device.
            self.watch.begin_pass(micro_batch[ROW].tolist())
        return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]

    def optimizer_step(self) -> float:
        if self._watching:
            assert self.watch is not None
            self.watch.check(*self._where)
        return super().optimizer_step()  # type: ignore[misc]
