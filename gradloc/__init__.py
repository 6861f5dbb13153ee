# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc: finds the tokens behind a spike of the gradient norm in RL training.

The rooms of the package. A file imports from its own room and from those above it:

- version, checks: the version, and checks of values
- config, auto_threshold: what counts as a spike
- fsdp: FSDP's state around extra passes, and collective calls
- layers: what a layer is, the reduced gradient's norms by layer, LayerClip
- measure: extra passes and the norms of what they compute
- search: what to measure next
- evidence: what was found, as events in a file
- bundles: an event's loud micro-batches in a folder that can be taken elsewhere
- update_figures: an update's ratios, unlikely tokens, and margin to τ
- report: the reader of these files
- replay: computes a bundle again in one process
- actions: what becomes of the gradient after a spike
- drill: a spike planted on purpose, to see that it is found
- monitor: watches the training passes and begins the search
- verl: the only room that knows verl
"""

from .config import GradLocConfig
from .evidence.token_facts import text_evidence
from .evidence.writer import record_events
from .fsdp.collective_replay import RankLostError
from .layers.layer_clip import LayerClip, LayerClipConfig
from .measure.token_weights import token_weights
from .monitor import GradLoc
from .version import __version__

__all__ = [
    "GradLoc",
    "GradLocConfig",
    "LayerClip",
    "LayerClipConfig",
    "RankLostError",
    "__version__",
    "record_events",
    "text_evidence",
    "token_weights",
]
