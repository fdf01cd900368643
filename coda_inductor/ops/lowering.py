"""coda.region lowered: Inductor allocates the outputs, and its wrapper calls the kernel as a plain Python function.
coda.stored lowered: nothing but a buffer, unless others have it too; coda.kept: a copy; coda.added_up: a product that
is added to memory that nobody else reads.

The wrapper is cached as text, so all that a call needs is the Region's text, written out once at the top of the module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache, cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import clone, fallback_handler, register_lowering
from torch._inductor.virtualized import V

from coda_inductor.core.blocks import pitch
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region, parse
from coda_inductor.core.settings import Settings
from coda_inductor.kernels.executable import Run
from coda_inductor.kernels.launch import Launch, fall_back, kernel, together
from coda_inductor.ops.custom import (
    ADD_PRODUCT_,
    ADD_REGION_,
    ADDED_REGION,
    ADDED_UP,
    AFTER,
    KEPT,
    REGION,
    STORED,
)
from coda_inductor.patterns.effects import viewed


class Launcher:
    """What a compiled graph calls. The kernel is built or loaded at the first call, with the settings of the compile
    that makes or loads the graph; without a kernel the Region runs on torch, with one warning."""

    def __init__(self, text: str) -> None:
        self.text, self.settings = text, current()

    @cached_property
    def kernel(self) -> Launch:
        """Ready to be called. Under CODA_INDUCTOR_STRICT raises Unsupported if there is no kernel."""
        try:
            return self.made()
        except Unsupported as error:
            if self.settings.strict:
                raise
            return OnTorch(self.record(), str(error))

    def made(self) -> Launch:
        """The kernel. Raises Unsupported if there is none."""
        s = self.settings
        return kernel(self.text, s.cache_dir, strict=s.strict, measured=not s.deterministic)

    def record(self) -> Region:
        """What the text says."""
        return parse(self.text)

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        together(((self.kernel, inputs, outs),))

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run | None:
        """As Kernel.prepare."""
        return self.kernel.prepare(inputs, outs)


class OnTorch:
    """A Region that has no kernel."""

    def __init__(self, record: Region, reason: str) -> None:
        self.record, self.reason = record, reason

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        """Computes at once."""
        fall_back(self.record, inputs, outs, self.reason)


def current() -> Settings:
    """The settings of the compile under way, as its pass holds them; outside of one those of the environment."""
    settings = getattr(inductor_config.joint_custom_pre_pass, "settings", None)
    return settings if isinstance(settings, Settings) else Settings.read()[0]


class RegionKernel(ir.FallbackKernel):
    """One launch. Its outputs are RegionOutputs, allocated by Inductor before the call; unread ones are None."""

    written = False

    @property
    def text(self) -> str:
        """The Region's."""
        return self.constant_args[0]  # type: ignore[no-any-return]

    @property
    def region(self) -> Region:
        """What is computed."""
        return parse(self.text)

    @property
    def stored_columns(self) -> int:
        """Of all that it stores."""
        return len(self.region.stores) * self.region.width

    def freed_columns(self, last: AbstractSet[str]) -> float:
        """Of those of its inputs that have a row for each token and are read for the `last` time (names)."""
        region, columns = self.region, dict[int, float]()
        for product in region.products:
            for a, b, k in product.terms:  # if tokens are summed over, both are theirs, and no weight
                columns |= {a: math.inf, b: math.inf} if product.a_layout == "km" else {a: k}
        for i, operand in enumerate(region.operands, region.matrices):
            columns[i] = {"tile": region.n, "table": 2 * region.half}.get(operand.extent, 0)
        names = {x.get_name(): columns.get(i, 0) for i, x in enumerate(self.inputs)}  # type: ignore[union-attr]
        return sum(names[name] for name in names.keys() & last)

    def written_names(self) -> set[str]:
        """What others would read, by name."""
        return {self.get_name(), *(out.get_name() for out in self.outputs)}

    def codegen(self, wrapper: Any) -> None:
        """Writes the call, and with it those that may overlap with it."""
        if self.written:
            return
        others = _beside(self)
        for node in others:
            _check_inputs(wrapper, node)
        regions = [self, *(node.node for node in others)]
        for region in regions:
            region.codegen_comment(wrapper)
        calls = [region.call(wrapper) for region in regions]
        names = "".join(f"{region.get_name()} = " for region in regions)
        if len(calls) == 1:
            ((run, given),) = calls
            wrapper.writeline(f"{names}{run}({given})")
            return
        wrapper.add_import_once("from coda_inductor.kernels.launch import together as coda_together")
        wrapper.writeline(f"{names}coda_together([{', '.join(f'({run}, {given})' for run, given in calls)}])")

    def call(self, wrapper: Any) -> tuple[str, str]:
        """What is called, and with what. Allocates the outputs: all those of one line before it, so that none of them
        lies where an input of the line does."""
        self.written = True
        return launcher(wrapper, self.text, self.region.digest), given(self, wrapper)


