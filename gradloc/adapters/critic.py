# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The watch over a critic of verl 0.7 and 0.9: a `Watch` whose weights are those of verl's value loss."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from verl.utils.device import get_device_name

from ..critic_watch import CriticWatch
from ..measure.pass_recorder import LossInputs, ReadTokens
from ..measure.token_weights import token_weights
from .model_facts import meter_kind
from .watch import Watch


class ValueWatch(Watch):
    """Measures a critic's training passes.

    Args:
        module (nn.Module): The value model, sharded or not.
        config (CriticConfig): verl's configuration of the critic.
        loss_scale (Callable): Returns the loss scale of the backward passes.
        sequence_parallel_size (int): How many neighbouring ranks work on the same data.
    """

    def __init__(
        self, module: nn.Module, config: Any, loss_scale: Callable[[], float], sequence_parallel_size: int
    ) -> None:
        super().__init__(config, loss_scale, sequence_parallel_size)
        threshold, meter = config.grad_norm_threshold, meter_kind(module)
        self.gradloc = CriticWatch(module, threshold, get_device_name(), loss_scale, sequence_parallel_size, meter)

    def observe(
        self,
        loss_inputs: LossInputs,
        read_tokens: ReadTokens,
        shape: Sequence[int],
        factor: float = 1.0,
        **options: Any,
    ) -> None:
        """Notes the values of a micro-batch; see `Watch.observe`. Those of another loss are not looked at."""
        call = self.aggregation.take()
        if call is None or not call.is_of_tokens(shape) or self.gradloc is None:
            return

        def read() -> dict[str, Tensor]:
            tokens = read_tokens()
            weight = token_weights(call.aggregate, tokens["response_mask"].float())
            return {**tokens, "weight": weight * factor}

        self.gradloc.observe_later(read, loss_inputs)
