"""Stands in for torchvision, which SGLang imports, and text models never call."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

__version__ = "0.0"


class _AnyName(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _refuse(self: object, *arguments: Any, **named: Any) -> None:
    raise RuntimeError("torchvision is a stub here")


class _Stub(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyName(name, (), {"__init__": _refuse})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        ours = fullname.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> types.ModuleType:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"torchvision.{name}")
