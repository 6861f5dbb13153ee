# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc: finds the tokens behind a spike of the gradient norm in RL training."""

from .config import GradLocConfig
from .evidence.token_facts import text_evidence
from .evidence.writer import record_events
from .fsdp.collective_replay import RankLostError
from .layers.layer_clip import LayerClip, LayerClipConfig
from .measure.token_weights import token_weights
from .monitor import GradLoc

__all__ = [
    "GradLoc",
    "GradLocConfig",
    "LayerClip",
    "LayerClipConfig",
    "RankLostError",
    "record_events",
    "text_evidence",
    "token_weights",
]
