"""torch.ops.coda.elementwise: one operation for every elementwise pass, and its lowering.

Its eager meaning is the interpreter; compiled graphs on a GPU call its Triton kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.elementwise import Elementwise, interpret, parse
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels.elementwise import TritonKernel, triton_kernel
from coda_inductor.kernels.launch import report
from coda_inductor.ops.lowering import current, given, launched

_library = torch.library.Library("coda", "FRAGMENT")
_library.define("elementwise(Tensor[] inputs, str record, str target) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _eager(inputs: list[Tensor], record: str, target: str) -> list[Tensor]:
    return interpret(parse(record), inputs)


def _fake(inputs: list[Tensor], record: str, target: str) -> list[Tensor]:
    what = parse(record)
    sizes = what.sizes(inputs[what.tile].shape[0])
    return [inputs[0].new_empty(size, dtype=DTYPES[o.dtype]) for size, o in zip(sizes, what.outputs, strict=True)]


_library.impl("elementwise", _eager, "CompositeExplicitAutograd")
torch.library.register_fake("coda::elementwise", _fake, lib=_library)

ELEMENTWISE = torch.ops.coda.elementwise.default
"""elementwise(inputs, Elementwise.text, target) -> outputs, [M, N] or [N, M]."""


class Launcher:
    """What a compiled graph calls, with the settings of the compile that makes or loads the graph; without a kernel the
    pass runs on torch, with one warning."""

    def __init__(self, text: str) -> None:
        self.record, self.settings = parse(text), current()

    @cached_property
    def kernel(self) -> TritonKernel | None:
        """The kernel, None if there is none. Under CODA_INDUCTOR_STRICT raises Unsupported instead."""
        try:
            return triton_kernel(self.record, self.settings.cache_dir)
        except Unsupported as error:
            if self.settings.strict:
                raise
            report(f"an elementwise pass runs as separate operations: {error}")
            return None

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        if self.kernel is not None:
            self.kernel(inputs, outs)
            return
        for out, made in zip(outs, interpret(self.record, inputs), strict=True):
            if out is not None:
                out.copy_(made)


class ElementwiseKernel(ir.FallbackKernel):
    """One launch. Its outputs are allocated by Inductor before the call; unread ones are None."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        self.codegen_comment(wrapper)
        text = self.constant_args[0]
        name = f"coda_elementwise_{parse(text).digest}"
        wrapper.add_import_once("from coda_inductor.ops.elementwise import Launcher as coda_elementwise")
        wrapper.add_import_once(f"{name} = coda_elementwise({text!r})")
        wrapper.writeline(f"{self.get_name()} = {name}({given(self, wrapper)})")


def _lower(inputs: Sequence[Any], text: str, target: str) -> Any:
    if target == "reference" or inputs[0].get_device().type != "cuda":
        return fallback_handler(ELEMENTWISE, add_to_fallback_set=False)(inputs, text, target)
    tensors = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in inputs]
    return launched(ElementwiseKernel, ELEMENTWISE, tensors, (text, target), _layouts(parse(text), tensors))


def _layouts(record: Elementwise, tensors: Sequence[Any]) -> list[ir.FixedLayout]:
    """Of the outputs."""
    sizes, device = record.sizes(tensors[record.tile].get_size()[0]), tensors[0].get_device()
    return [
        ir.FixedLayout(device, DTYPES[out.dtype], [*size], [*size[1:], 1])
        for out, size in zip(record.outputs, sizes, strict=True)
    ]


@cache
def register() -> None:
    """Tells Inductor, once."""
    register_lowering(ELEMENTWISE, type_promotion_kind=None)(_lower)
