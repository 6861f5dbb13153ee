"""Gives an unpatched verl with the plugin a patched one's configurations, so that tests of the patch run on it, too.

VERL_USE_EXTERNAL_MODULES=embedded,gradloc_verl,as_if_patched loads it in every rank.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from gradloc_verl import status
from gradloc_verl.loading import AfterImport

assert status.installed, "this verl is patched"
CONFIGS = ("FSDPActorConfig", "FSDPCriticConfig", "LayerClipConfig", "TokenClipConfig")


def rename_configs(module: ModuleType) -> None:
    config = importlib.import_module("gradloc_verl.config")
    for name in CONFIGS:
        setattr(module, name, getattr(config, name))


AfterImport({"verl.workers.config": rename_configs}).install()
