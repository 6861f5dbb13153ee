# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Some rows of a micro-batch as inputs of a forward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# What a forward needs of a micro-batch.
FORWARD_KEYS = ("responses", "input_ids", "attention_mask", "position_ids", "multi_modal_inputs")


def forward_inputs(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a micro-batch that a forward needs."""
    return {key: micro_batch[key] for key in FORWARD_KEYS if key in micro_batch}


def select_rows(
    inputs: Mapping[str, Any], rows: Sequence[int], response_length: int, device: str | int | torch.device
) -> dict[str, Any]:
    """The inputs of some rows, with their responses cut to a length.

    Images in a response, which tools may give, cannot be cut off: with multi-modal inputs the responses stay whole.

    Args:
        inputs (Mapping): What `forward_inputs` gave; tensors of shape (batch size, ..., length), on any device.
        rows (Sequence[int]): The rows.
        response_length (int): How many tokens of each response.
        device (str | int | torch.device): Where the tensors are to lie.
    """
    whole_length = inputs["responses"].size(-1)
    computed_length = whole_length if "multi_modal_inputs" in inputs else response_length
    length = inputs["input_ids"].size(-1) - whole_length + computed_length
    selected = {"responses": inputs["responses"][rows, :computed_length].to(device)}
    for key in ("input_ids", "attention_mask", "position_ids"):
        selected[key] = inputs[key][rows][..., :length].to(device)
    if "multi_modal_inputs" in inputs:
        selected["multi_modal_inputs"] = inputs["multi_modal_inputs"][rows]
    return selected
