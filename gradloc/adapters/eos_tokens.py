# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Where a model's rollout stops."""

from typing import Any


def eos_tokens(module: Any) -> set[int]:
    """The ids at which a rollout of this model stops, by its generation_config and its config."""
    ends: set[int] = set()
    for config in (getattr(module, "generation_config", None), getattr(module, "config", None)):
        found = getattr(config, "eos_token_id", None)
        ends.update([found] if isinstance(found, int) else found or ())
    return ends
