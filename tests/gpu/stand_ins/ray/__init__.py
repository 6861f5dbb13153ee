"""Stands in for Ray where it is not installed: verl imports it everywhere, and one process without actors calls none.

Each name is a class that can be inherited from and annotated with. Calling anything but a decorator fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__version__ = "0"
__path__: list[str] = []


class _Unavailable:
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("this needs Ray, and tests/gpu/ runs without it")


def _named(name: str) -> type[_Unavailable]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Unavailable,), {})


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> type[_Unavailable]:
        return _named(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("ray."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def remote(*arguments: Any, **_options: Any) -> Any:
    """The decorator, which leaves a class or function as it is."""
    if len(arguments) == 1 and callable(arguments[0]):
        return arguments[0]
    return lambda decorated: decorated


def method(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    return lambda decorated: decorated


def is_initialized() -> bool:
    return False


def __getattr__(name: str) -> type[_Unavailable]:
    return _named(name)
