"""torch.ops.coda.elementwise: one operation for every elementwise pass, and its lowering.

Its eager meaning is the interpreter; compiled graphs on a GPU call its Triton kernel. Where nobody reads the tensor any
more, what is made of it is written over it, as a gradient of scores over the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.elementwise import Elementwise, interpret, parse
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels.elementwise import TritonKernel, triton_kernel
from coda_inductor.kernels.launch import report
from coda_inductor.ops.lowering import current, given, launched
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import may_view, viewed

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

_library.define(
    "elementwise_over_(Tensor(a!) into, Tensor[] inputs, str record, str target) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _over(into: Tensor, inputs: list[Tensor], record: str, target: str) -> None:
    into.copy_(interpret(parse(record), inputs)[0])


_library.impl("elementwise_over_", _over, "CompositeExplicitAutograd")
torch.library.register_fake("coda::elementwise_over_", lambda into, inputs, record, target: None, lib=_library)

OVER = torch.ops.coda.elementwise_over_.default
"""elementwise_over_(into, inputs, Elementwise.text, target): the one output is written over `into`, the tensor [M, N]
among the inputs."""


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
        wrapper.writeline(f"{self.get_name()} = {name}({self.called_with(wrapper)})")

    def called_with(self, wrapper: Any) -> str:
        """The launch's arguments."""
        return given(self, wrapper)


class OverwritingKernel(ElementwiseKernel):
    """A launch that writes over its first argument, which is one of its inputs, and in whose memory no other lies."""

    def called_with(self, wrapper: Any) -> str:
        """The launch's arguments."""
        into, *inputs = (x.codegen_reference() for x in self.inputs)  # type: ignore[union-attr]
        return f"[{', '.join(inputs)}], [{into}]"


def _lower(inputs: Sequence[Any], text: str, target: str) -> Any:
    record, reference = parse(text), target == "reference" or inputs[0].get_device().type != "cuda"
    if reference:
        tensors = [*inputs]
    else:
        tensors = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in inputs]
    into = inputs[record.tile]
    if may_overwrite(record, V.graph.current_node):
        into.realize()
        if into.get_name() == tensors[record.tile].get_name():
            V.graph.mark_buffer_mutated(into.get_name())  # computes its readers so far: `create` would do so too late
            kernel = ir.FallbackKernel if reference else OverwritingKernel
            kernel.create(OVER, into, tensors, text, target)
            return [into]
    if reference:
        return fallback_handler(ELEMENTWISE, add_to_fallback_set=False)(inputs, text, target)
    return launched(ElementwiseKernel, ELEMENTWISE, tensors, (text, target), _layouts(record, tensors))


def may_overwrite(record: Elementwise, op: fx.Node) -> bool:
    """Is one output made of a tensor, as that lies and of its dtype, in memory of the graph's own in which no other
    input lies, and which nobody reads behind the operation?"""
    out, *others = record.outputs
    if others or out.over or out.transposed or record.operands[record.tile].dtype != out.dtype:
        return False
    inputs: list[fx.Node] = [*op.args[0]]  # type: ignore[misc]
    node = inputs.pop(record.tile)
    while (below := in_memory_of(node)) is not None:
        node = below
    names = g.reached([node], lambda n: [u for u in n.users if in_memory_of(u) is n])
    if node.op != "call_function" or not names.isdisjoint(inputs):  # a row that all rows read, say
        return False
    return all(u is op or u < op for n in names for u in n.users)


def in_memory_of(node: fx.Node) -> fx.Node | None:
    """The input in whose memory the node's result lies, or may lie, as an item in that of several views; None if it has
    memory of its own. (What coda.after and coda.stored return has: they copy what somebody else reads.)"""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        return source if viewed(node) is not None else None
    same = g.is_cast(node) and node.meta["val"].dtype == source.meta["val"].dtype
    return source if same or may_view(node) else None


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
