"""What Inductor computes where: which values of a graph become loops of their own, and what each loop reads.

The first part of the byte model (fusion.py and schedule.py follow). Inductor lowers node by node; a pointwise value
stays a formula that every consumer repeats, until something forces it into memory: a consumer that is no loop (a
product, attention, the end of the graph), a reduction, or its own size (config's thresholds on reads and operations).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx

from coda_inductor.ops.custom import AFTER, REGION, STORED
from coda_inductor.ops.loss import LOSS_ROWS, LOSS_TARGETS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import name_of
from coda_inductor.patterns.layout import alike, is_strided
from coda_inductor.patterns.sizes import assumed
from coda_inductor.schedule import paths
from coda_inductor.schedule.paths import Path, Reads

Kind = Literal["view", "part", "loop", "gather", "source", "random", "reduction", "scan", "scatter", "output", "extern"]

_NAMES: dict[Kind, str] = {
    "view": "stored after view permute expand unsqueeze squeeze alias t transpose detach reshape _unsafe_view "
    "view_as_real lift_fresh",
    "part": "slice select split split_with_sizes unbind chunk diagonal as_strided",
    "loop": "cat stack clone convert_element_type _to_copy where slice_scatter select_scatter constant_pad_nd flip "
    "repeat copy copy_ tril triu fill masked_fill roll glu view_as_complex",
    "gather": "embedding index gather index_select _unsafe_index _unsafe_masked_index",
    "source": "full iota arange scalar_tensor empty zeros ones new_zeros new_ones new_full new_empty eye linspace "
    "full_like zeros_like ones_like empty_like",
    "random": "rand randn randint rand_like randn_like bernoulli",
    "reduction": "sum mean var var_mean logsumexp amax amin argmax argmin any all prod max min std",
    "scan": "cumsum cumprod logcumsumexp cummax cummin",
    "scatter": "index_put _unsafe_index_put scatter scatter_add scatter_reduce index_add "
    "_unsafe_masked_index_put_accumulate",
}
KINDS: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}


HEAVY = {"slice_scatter": 5, "select_scatter": 5, "cat": 3, "constant_pad_nd": 4}
"""Operations of Inductor's loop language that one node becomes, where it is more than one or two."""

aten = torch.ops.aten
IN_ROWS: frozenset[object] = frozenset({*g.MATRIX_PRODUCTS, aten.bmm.default, aten.baddbmm.default, REGION})
"""Operations that take matrices of which one stride is 1, and a copy of any other: the gradient of a sum is one number,
expanded."""


@dataclass(eq=False, slots=True)
class Loop:
    """One loop nest before fusion: `numel` points, each over `rnumel` (1: no reduction) elements.

    `inner` says that the reduced elements of one point lie together in memory. `nodes` are the operations it performs,
    `out` the value it writes, `written` how many elements of it.
    """

    out: fx.Node
    nodes: tuple[fx.Node, ...]
    reads: Reads
    numel: int
    rnumel: int
    inner: bool
    written: int
    additive: bool = False


@dataclass(slots=True)
class Formula:
    """A value that is not in memory: what it reads, and which nodes a consumer has to repeat, of which parts. What is
    computed of two parts of a value is computed twice."""

    reads: Reads
    ops: tuple[tuple[fx.Node, Path], ...]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(dict.fromkeys(node for node, _ in self.ops))

    @property
    def loads(self) -> int:
        """The parts of buffers that it reads."""
        return sum(map(len, self.reads.values()))

    @property
    def cost(self) -> int:
        """Of its operations and loads."""
        return sum(HEAVY.get(name_of(node), 1) for node, _ in self.ops) + self.loads


@dataclass(eq=False, slots=True)
class Extern:
    """An operation that is no loop (a product, attention): the node, and the buffers it takes."""

    out: fx.Node
    reads: tuple[fx.Node, ...]


@dataclass(slots=True)
class Lowered:
    """What a graph computes, in order, and the buffers that something other than a loop takes."""

    order: list[Loop | Extern] = field(default_factory=list)
    needed: set[fx.Node] = field(default_factory=set)


