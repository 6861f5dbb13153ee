# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""GradLoc: finds the tokens behind a spike of the gradient norm in RL training."""

from .config import GradLocConfig
from .evidence import record_events, text_evidence
from .layer_clip import LayerClip, LayerClipConfig
from .locator import GradLoc, token_weights
from .lockstep import RankLostError
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