def launcher(wrapper: Any, text: str, digest: str) -> str:
    """The name under which the wrapper has a Region's Launcher."""
    wrapper.add_import_once("from coda_inductor.ops.lowering import Launcher as coda_launcher")
    wrapper.add_import_once(f"coda_{digest} = coda_launcher({text!r})")
    return f"coda_{digest}"


FREED = 1 / 8  # (at width 2048 tables of cosines and sines, of heads of 128, are 1/16 of what queries and keys store)


def _beside(first: RegionKernel) -> list[Any]:
    """The scheduler's nodes of the Regions that Inductor has put right behind `first` and that read nothing of it, nor
    of one another. All of a line's outputs have memory before any of its inputs gives it back: what is read for the
    last time before the line's last Region is little beside what is stored."""
    nodes, leader = V.graph.scheduler.nodes, V.graph.scheduler.current_node
    assert leader is not None
    found, written = list[Any](), first.written_names()
    freed, stored = first.freed_columns(leader.last_usage), first.stored_columns
    for node in nodes[nodes.index(leader) + 1 :]:
        other = getattr(node, "node", None)
        if not isinstance(other, RegionKernel | RegionOutput) or not _alike(leader, node):
            break
        if isinstance(other, RegionOutput):
            continue
        if {dep.name for dep in node.read_writes.reads} & written or freed > FREED * stored:
            break
        found.append(node)
        written |= other.written_names()
        freed, stored = freed + other.freed_columns(node.last_usage), stored + other.stored_columns
    return found


def _check_inputs(wrapper: Any, node: Any) -> None:
    """Writes what Inductor (torch 2.13) would write before `node`, whose Region runs earlier: assertions on the sizes
    of inputs of the graph, and copies of those that are not aligned. It writes both once."""
    reads = [dep.name for dep in node.read_writes.reads]
    if inductor_config.size_asserts and hasattr(wrapper, "codegen_deferred_input_asserts"):
        wrapper.codegen_deferred_input_asserts(reads)
    if hasattr(wrapper, "codegen_deferred_alignment_copies"):
        wrapper.codegen_deferred_alignment_copies(reads)


def _alike(a: Any, b: Any) -> bool:
    """Do two nodes run on one device and stream, and in one part of a graph that is cut for CUDA graphs?"""
    streams = getattr(V.graph.scheduler, "node_to_stream", {})
    if a.get_device() != b.get_device() or streams.get(a) != streams.get(b):
        return False
    cut = V.graph.scheduler.should_partition
    return not inductor_config.graph_partition or bool(cut(a)) == bool(cut(b))


def given(kernel: ir.FallbackKernel, wrapper: Any) -> str:
    """What a launch is called with. Allocates the outputs."""
    outs = []
    for out in kernel.outputs:
        dead = out.get_name() in V.graph.removed_buffers
        if not dead:
            wrapper.codegen_allocation(out)
        outs.append("None" if dead else out.get_name())
    inputs = ", ".join(x.codegen_reference() for x in kernel.inputs)  # type: ignore[union-attr]
    return f"[{inputs}], [{', '.join(outs)}]"


class RegionOutput(ir.MultiOutput):
    """A store or sum of a kernel of ours: a buffer of Inductor's that the kernel writes."""

    def should_allocate(self) -> bool:
        """Inductor allocates it."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Nothing to write: the launch has filled it."""


def _lower(inputs: Sequence[Any], text: str, target: str) -> Any:
    if target == "reference":
        return fallback_handler(REGION, add_to_fallback_set=False)(inputs, text, target)
    region, tensors = parse(text), in_memory(inputs)
    i, dim = region.m_axis
    layouts = _layouts(region, tensors[i].get_size()[dim], tensors[0].get_device())
    return launched(RegionKernel, REGION, tensors, (text, target), layouts)


def in_memory(inputs: Sequence[Any]) -> list[Any]:
    """The inputs, computed and in rows."""
    return [_in_rows(ir.ExternKernel.realize_input(x)) for x in inputs]


def _in_rows(x: Any) -> Any:
    """x in rows that a kernel can read, which are apart by a multiple of 8. (Of an input of the graph, in a backward
    also of what the forward kept, a launch makes a copy, and says so.) What is cast to 8 bits is a transposed weight,
    and would come as that lies: in columns."""
    if x.get_dtype().itemsize == 1:
        return ir.ExternKernel.require_stride_order(x, [1, 0])
    x = ir.ExternKernel.require_stride1(x)
    apart, columns = x.get_stride()[:-1], x.get_size()[-1]
    ragged = any(isinstance(n, int | sympy.Integer) and n % 8 for n in apart)
    if ragged and isinstance(columns, int | sympy.Integer) and x.get_name() not in V.graph.graph_inputs:
        return ir.ExternKernel.require_exact_strides(x, [pitch(int(columns)), 1])
    return x


def launched(kernel: Any, op: Any, tensors: list[Any], constants: tuple[str, str], layouts: list[Any]) -> list[Any]:
    """The outputs of a kernel of ours, which Inductor allocates."""
    packed = kernel(ir.MultiOutputLayout(device=tensors[0].get_device()), op, tensors, constants, _arguments)
    packed.outputs = [RegionOutput(layout, packed, [(list, i)]) for i, layout in enumerate(layouts)]
    return [ir.TensorBox.create(out) for out in packed.outputs]


def _layouts(region: Region, m: Any, device: torch.device) -> list[ir.FixedLayout]:
    """Of the outputs: stores, then sums."""
    lie = [pitch(region.width), 1]
    stores = [ir.FixedLayout(device, DTYPES[s.dtype], [m, region.width], lie) for s in region.stores]
    sizes = [region.length(r, m) for r in region.reductions]
    return stores + [ir.FixedLayout(device, region.compute, [n], [1]) for n in sizes]


