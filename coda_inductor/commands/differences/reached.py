"""What a model's run may read and overwrite: each tensor that it reaches, by name, put back before the next run.

Reached are parameters, buffers and other attributes of modules, the arguments, and what a function reads (walk.py).
Tensors that share memory share it again when they are put back, also in another dtype.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from coda_inductor.commands.walk import Walk, contents, refill
from coda_inductor.core.errors import Unsupported

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
WIDER = {
    torch.float64: {
        **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
        torch.complex64: torch.complex128,
    },
    torch.float32: dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
}
"""By a reference's own dtype: the dtypes that it widens, and to what."""


def widened(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """The dtype that a reference in `to` computes with instead of `dtype`; None: with the same."""
    return WIDER[to].get(dtype, dtype) if to is not None else dtype


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
    held: list[tuple[Any, Any]] = field(default_factory=list)
    """The containers that a run may change, each with a copy of what it held."""
    opaque: list[tuple[str, Any, str]] = field(default_factory=list)
    """What can neither be compared nor put back, with its text before any run."""
    modules: list[nn.Module] = field(default_factory=list)
    roots: list[nn.Module] = field(default_factory=list)
    """Those that are in no other module."""

    def __post_init__(self) -> None:
        self.args, self.kwargs = tree_map_only(Tensor, _leaf, (self.args, self.kwargs))
        walk = self.walk()
        self.modules, self.roots, self.opaque, self.first = walk.modules, walk.roots, walk.opaque, walk.tensors
        self.held = [(container, contents(container)) for container in walk.containers]
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise Unsupported("the model is a ScriptModule, which torch.compile does not read")
            self.states.append((module, dict(vars(module)), dict(module._parameters), dict(module._buffers)))
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

    def walk(self) -> Walk:
        """All that the arguments and the model hold now; arguments by the names that the model's signature has."""
        given: Mapping[str, Any] = {**{f"args[{i}]": x for i, x in enumerate(self.args)}, **self.kwargs}
        target = self.model.forward if isinstance(self.model, nn.Module) else self.model
        with contextlib.suppress(TypeError, ValueError):  # of a function without a signature
            given = inspect.signature(target).bind(*self.args, **self.kwargs).arguments
        walk = Walk()
        for name, x in given.items():
            walk.visit(name, x)
        walk.visit("", self.model)
        return walk

    def reached(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each, once: as the model holds them now."""
        yield from self.walk().tensors.items()

    def changed_for_good(self) -> list[str]:
        """What could not be put back, by name."""
        return [name for name, value, text in self.opaque if repr(value) != text]

    def train(self, on: bool) -> None:
        """As the modules' authors have it: some freeze a norm there."""
        for module in self.roots:
            module.train(on)

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
        for container, held in self.held:
            refill(container, held)
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
