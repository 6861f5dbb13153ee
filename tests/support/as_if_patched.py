"""Gives an unpatched verl with the plugin the names of a patched one, so that tests of the patch run on it, too.

VERL_USE_EXTERNAL_MODULES=embedded,gradloc_verl,as_if_patched loads it in every rank.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import gradloc_verl
from gradloc_verl.loading import AfterImport

assert not gradloc_verl.status.left_to_patch, "this verl is patched"
PATCHED = "verl.utils.gradloc"
CONFIGS = ("FSDPActorConfig", "FSDPCriticConfig", "LayerClipConfig", "TokenClipConfig")


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `gradloc` under the patch's name: the same modules, not copies of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PATCHED and not name.startswith(f"{PATCHED}."):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"gradloc{spec.name.removeprefix(PATCHED)}")
        self._of_module = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._of_module  # the import has put another one there


def rename_configs(module: ModuleType) -> None:
    config = importlib.import_module("gradloc_verl.config")
    for name in CONFIGS:
        setattr(module, name, getattr(config, name))


sys.meta_path.insert(0, Renamed())
AfterImport({"verl.workers.config": rename_configs}).install()
