"""coda.region lowered: Inductor allocates the outputs, and its wrapper calls the kernel as a plain Python function.
coda.stored lowered: nothing but a buffer.

The wrapper is cached as text, so all that a call needs is the Region's text, written out once at the top of the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from coda_inductor.codegen.launch import fall_back, kernel
from coda_inductor.codegen.legality import ALIGNED
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES, Region, parse
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.ops import REGION, STORED

aten = torch.ops.aten
Launch = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]


def launcher(text: str) -> Launch:
    """What a compiled graph calls: f(inputs, outs). The kernel is built or loaded at the first call, with the settings
    of the compile that makes or loads the graph; without a kernel the Region runs on torch, with one warning."""
    settings = current()
    run: list[Launch] = []
    region = parse(text)

    def launch(inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        if not run:
            run.append(ready(text, settings))
        run[0](inputs, apart(region, outs))

    return launch


def together(region: Region) -> bool:
    """Are its sums over N rows of one tensor, the last of the buffers? One launch finishes them all. (Not so sums over
    M: they are gradients, which outlive the graph.)"""
    return sum(r.is_row_sum for r in region.reductions) > 1


def apart(region: Region, outs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The Region's outputs, from the buffers that Inductor allocates."""
    if not together(region):
        return outs
    *others, sums = outs
    stores, totals = others[: len(region.stores)], iter(others[len(region.stores) :])
    rows = iter(sums) if sums is not None else itertools.repeat(None)
    return [*stores, *(next(rows if r.is_row_sum else totals) for r in region.reductions)]


def current() -> Settings:
    """The settings of the compile under way, as its pass holds them; outside of one those of the environment."""
    settings = getattr(inductor_config.joint_custom_pre_pass, "settings", None)
    return settings if isinstance(settings, Settings) else Settings.read()[0]


def ready(text: str, settings: Settings) -> Launch:
    """The Region's kernel, or the interpreter where none can be. Under CODA_INDUCTOR_STRICT raises Unsupported."""
    try:
        return kernel(text, settings.cache_dir, strict=settings.strict)
    except Unsupported as error:
        if settings.strict:
            raise
        return partial(fall_back, parse(text), reason=str(error))


class RegionKernel(ir.FallbackKernel):
    """One launch. Its outputs are RegionOutputs, allocated by Inductor before the call; unread ones are None."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        text, _ = self.constant_args
        digest = parse(text).digest
        wrapper.add_import_once("from coda_inductor.inductor.launching import launcher as coda_launcher")
        wrapper.add_import_once(f"coda_{digest} = coda_launcher({text!r})")
        self.codegen_comment(wrapper)
        outs = []
        for out in self.outputs:
            dead = out.get_name() in V.graph.removed_buffers
            if not dead:
                wrapper.codegen_allocation(out)
            outs.append("None" if dead else out.get_name())
        inputs = ", ".join(x.codegen_reference() for x in self.inputs)  # type: ignore[union-attr]
        wrapper.writeline(f"{self.get_name()} = coda_{digest}([{inputs}], [{', '.join(outs)}])")


class RegionOutput(ir.MultiOutput):
    """A store or sum of a RegionKernel, or all of its sums over N: a buffer of Inductor's that the kernel writes."""

    def should_allocate(self) -> bool:
        """Inductor allocates it."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Nothing to write: the launch has filled it."""


def _lower(inputs: Sequence[Any], text: str, target: str) -> Any:
    if target == "reference":
        return fallback_handler(REGION, add_to_fallback_set=False)(inputs, text, target)
    region = parse(text)
    tensors = [ir.ExternKernel.require_stride1(ir.ExternKernel.realize_input(x)) for x in inputs]
    device = tensors[0].get_device()
    assert device is not None
    packed = RegionKernel(ir.MultiOutputLayout(device=device), REGION, tensors, (text, target), _arguments)
    i, dim = region.m_axis
    layouts = _layouts(region, tensors[i].get_size()[dim], device)
    packed.outputs = [RegionOutput(layout, packed, [(list, i)]) for i, layout in enumerate(layouts)]
    boxes = [ir.TensorBox.create(out) for out in packed.outputs]
    if not together(region):
        return boxes
    *others, sums = boxes
    row = itertools.count()
    for i, r in enumerate(region.reductions, len(region.stores)):
        if r.is_row_sum:
            others.insert(i, lowerings[aten.select.int](sums, 0, next(row)))
    return others


def _layouts(region: Region, m: Any, device: torch.device) -> list[ir.FixedLayout]:
    """Of the buffers: stores, then sums, those over N last if they are rows of one."""

    def layout(dtype: torch.dtype, size: list[Any], stride: list[Any]) -> ir.FixedLayout:
        return ir.FixedLayout(device, dtype, size, stride)

    stores = [layout(DTYPES[s.dtype], [m, region.width], [region.width, 1]) for s in region.stores]
    sizes = [m if r.over == "N" else region.n for r in region.reductions]
    alone = [not together(region) or not r.is_row_sum for r in region.reductions]
    stores += [layout(region.compute, [n], [1]) for n in itertools.compress(sizes, alone)]
    if all(alone):
        return stores
    pitch = FloorDiv(m + ALIGNED - 1, ALIGNED) * ALIGNED
    return [*stores, layout(region.compute, [alone.count(False), m], [pitch, 1])]


def _arguments(inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operation's arguments, from Inductor's flat lists."""
    return (list(inputs), *constants), {}


def _store(x: ir.TensorBox) -> ir.TensorBox:
    """The value itself, which now has memory."""
    x.realize()
    return x


@cache
def register() -> None:
    """Tells Inductor, once."""
    register_lowering(REGION, type_promotion_kind=None)(_lower)
    register_lowering(STORED, type_promotion_kind=None)(_store)
