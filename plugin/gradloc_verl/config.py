# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's configurations of actor and critic with GradLoc's keys: what the config groups name as `_target_`."""

import importlib
from typing import Any

from .patched import is_patched

# A patched verl's own have the keys already.
_classes: Any = importlib.import_module("verl.workers.config" if is_patched() else "gradloc_verl.keys")

McoreActorConfig = _classes.McoreActorConfig
VeOmniActorConfig = _classes.VeOmniActorConfig
TorchTitanActorConfig = _classes.TorchTitanActorConfig
FSDPActorConfig = _classes.FSDPActorConfig
FSDPCriticConfig = _classes.FSDPCriticConfig
LayerClipConfig = _classes.LayerClipConfig
TokenClipConfig = _classes.TokenClipConfig
