# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What vLLM and verl's transfer of weights to it need on a CPU. VERL_USE_EXTERNAL_MODULES names it with --rollout vllm.

Only in processes of vLLM, which import verl for its worker extension, after vLLM itself.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import around


def _keep_the_weights() -> None:
    """vLLM would pack the weights of linear layers and drop them; then none could be updated."""
    from vllm.model_executor.layers import utils  # type: ignore[import-not-found]

    def linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = linear


def _copy_what_is_received() -> None:
    """On a GPU, verl's receiver copies weights out of shared memory, which it could not close otherwise."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (  # type: ignore[import-not-found]
        BucketedWeightReceiver,
    )

    @around(BucketedWeightReceiver, "receive_weights")
    def receiving(receive: Any, receiver: Any, on_bucket_received: Callable[[list[tuple[str, Tensor]], bool], None]):
        receive(receiver, lambda weights, last: on_bucket_received([(name, w.clone()) for name, w in weights], last))


if "vllm" in sys.modules:
    _keep_the_weights()
    _copy_what_is_received()
