# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The package under the name that it has in a patched verl, too.

So the commands of the documentation and of the evidence, `gradloc report`, work with the plugin.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

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
        if own.endswith(".__main__") and found.origin is not None:  # python -m runs its code
            return importlib.util.spec_from_file_location(name, found.origin)
        spec = ModuleSpec(name, _SameModule(own), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec
