"""What a model, a function or an argument holds: its tensors, its modules, and the containers that a run may change.

One walk serves all: what is compared, what is put back, and what cannot be.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

SAID = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""Values that are known by their text."""
MODULES_OWN = frozenset(vars(nn.Module()))
"""The attributes that each module has; the others are its author's, also those that begin with "_"."""
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "coda_inductor"}
"""Packages whose objects and functions are not looked into: they hold what is not the model's."""


def is_plain(value: Any) -> bool:
    """Is it an object of somebody's class, which is nothing but what it holds?"""
    library = type(value).__module__.split(".")[0] in LIBRARIES
    known = isinstance(value, (*SAID, nn.Module, Tensor, type, ModuleType)) or callable(value)
    return not library and not known and (hasattr(value, "__dict__") or bool(_slots(value)))


def attributes(value: Any) -> dict[str, Any]:
    """Those of a plain object."""
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _slots(value: Any) -> list[str]:
    found = (getattr(of, "__slots__", ()) for of in type(value).__mro__)
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def within(value: Any) -> list[tuple[str, Any]] | None:
    """What a container or a plain object holds, each with what follows the container's name; None of anything else."""
    if isinstance(value, Mapping):
        return [(f".{key}", x) for key, x in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{key}", x) for key, x in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return [(f"[{i}]", x) for i, x in enumerate(value)]
    return [(f".{key}", x) for key, x in attributes(value).items()] if is_plain(value) else None


def leaves(name: str, value: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that containers and plain objects hold: "past.keys[0]". What holds itself ends there."""
    held = within(value)
    if held is None:
        yield name.removeprefix("."), value
    elif id(value) not in above:
        for key, x in held:
            yield from leaves(name + key, x, (*above, id(value)))


def contents(value: Any) -> Any:
    """A copy of what a container holds that a run may change; None of what cannot change."""
    if isinstance(value, list | dict | set | collections.deque):
        return type(value)(value) if type(value) in (list, set) else value.copy()
    return attributes(value) if is_plain(value) else None


def refill(value: Any, held: Any) -> None:
    """Gives a container what it held."""
    if isinstance(value, list):
        value[:] = held
    elif isinstance(value, dict | set):
        value.clear()
        value.update(held)
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(held)
    else:
        for name in attributes(value).keys() - held.keys():
            object.__delattr__(value, name)
        for name, x in held.items():
            object.__setattr__(value, name, x)


class Walk:
    """What was found, each thing once. `roots` are modules that are in no other; `opaque` are values whose state can
    neither be read nor be put back, each with its text."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.modules: list[nn.Module] = []
        self.roots: list[nn.Module] = []
        self.containers: list[Any] = []
        self.opaque: list[tuple[str, Any, str]] = []
        self._seen: dict[int, Any] = {}

    def visit(self, name: str, value: Any, inside: bool = False) -> None:
        """Walks through a value; `inside`: it is a module's own."""
        if isinstance(value, (*SAID, type, ModuleType)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        held = within(value)
        if isinstance(value, Tensor):
            self.tensors[name or "it"] = value
        elif isinstance(value, nn.Module):
            self._module(name, value, inside)
        elif held is not None:
            self.containers += [value] if contents(value) is not None else []
            for key, x in held:
                self.visit((name + key).removeprefix("."), x)
        elif callable(value):
            for key, x in read_by(value):
                self.visit(key, x)
        else:
            self.opaque.append((name, value, repr(value)))

    def _module(self, name: str, module: nn.Module, inside: bool) -> None:
        self.modules.append(module)
        self.roots += [] if inside else [module]
        dot = f"{name}." if name else ""
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            self.visit(f"{dot}{key}", t)
        for key, child in module._modules.items():
            self.visit(f"{dot}{key}", child, inside=True)
        for key, x in vars(module).items():
            if key not in MODULES_OWN:
                self.visit(f"{dot}{key}", x)


def read_by(function: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function of the user's reads: bound, closed over, or global."""
    if isinstance(function, functools.partial):
        yield from (("", function.func), *((f"[{i}]", x) for i, x in enumerate(function.args)))
        yield from function.keywords.items()
    elif inspect.ismethod(function):
        yield from (("", function.__self__), ("", function.__func__))
    elif inspect.isfunction(function):
        if function.__module__ is None or function.__module__.split(".")[0] not in LIBRARIES:
            read = inspect.getclosurevars(function)
            yield from {**read.globals, **read.nonlocals}.items()
    elif type(function).__module__.split(".")[0] not in LIBRARIES:
        yield from getattr(function, "__dict__", {}).items()
