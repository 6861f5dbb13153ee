"""Gives an unpatched verl with the plugin a patched one's names, so that tests of the patch run on it, too.

VERL_USE_EXTERNAL_MODULES=embedded,gradloc_verl,as_if_patched loads it in every rank.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gradloc_verl import status
from gradloc_verl.loading import AfterImport

assert status.installed, "this verl is patched"
CONFIGS = ("FSDPActorConfig", "FSDPCriticConfig", "LayerClipConfig", "TokenClipConfig")
PATCHED, OWN = "verl.utils.gradloc", "gradloc"


class RenamedPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `gradloc` as `verl.utils.gradloc`; each of its modules exists once."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if not f"{name}.".startswith(f"{PATCHED}."):
            return None
        found = importlib.util.find_spec(OWN + name.removeprefix(PATCHED))
        return found and ModuleSpec(name, self, origin=found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(OWN + spec.name.removeprefix(PATCHED))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # the import has put the other name's there


def rename_configs(module: ModuleType) -> None:
    config = importlib.import_module("gradloc_verl.config")
    for name in CONFIGS:
        setattr(module, name, getattr(config, name))


AfterImport({"verl.workers.config": rename_configs}).install()
sys.meta_path.insert(0, RenamedPackage())