def kind_of(node: fx.Node) -> Kind:
    """How Inductor treats the operation of a call_function node."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return "part" if isinstance(source, fx.Node) and kind_of(source) == "part" else "output"
    if not isinstance(target, torch._ops.OpOverload):
        return "extern"
    if target in g.COPIES and copies_nothing(node):
        return "view"
    kind = KINDS.get(target._schema.name.split("::")[1])
    if kind is None and target.namespace in ("aten", "prims"):
        kind = "loop" if torch.Tag.pointwise in target.tags else None
        kind = "view" if kind is None and target.is_view else kind
    if kind == "reduction" and target._schema.name in ("aten::max", "aten::min") and len(node.all_input_nodes) > 1:
        kind = "loop"
    if target is aten.cat.default and _multiplied_into(node):
        return "extern"
    return "loop" if kind == "scatter" and _selects(node) else kind or "extern"


def copies_nothing(node: fx.Node) -> bool:
    """Does a copy lie as what it is of, and is not returned? Inductor's `remove_noop_ops` drops it."""
    source = node.args[0]
    return isinstance(source, fx.Node) and alike(node, source) and not any(u.op == "output" for u in node.users)


def _multiplied_into(cat: fx.Node) -> bool:
    """Does it put products beside or above each other that nobody else reads? They are written where they shall lie."""
    return all(n.target is aten.mm.default and len(n.users) == 1 for n in cat.all_input_nodes)


def _only_loops_read(node: fx.Node) -> bool:
    """Do only loops read the node, or views of it?"""
    kinds = {user: kind_of(user) if user.op == "call_function" else "output" for user in node.users}
    return all(_only_loops_read(u) if kind in ("view", "part") else kind == "loop" for u, kind in kinds.items())


def _selects(node: fx.Node) -> bool:
    """Does it put one number into each row of a constant tensor? Inductor compares each place with the row's index
    instead (scatter_upon_const_tensor), so that a cross-entropy's gradient writes no zeros of [tokens, vocabulary]."""
    applies = getattr(inductor_config, "optimize_scatter_upon_const_tensor", False)
    if not applies or node.target is not aten.scatter.value or len(node.args) != 4:
        return False
    constant, dim, index, _ = node.args
    if not isinstance(constant, fx.Node) or constant.target is not aten.full.default:
        return False
    if any(user.target is not aten.scatter.value for user in constant.users):  # the partitioner makes equal ones one
        return False
    assert isinstance(index, fx.Node) and isinstance(dim, int)
    whole, given = ([assumed(size) for size in n.meta["val"].shape] for n in (constant, index))
    whole[dim] = 1
    return whole == given


def owner(buffer: fx.Node) -> fx.Node:
    """The node whose operation writes `buffer`: of several outputs, each is a buffer."""
    is_output = buffer.op == "call_function" and kind_of(buffer) == "output"
    return buffer.all_input_nodes[0] if is_output else buffer


def base_of(node: fx.Node) -> fx.Node:
    """The value that `node` is a view of."""
    while node.op == "call_function" and kind_of(node) in ("view", "part"):
        node = node.all_input_nodes[0]
    return node


def elements(node: fx.Node) -> int:
    """Elements of the (first) tensor that the node computes, 0 if it computes none."""
    val = node.meta.get("val")
    tensors = [v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor)]
    return math.prod(assumed(s) for s in tensors[0].shape) if tensors else 0


def itemsize(node: fx.Node) -> int:
    """Bytes of one element of the tensor (of the first tensor) that `node` computes."""
    val = node.meta["val"]
    first = next(v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor))
    return first.dtype.itemsize


def is_tensor(node: fx.Node) -> bool:
    """Does the node compute a tensor, and not a size?"""
    return elements(node) > 0


def lower(graph: fx.Graph) -> Lowered:
    """`graph` is functional, decomposed ATen, forward or backward or inference."""
    return _Lowering().run(graph)


