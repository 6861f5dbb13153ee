# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Acts right after a module is imported, before whoever imports it takes names from it."""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from .status import expect

Act = Callable[[ModuleType], None]


def replace(owner: Any, name: str, new: Any) -> None:
    """Puts something in the place of what a module or class has, also in modules of verl that have taken it from there.

    A user's module, which verl imports before its plugins, may have imported them.
    """
    old = getattr(owner, name)
    setattr(owner, name, new)
    for other in [each for key, each in list(sys.modules.items()) if key.startswith("verl.")]:
        for key, value in list(getattr(other, "__dict__", {}).items()):
            if value is old:
                setattr(other, key, new)


def around(owner: Any, name: str, *parameters: str) -> Callable[[Callable[..., Any]], None]:
    """Puts a function around a module's or a class's, which it gets before the arguments. Raises Unfit as `expect`."""
    old = expect(owner, name, *parameters)

    def decorate(function: Callable[..., Any]) -> None:
        @functools.wraps(old)
        def new(*args: Any, **kwargs: Any) -> Any:
            return function(old, *args, **kwargs)

        replace(owner, name, new)

    return decorate


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder that leaves finding to the others.

    Args:
        acts (Mapping): What to do after the import of a module, by its name. It must not raise.
    """

    def __init__(self, acts: Mapping[str, Act]) -> None:
        self._acts = acts

    def install(self) -> None:
        """Acts on modules that are imported already, and from now on after an import."""
        sys.meta_path.insert(0, self)
        for name, act in self._acts.items():
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                act(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._acts:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._extend(spec.loader, name)
                return spec
        return None

    def _extend(self, loader: Any, name: str) -> None:
        """Makes the loader of one module act; its class, which others may ask for, stays."""
        execute = loader.exec_module

        @functools.wraps(execute)
        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._acts[name](module)

        loader.exec_module = execute_and_act
