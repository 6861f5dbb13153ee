# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of verl's own faults, as the fixes of its patch make them."""

from typing import Any

import torch
from torch import Tensor


def with_a_token(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs and mask of a micro-batch for its metrics; one in which no token is left shows no difference.

    Rejection sampling may leave none, which verl asserts not to happen. Every micro-batch has to report all metrics, or
    those of different workers cannot be averaged.
    """
    if response_mask.any():
        return old_log_prob, rollout_log_prob, response_mask
    zeros = None if rollout_log_prob is None else torch.zeros_like(rollout_log_prob)
    return torch.zeros_like(old_log_prob), zeros, torch.ones_like(response_mask)


def forget_broken_pass(handler: Any) -> None:
    """Makes verl's ActivationHandler forget a forward or backward pass that was broken off by an error."""
    if handler._offload_ctx.inside_context:
        handler._offload_ctx.__exit__(None, None, None)
    offloading = handler._offload_ctx.offload_handler
    offloading.groupid_reset()
    offloading.tensor_tag_to_buf.clear()
    offloading.group_offload_mapping.clear()
    offloading.offloaded_group_count = 0
