"""Gives an unpatched verl with the plugin a patched one's names, so that tests of the patch run on it, too.

VERL_USE_EXTERNAL_MODULES=embedded,gradloc_verl,as_if_patched loads it in every rank.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from gradloc_verl import status
from gradloc_verl.loading import AfterImport

assert status.installed, "this verl is patched"
CONFIGS = ("FSDPActorConfig", "FSDPCriticConfig", "LayerClipConfig", "TokenClipConfig")
PATCHED, OWN = "verl.utils.gradloc", "gradloc"


class _SameModule(importlib.abc.Loader):
    """Loads the module that is there under its own name: it exists once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has put the other name's there


class RenamedPackage(importlib.abc.MetaPathFinder):
    """Finds `gradloc` as `verl.utils.gradloc`."""

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != PATCHED and not name.startswith(f"{PATCHED}."):
            return None
        own = OWN + name.removeprefix(PATCHED)
        found = importlib.util.find_spec(own)
        if found is None:
            return None
        spec = ModuleSpec(name, _SameModule(own), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


def rename_configs(module: ModuleType) -> None:
    config = importlib.import_module("gradloc_verl.config")
    for name in CONFIGS:
        setattr(module, name, getattr(config, name))


AfterImport({"verl.workers.config": rename_configs}).install()
RenamedPackage().install()