def _arguments(inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operation's arguments, from Inductor's flat lists."""
    return (list(inputs), *constants), {}


def _store(x: ir.TensorBox) -> ir.TensorBox:
    """The value itself, which now has memory; a copy, if others read or write that memory under another name. (Inductor
    takes a clone for its source, and lets an operation write to that if it sees no reader behind.)"""
    return alone_in_memory(x)


def _has_other_names(node: fx.Node) -> bool:
    """Is the node's memory an input's, or is there another reader of it, or of what it is a view of?"""
    while node.op != "placeholder" and len(node.users) == 1:
        if (source := viewed(node)) is None:
            return False
        node = source
    return True


def _copy(x: ir.TensorBox) -> ir.TensorBox:
    """A copy, in memory of its own before anything overwrites the original."""
    copy: ir.TensorBox = clone(x)
    copy.realize()
    return copy


def _kept(x: ir.TensorBox) -> Any:
    """The copy that the graph asks for: by torch's own kernel of what is conjugated only when it is read, which a loop
    over its memory would not see."""
    source = V.graph.current_node.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].is_conj():
        return fallback_handler(KEPT, add_to_fallback_set=False)(x)
    return _copy(x)


def alone_in_memory(x: ir.TensorBox, position: int = 0) -> ir.TensorBox:
    """A tensor that the operation that is lowered reads, in memory that nobody else reads or writes."""
    if _has_other_names(V.graph.current_node.all_input_nodes[position]):
        return _copy(x)
    x.realize()
    return x


def _add_up(into: ir.TensorBox | None, left: ir.TensorBox, right: ir.TensorBox) -> Any:
    """The product, added to `into` in its memory; to a copy of it, if that memory is an input's or somebody else's."""
    if into is None:
        return fallback_handler(ADDED_UP, add_to_fallback_set=False)(into, left, right)
    into = _own_sum(into)
    fallback_handler(ADD_PRODUCT_, add_to_fallback_set=False)(into, left, right)
    return into


def _own_sum(into: ir.TensorBox) -> ir.TensorBox:
    """What the operation that is lowered adds to, or a copy, if others have or read that memory."""
    source = V.graph.current_node.args[0]
    assert isinstance(source, fx.Node)
    others = V.graph.current_node.args[1:].count(source) + sum(user.target is not AFTER for user in source.users) - 1
    return into if source.target in (ADDED_UP, ADDED_REGION) and not others else _copy(into)


class AddingKernel(ir.FallbackKernel):
    """One launch of a kernel that adds to memory."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        self.codegen_comment(wrapper)
        text = self.constant_args[0]
        into, *matrices = (x.codegen_reference() for x in self.inputs)  # type: ignore[union-attr]
        run = launcher(wrapper, text, parse(text).digest)
        wrapper.writeline(f"{run}([{', '.join(matrices)}], [{into}])")


def _add_region(into: ir.TensorBox, left: ir.TensorBox, right: ir.TensorBox, text: str, target: str) -> Any:
    """What the Region makes, added to `into` in its memory, or to a copy of it."""
    into, matrices = _own_sum(into), in_memory((left, right))
    if target == "reference":
        fallback_handler(ADD_REGION_, add_to_fallback_set=False)(into, *matrices, text, target)
    else:
        AddingKernel.create(ADD_REGION_, into, *matrices, text, target)
    return into


def _operation(x: ir.TensorBox) -> str:
    """The name of the operation that computes a value in memory, or writes it over another; of one of several results,
    of what makes them all."""
    if (last := _last_written(x.get_name())) != x.get_name():
        writer: Any = V.graph.name_to_buffer[last].get_defining_op()
        return str(writer.get_operation_name())
    made: Any = x.data.data  # type: ignore[attr-defined]
    kernel: Any = made.inputs[0] if isinstance(made, ir.MultiOutput) else made
    return str(kernel.get_operation_name())


def _last_written(name: str) -> str:
    """The buffer that stands for the last write to a buffer's memory."""
    buffers = (
        b for b in reversed(V.graph.buffers) if isinstance(b, ir.MutationOutput) and name in b.get_mutation_names()
    )
    return next((b.get_name() for b in buffers), name)


def _after(x: ir.TensorBox, others: Sequence[ir.TensorBox]) -> ir.TensorBox:
    """The value, in memory, whose kernel the scheduler places behind those of the others."""
    x = _store(x)
    kernel = _operation(x)
    for other in others:
        other.realize()
        V.graph.additional_buffer_deps[kernel].add(_last_written(other.get_name()))
    return x


@cache
def register() -> None:
    """Tells Inductor, once."""
    register_lowering(REGION, type_promotion_kind=None)(_lower)
    register_lowering(STORED, type_promotion_kind=None)(_store)
    register_lowering(KEPT, type_promotion_kind=None)(_kept)
    register_lowering(AFTER, type_promotion_kind=None)(_after)
    register_lowering(ADDED_UP, type_promotion_kind=None)(_add_up)
    register_lowering(ADDED_REGION, type_promotion_kind=None)(_add_region)
