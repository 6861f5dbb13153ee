"""Stands in for Ray where it is not installed: verl imports it everywhere, and one process without actors calls none.

A name with a capital is a class, to inherit from and to annotate with; any other a module, with names of its own.
Decorators leave what they decorate as it is. Making or calling anything else fails.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__version__ = "0"
__path__: list[str] = []


def _fail(*_arguments: Any, **_options: Any) -> None:
    raise RuntimeError("this needs Ray, and tests/gpu/ runs without it")


def _attribute(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": _fail}) if name[0].isupper() else importlib.import_module(f"{module}.{name}")


class _Module(ModuleType):
    __path__: list[str] = []
    __call__ = staticmethod(_fail)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("ray.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def remote(*arguments: Any, **_options: Any) -> Any:
    """The decorator, with arguments and without."""
    return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda decorated: decorated


def method(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    return lambda decorated: decorated


def is_initialized() -> bool:
    return False


def __getattr__(name: str) -> Any:
    return _attribute(__name__, name)