class _Lowering:
    """Inductor's GraphLowering.run_node and StorageBox heuristics, on nodes instead of IR."""

    def __init__(self) -> None:
        self.result = Lowered()
        self.formulas: dict[fx.Node, Formula] = {}
        self.copies: dict[fx.Node, Loop] = {}

    def run(self, graph: fx.Graph) -> Lowered:
        for node in graph.nodes:
            if node.op == "output":
                for value in node.all_input_nodes:
                    self.result.needed |= set(self.realize(value))
            elif node.op == "call_function" and is_tensor(node):
                self.call(node, kind_of(node))
            elif node.op == "call_function":
                self.extern(node)
        return self.result

    def call(self, node: fx.Node, kind: Kind) -> None:
        if node.target in (STORED, AFTER):
            self.realize(node.all_input_nodes[0])
        if node.target is aten.cat.default and self.made_in_place(node):
            kind = "extern"  # it copies nothing: its parts are written where they shall lie
        if kind in ("loop", "gather", "source", "random"):
            self.formulas[node] = self.pointwise(node, kind)
            if kind == "random" or node.target is aten.copy_.default:
                self.realize(node)
        elif kind in ("reduction", "scan", "scatter"):
            self.result.order.append(self.big_loop(node, kind))
        elif kind == "extern":
            self.extern(node)
        if kind in ("view", "part", "loop", "gather", "source", "random"):
            self.maybe_realize(node)
        if any(user.op == "output" for user in node.users):  # whose strides are asked for
            self.result.needed |= set(self.realize(node))

    def made_in_place(self, cat: fx.Node) -> bool:
        """Is each part of a cat a loop of its own? Of parts in memory, and of what is made of reductions over fewer
        numbers than the cat has, unless only loops read it."""
        parts = cat.all_input_nodes
        if not all(n.op == "call_function" and kind_of(n) in ("loop", "reduction") for n in parts):
            return False
        formulas = [self.formulas[n] for n in parts if n in self.formulas]
        reduced = {n for f in formulas for n in f.reads if n.op == "call_function" and kind_of(n) == "reduction"}
        fewer = any(elements(n.all_input_nodes[0]) != elements(cat) for n in reduced)
        return not formulas or (fewer and not _only_loops_read(cat))

    def extern(self, node: fx.Node) -> None:
        copied = node.target in IN_ROWS
        taken = [self.copy if copied and is_strided(value) else self.realize for value in node.all_input_nodes]
        buffers = [b for take, value in zip(taken, node.all_input_nodes, strict=True) for b in take(value)]
        self.result.order.append(Extern(node, tuple(buffers)))
        self.result.needed |= set(buffers)

    def maybe_realize(self, node: fx.Node) -> None:
        """Inductor's reasons to keep in memory what several nodes use."""
        formula = self.value(node)
        reads, large = formula.loads, formula.cost > 30
        users = list(node.users)
        if len(users) > 1 and formula.ops:
            taken = any(u.op == "call_function" and kind_of(u) == "extern" for u in users)
            left = any(u.op == "output" for u in users)
            many = reads > inductor_config.realize_reads_threshold
            if (taken and reads > 1) or (left and reads > 0) or large or many:
                self.realize(node)
                return
        if formula.ops and reads > 1 and (large or reads > 8) and kind_of(node) not in ("view", "part"):
            self.realize(node)

    def realize(self, node: fx.Node) -> list[fx.Node]:
        """Puts the value behind `node` into memory, if it is not there; returns its buffer."""
        base = base_of(node)
        if (formula := self.formulas.pop(base, None)) is not None:
            written, reads = elements(base), paths.moved(formula.reads, paths.memory_order(base.meta["val"]))
            self.result.order.append(Loop(base, formula.nodes, reads, written, 1, True, written))
        return [base] if is_tensor(base) else []

    def copy(self, view: fx.Node) -> list[fx.Node]:
        """Writes the view in rows, once for each product that takes it; returns its buffer."""
        self.realize(view)
        if (made := self.copies.get(view)) is not None:
            made.written += elements(view)
            return [view]
        value, size = self.value(view), elements(view)
        self.copies[view] = Loop(view, (*value.nodes, view), value.reads, size, 1, True, size)
        self.result.order.append(self.copies[view])
        return [view]

    def value(self, node: fx.Node) -> Formula:
        """What a consumer of `node` reads now."""
        if node.op == "call_function" and (kind := kind_of(node)) in ("view", "part"):
            source = self.value(node.all_input_nodes[0])
            if kind == "view":
                return Formula(paths.moved(source.reads, paths.reordered(node)), source.ops)
            count, name = elements(node), paths.part_of(node)
            part = {
                b: {p if paths.repeated(b, p, node) else (*p, name): min(n, count) for p, n in r.items()}
                for b, r in source.reads.items()
            }
            whole = elements(node.all_input_nodes[0])  # of a small table both parts are as good as one
            return Formula(part, tuple((n, (*p, name) if elements(n) >= whole else p) for n, p in source.ops))
        if (formula := self.formulas.get(node)) is not None:
            return formula
        return Formula({node: {paths.whole(node): elements(node)}} if is_tensor(node) else {}, ())

    def inputs(self, nodes: list[fx.Node]) -> Formula:
        """Several values, read together."""
        values = [self.value(n) for n in nodes]
        reads: Reads = {}
        for v in values:
            for buffer, parts in v.reads.items():
                reads[buffer] = {**reads.get(buffer, {}), **parts}
        return Formula(reads, tuple(dict.fromkeys(op for v in values for op in v.ops)))

    def pointwise(self, node: fx.Node, kind: Kind) -> Formula:
        if kind in ("source", "random"):
            return Formula({}, ((node, ()),))
        got = self.inputs(node.all_input_nodes)
        if kind == "gather":
            table = self.value(node.all_input_nodes[0]).reads
            for buffer in table:
                got.reads[buffer] = {(node.name,): elements(node)}
        return Formula(got.reads, (*got.ops, (node, ())))

    def big_loop(self, node: fx.Node, kind: Kind) -> Loop:
        """A reduction, a scan or a scatter: always in memory."""
        if kind == "scatter":
            self.result.needed |= set(self.realize(node.all_input_nodes[0]))
            got, largest = self.inputs(node.all_input_nodes[1:]), max(node.all_input_nodes[1:], key=elements)
            reads, written = paths.moved(got.reads, paths.memory_order(largest.meta["val"])), elements(largest)
            return Loop(node, (*got.nodes, node), reads, written, 1, True, written)
        source = node.all_input_nodes[0]
        got, out, total = self.inputs(node.all_input_nodes), elements(node), elements(source)
        reads, nodes = paths.moved(got.reads, paths.memory_order(source.meta["val"])), (*got.nodes, node)
        if kind == "scan":
            return Loop(node, nodes, reads, total, 1, True, out)
        additive = "sum" in str(node.target) or "mean" in str(node.target)
        return Loop(node, nodes, reads, out, max(total // out, 1), paths.is_inner(node), out, additive)


BY_INDEX = frozenset({"loop", "gather", "reduction", "scan", "scatter", "source", "random"})
"""Kinds of operations that read a tensor by its indices, however it lies."""


def seen(node: fx.Node, *, through_attention: bool = False) -> bool:
    """Does anybody but loops and products see how the node, a view or a part of it lies? The graph may return it,
    `as_strided` reads by the place in memory, an operation of a user's may expect dense rows. `through_attention`:
    attention lays its results out as its operands lie, and does not see it if nobody sees these. Nor does what finishes
    the rows of a loss in the memory of their exponentials."""
    for user in node.users:
        kind = kind_of(user) if user.op == "call_function" else "output"
        if kind in ("view", "part") and user.target is not g.aten.as_strided.default:
            if seen(user, through_attention=through_attention):
                return True
        elif user.target in (LOSS_ROWS, LOSS_TARGETS):
            if any(map(seen, user.users)):
                return True
        elif through_attention and is_attention(user):
            if any(seen(result, through_attention=True) for result in user.users):
                return True
        elif kind not in BY_INDEX and user.target not in g.PRODUCTS:
            return True
    return False


def is_attention(node: fx.Node) -> bool:
    """Is it a kernel for attention, forward or backward, which has several results?"""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    fused = name.startswith(("aten::_scaled_dot_product", "coda::windowed_attention"))
    return fused and isinstance(node.meta["val"], tuple)
