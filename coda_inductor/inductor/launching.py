"""coda.region lowered: Inductor allocates the outputs, and its wrapper calls the kernel as a plain Python function.
coda.stored lowered: nothing but a buffer.

The wrapper is cached as text, so all that a call needs is the Region's text, written out once at the top of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from coda_inductor.codegen.launch import fall_back, kernel
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES, Region, parse
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.ops import REGION, STORED

Launch = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]


def launcher(text: str) -> Launch:
    """What a compiled graph calls: f(inputs, outs). The kernel is built or loaded at the first call, with the settings
    of the compile that makes or loads the graph; without a kernel the Region runs on torch, with one warning."""
    settings = current()
    run: list[Launch] = []

    def launch(inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        if not run:
            run.append(ready(text, settings))
        run[0](inputs, outs)

    return launch


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
    """A store or sum of a RegionKernel: a buffer of Inductor's that the kernel writes."""

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
    return [ir.TensorBox.create(out) for out in packed.outputs]


def _layouts(region: Region, m: Any, device: torch.device) -> list[ir.FixedLayout]:
    """Of the outputs: stores, then sums."""
    stores = [ir.FixedLayout(device, DTYPES[s.dtype], [m, region.width], [region.width, 1]) for s in region.stores]
    sizes = [m if r.over == "N" else region.n for r in region.reductions]
    return stores + [ir.FixedLayout(device, region.compute, [n], [1]) for n in sizes]


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
