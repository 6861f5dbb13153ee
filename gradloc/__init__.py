# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc: finds the tokens behind a spike of the gradient norm in RL training.

The parts of the package. A file imports from its own part and from those above it:

- version, guarded, lines: the version; errors of a diagnostic; the lines of the evidence, as types
- config, saved, threshold: the settings, and a checkpoint's values, with what they may be; τ, and what is over it
- sources, levels, facts: what looks wrong with a token; the judge's numbers; what is summed up of each mini-batch
- judge, judging: what facts mean: verdicts and warnings, without torch; the same, with errors caught
- fsdp: FSDP's state around extra passes, and collective calls
- layers: what a layer is, the reduced gradient's norms by layer, LayerClip
- token_clip: TokenClip, which acts in the backward pass
- measure: the mini-batch's gradient, extra passes, and the norms of what they compute
- search: what to measure next
- evidence: what was found, as events in a file
- bundles: an event's largest micro-batches in a folder that can be taken elsewhere
- metrics: an update's metrics, and warnings that need no spike
- actions: what happens to the gradient after a spike
- drill: a spike planted on purpose, to see that it is found
- gradloc: watches the training passes, measures the mini-batch, decides whether it is a spike, and explains it
- critic_watch: watches a critic's passes, and says what a spike of its gradient comes from
- rewards: scorers of answers, which need no torch
- adapters: of all that runs in training, the only part that knows verl
- plugin: loads what the patch's hooks call into a verl that is not patched

What reads evidence afterwards; training imports none of it, but for the trackers:

- tools: what the commands share: reading evidence, bundles and results; figures and text; files and the command line
- convert: reads what other trainers wrote, and makes bundles of records
- replay: a bundle's micro-batches again, in one process; remedies, and the search for the tokens
- report: the evidence in the terminal, as a page and for trackers; needs no torch
- check: which identities hold in records, batches, bundles and evidence
- selftest: whether GradLoc works with a model on a machine, and what it costs there
- commands: `command.py`, `search_command.py` of these, and `__main__`: of what computes, they alone import what draws

Where torch is missing, parts of the package work; so the names below are imported when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .version import HOOKS as HOOKS
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .config import GradLocConfig as GradLocConfig
    from .evidence.writer import record_events as record_events
    from .gradloc import GradLoc as GradLoc
    from .layers.layer_clip import LayerClip as LayerClip
    from .layers.layer_clip import LayerClipConfig as LayerClipConfig
    from .token_clip.token_clip import TokenClip as TokenClip
    from .token_clip.token_clip import TokenClipConfig as TokenClipConfig

_MODULES = {
    "GradLoc": "gradloc",
    "GradLocConfig": "config",
    "LayerClip": "layers.layer_clip",
    "LayerClipConfig": "layers.layer_clip",
    "TokenClip": "token_clip.token_clip",
    "TokenClipConfig": "token_clip.token_clip",
    "record_events": "evidence.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
