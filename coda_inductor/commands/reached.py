"""What a model's run may read and overwrite: each tensor that it reaches, by name, put back before the next run.

Reached are parameters, buffers and other attributes of modules, the arguments, and what a function closes over.
Tensors that share memory share it again when they are put back, also in another dtype.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from coda_inductor.core.errors import Unsupported

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
WIDER = {
    torch.float64: {torch.float16, torch.bfloat16, torch.float32},
    torch.float32: {torch.float16, torch.bfloat16},
}
"""The dtypes that a reference widens, by its own."""


def widened(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """The dtype that a reference in `to` computes with instead of `dtype`; None: with the same."""
    return to if to is not None and dtype in WIDER[to] else dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in a storage, which is called by its address."""

    storage: int
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The tensor that lies so in one of all of a storage's numbers."""
        return flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(slots=True)
class Subject:
    """A user's model with its arguments. Arguments are leaves of autograd's graph here."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: dict[int, Tensor] = field(default_factory=dict)
    """The bytes of each storage before any run, on the CPU."""
    whole: dict[Tensor, Tensor] = field(default_factory=dict)
    """The values of tensors of other classes, which show no storage."""
    first: dict[str, Tensor] = field(default_factory=dict)
    """The tensors that are put back, by name."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """How each of them lay."""
    states: list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)
    """The containers that a run may grow or refill, each with a copy of what it held."""

    def __post_init__(self) -> None:
        self.args, self.kwargs = tree_map_only(Tensor, _leaf, (self.args, self.kwargs))
        for module in self.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise Unsupported("the model is a ScriptModule, which torch.compile does not read")
            self.states.append((module, dict(vars(module)), dict(module._parameters), dict(module._buffers)))
        seen = set[int]()
        for held in (self.args, self.kwargs, *(own(module) for module in self.modules())):
            self.contents += [(c, copy.copy(c)) for c in containers(held, seen)]
        self.first = dict(self.reached())
        for name, t in self.first.items():
            if t.is_meta:
                raise Unsupported(f"{name} is on the meta device, and has no values", hint="load the model's weights")
            if type(t) not in PLAIN or t.layout != torch.strided:
                self.whole[t] = t.detach().clone()
                continue
            storage = t.untyped_storage()
            if storage._cdata not in self.before:
                self.before[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).cpu()
                if t.device.type == "cpu":
                    self.before[storage._cdata] = self.before[storage._cdata].clone()
            offset = int(t.storage_offset())
            self.layouts[name] = Layout(storage._cdata, t.device, t.dtype, tuple(t.shape), t.stride(), offset)

    def modules(self) -> list[nn.Module]:
        """All modules, each once."""
        held = (x for _, x in _held("", self.model) if isinstance(x, nn.Module))
        return list(dict.fromkeys(m for x in held for m in x.modules()))

    def reached(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each, once: as the model holds them now."""
        seen = set[int]()
        for name, t in (*self.inputs(), *self._of_the_model()):
            if id(t) not in seen:
                seen.add(id(t))
                yield name, t

    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors among the arguments, by the names that the model's signature has for them."""
        given: Mapping[str, Any] = {**{f"args[{i}]": x for i, x in enumerate(self.args)}, **self.kwargs}
        target = self.model.forward if isinstance(self.model, nn.Module) else self.model
        with contextlib.suppress(TypeError, ValueError):  # of a function without a signature
            given = inspect.signature(target).bind(*self.args, **self.kwargs).arguments
        return list(tensors(given))

    def _of_the_model(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, held in _held("", self.model):
            if isinstance(held, Tensor):
                yield prefix, held
            elif isinstance(held, nn.Module):
                for path, module in held.named_modules(prefix=prefix):
                    dot = f"{path}." if path else ""
                    for name, t in (*module._parameters.items(), *module._buffers.items()):
                        if t is not None:
                            yield f"{dot}{name}", t
                    yield from ((f"{dot}{name}", t) for name, t in tensors(own(module)))

    def device(self) -> torch.device:
        """The first GPU that a tensor lies on, else the CPU."""
        return next((t.device for t in self.first.values() if t.is_cuda), torch.device("cpu"))

    def narrowest(self) -> torch.dtype:
        """The dtype of the fewest bits among floating tensors, but for those of 8."""
        found = {t.dtype for t in self.first.values() if t.is_floating_point() and t.dtype.itemsize > 1}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def put_back(self, dtype: torch.dtype | None = None) -> None:
        """Everything as it was before the first run; in the `dtype` of a reference, if one is given, what is narrower.
        Raises Unsupported if a tensor's class knows no other dtype."""
        for module, state, parameters, buffers in self.states:
            for now, then in ((vars(module), state), (module._parameters, parameters), (module._buffers, buffers)):
                now.clear()
                now.update(then)
        for now, then in self.contents:
            refill(now, then)
        for t, value in self.whole.items():
            if dtype is not None and t.is_floating_point():
                raise Unsupported(f"a tensor of the class {type(t).__name__} has no other dtype")
            with torch.no_grad():
                t.copy_(value)
        memory: dict[tuple[int, torch.dtype], Tensor] = {}
        for name in self.layouts:
            t = self.first[name]
            t.grad = None
            t.data = self.as_it_was(name, dtype, memory)

    def as_it_was(
        self, name: str, dtype: torch.dtype | None, memory: dict[tuple[int, torch.dtype], Tensor] | None = None
    ) -> Tensor:
        """A tensor's value before the first run, as it lay; on the CPU, unless there is a `memory` of what else was put
        back, with which it then shares what it shared."""
        lay = self.layouts[name]
        wide, bits = widened(lay.dtype, dtype), self.before[lay.storage]
        if memory is None:
            return lay.of(bits.view(lay.dtype)).to(wide)
        key = lay.storage, lay.dtype
        if key not in memory:
            memory[key] = bits.view(lay.dtype).to(lay.device, wide, copy=True)
        return lay.of(memory[key])

    def changed(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Copies of the tensors that are not as `put_back(dtype)` left them, on the CPU."""
        found = {}
        for name, t in self.reached():
            if type(t) not in PLAIN or t.layout != torch.strided:
                continue
            now = t.detach().cpu()
            if name not in self.layouts or not _same(now, self.as_it_was(name, dtype)):
                found[name] = now.clone()
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _leaf(t: Tensor) -> Tensor:
    return t if t.is_leaf else t.detach().requires_grad_(t.requires_grad)


DEEP = 16  # containers within containers, at most: one may hold itself


MODULES_OWN = frozenset(vars(nn.Module()))
"""The attributes that each module has; the others are its author's, also those that begin with "_"."""


def own(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module's author gave it, but for parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in MODULES_OWN}


def plain(value: Any) -> bool:
    """Is it an object of a class written in Python, which is nothing but what it holds?"""
    known = nn.Module | Tensor | type | torch.Generator
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, known)


def containers(value: Any, seen: set[int], depth: int = DEEP) -> Iterator[Any]:
    """The lists, dicts, sets and plain objects in a value, each once."""
    if id(value) in seen or not depth:
        return
    if isinstance(value, list | dict | set | collections.deque) or plain(value):
        seen.add(id(value))
        yield value
    within: Iterable[Any] = ()
    if isinstance(value, Mapping):
        within = list(value.values())
    elif isinstance(value, list | tuple | collections.deque):
        within = list(value)
    elif plain(value):
        within = list(vars(value).values())
    for x in within:
        yield from containers(x, seen, depth - 1)


def refill(now: Any, then: Any) -> None:
    """Gives a container the contents of its copy."""
    if isinstance(now, list):
        now[:] = then
    elif isinstance(now, dict | set):
        now.clear()
        now.update(then)
    elif isinstance(now, collections.deque):
        now.clear()
        now.extend(then)
    else:
        vars(now).clear()
        vars(now).update(vars(then))


def leaves(name: str, value: Any, depth: int = DEEP) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that mappings, sequences, dataclasses and plain objects hold: "past.keys[0]" """
    within: Iterable[tuple[str, Any]]
    if isinstance(value, Mapping):
        within = [(f"{name}.{key}" if name else str(key), x) for key, x in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        within = [(f"{name}.{key}", x) for key, x in zip(value._fields, value, strict=True)]
    elif isinstance(value, list | tuple):
        within = [(f"{name}[{i}]", x) for i, x in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        within = [(f"{name}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif plain(value) and vars(value):
        within = [(f"{name}.{key}", x) for key, x in vars(value).items()]
    else:
        yield name, value
        return
    for key, x in within if depth else ():
        yield from leaves(key, x, depth - 1)


def tensors(held: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the leaves of what has these names."""
    for name, value in held.items():
        yield from ((key, x) for key, x in leaves(name, value) if isinstance(x, Tensor))


def _held(name: str, what: Any) -> Iterator[tuple[str, Any]]:
    """(name, module or tensor) of each that a model is, or that a function reads: bound, closed over, or global."""
    if isinstance(what, nn.Module | Tensor):
        yield name, what
    elif isinstance(what, functools.partial):
        given = {"": what.func, **{f"[{i}]": x for i, x in enumerate(what.args)}, **what.keywords}
        for key, value in given.items():
            yield from _held(name + key, value)
    elif inspect.ismethod(what):
        yield from _held(name, what.__self__)
    elif inspect.isfunction(what):
        read = inspect.getclosurevars(what)
        yield from ((key, x) for key, x in {**read.globals, **read.nonlocals}.items() if _holds(x))
    elif hasattr(what, "__dict__"):
        yield from ((key, x) for key, x in vars(what).items() if _holds(x))


def _holds(x: Any) -> bool:
    return isinstance(x, nn.Module | Tensor)
