"""Products of complex numbers as products of their two parts, and pairs of neighbours as one number of 32 bits.

Rotary embeddings are often written as complex products: view_as_complex(q) * table, view_as_real. Inductor leaves
complex operations to eager kernels, each a pass over memory of its own, with a cast before and after. As real numbers
[.., 2] all of it stands in the epilogue of the product, or is one loop of Inductor's.

Such a loop reads each pair of 16-bit numbers four times, every second number at a time, and chooses for each number
that it writes. Where no epilogue took it, it reads and writes a pair as one integer of 32 bits: the bits are the same.
(H200, the rotary embeddings of a step of TorchTitan's Llama-1B: 799 us for 1,170, bench/results/profile.jsonl.)
Loops that read the result, where it is stored for them, then read numbers of 16 bits, as in eager. Inductor's do not
round what they make themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from coda_inductor.core.dtypes import NARROW
from coda_inductor.passes.casts import PACKED, Cast
from coda_inductor.passes.tables import is_loop, readers
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import alike, dense, major_to_minor, strides
from coda_inductor.patterns.sizes import ONE
from coda_inductor.patterns.slices import lane, step
from coda_inductor.schedule.kinds import elements, kind_of
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.writing import Writing

Pair = tuple[fx.Node, fx.Node]
COMPUTED = frozenset({aten.mul.Tensor, aten._conj.default})
LARGE = 1 << 22
"""The elements of a tensor from which its pairs are packed. Each view of other bits is a call of its own, of some
microseconds on the host. Smaller tensors were not tried."""


def as_real(graph: fx.Graph) -> None:
    """Rewrites complex products of which only the real view is read, in place."""
    views = graph.find_nodes(op="call_function", target=aten.view_as_real.default)
    products = dict[fx.Node, list[fx.Node]]()
    for node in views:
        product = node.args[0]
        if product.target is not aten.mul.Tensor or not all(u.target is node.target for u in product.users):
            continue
        if all(isinstance(a, fx.Node) and _is_complex(a) for a in product.args):
            products.setdefault(product, []).append(node)
    if not products:
        return
    layouts = OutputStrides(graph)
    fixed = layouts.fixed()
    for product, found in products.items():
        if fixed.isdisjoint(found):
            writing = Writing(graph, product)
            pair = [writing.instead(product, aten.unsqueeze.default, p, -1) for p in _parts(writing, product, {})]
            real = writing.instead(product, aten.cat.default, pair, -1)
            for node in found:
                node.replace_all_uses_with(real)
    layouts.restore(Writing(graph, graph.output_node()).call)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))


def _is_complex(node: fx.Node) -> bool:
    """Is the node a complex tensor whose memory holds its two parts? One that is conjugated when it is read does not,
    unless the graph says so itself."""
    value = g.tensor(node)
    if value is None or value.dtype not in (torch.complex64, torch.complex128):
        return False
    return node.target is aten._conj.default or not value.is_conj()


def _parts(writing: Writing, node: fx.Node, done: dict[fx.Node, Pair]) -> Pair:
    """The real and the imaginary part of a complex node."""
    if node not in done:
        done[node] = _new(writing, node, done)
    return done[node]


def _new(writing: Writing, node: fx.Node, done: dict[fx.Node, Pair]) -> Pair:
    source = node.args[0] if node.args else None
    call, times = writing.instead, partial(writing.instead, node, aten.mul.Tensor)
    if node.target is aten.clone.default and isinstance(source, fx.Node) and source.target in COMPUTED:
        return _parts(writing, source, done)
    if node.target not in COMPUTED or not all(isinstance(a, fx.Node) and _is_complex(a) for a in node.args):
        viewed = node.target is aten.view_as_complex.default
        real = source if viewed else writing.call(node, aten.view_as_real.default, node)
        return call(node, aten.select.int, real, -1, 0), call(node, aten.select.int, real, -1, 1)
    (a, b), *rest = (_parts(writing, factor, done) for factor in node.args)  # type: ignore[arg-type]
    if not rest:
        return a, call(node, aten.neg.default, b)
    ((c, d),) = rest
    return (
        call(node, aten.sub.Tensor, times(a, c), times(b, d)),
        call(node, aten.add.Tensor, times(a, d), times(b, c)),
    )


def pack_pairs(graph: fx.Graph, target: str) -> tuple[Cast, ...]:
    """Lets loops that read and write pairs of 16-bit neighbours read and write each as one integer, in place."""
    found = []
    for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = _neighbours(cat, target)
        halves = _halves(parts)
        writing = Writing(graph, cat)
        if not halves or not writing.can_reshape(_flat(cat)):
            continue
        for base, nodes in halves.items():
            _unpack(graph, base, nodes)
        low, high = (_bits(writing, part) for part in parts)
        low = writing.call(cat, aten.bitwise_and.Scalar, low, 0xFFFF)
        high = writing.call(cat, aten.bitwise_left_shift.Tensor_Scalar, high, 16)
        both = writing.call(cat, aten.bitwise_or.Tensor, low, high)
        if not dense(both):  # it lies as what it is made of, the cat does not
            both = writing.call(cat, aten.clone.default, both, memory_format=torch.contiguous_format)
        packed = writing.call(cat, aten.view.dtype, both, cat.meta["val"].dtype)
        found.append(Cast.of(cat, PACKED, g.source_line(cat) or g.source_line(parts[0])))
        cat.replace_all_uses_with(writing.reshape(packed, list(cat.meta["val"].shape)))
        graph.erase_node(cat)
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    return tuple(found)


def _neighbours(cat: fx.Node, target: str) -> list[fx.Node]:
    """The two parts of 16 bits that a cat puts side by side, number by number, if that is stored, or worth storing for
    the loops that read it. Nothing, if it does something else."""
    value, parts = g.tensor(cat), list(cat.all_input_nodes)
    if value is None or value.dtype not in NARROW or cat.args[1:] not in ((-1,), (value.dim() - 1,)):
        return []
    pairs = value.dim() > 1 and isinstance(value.shape[-1], int) and value.shape[-1] == 2
    if cat.args[0] != parts or len(parts) != 2 or not pairs or g.sizes(cat)[-2] == ONE:
        return []
    if any(p.meta["val"].dtype != value.dtype or strides(p.meta["val"])[-2] != ONE for p in parts):
        return []
    stored = dense(cat) and (not any(map(is_loop, readers(cat))) or _is_read_by_several(cat))
    return parts if stored and (target == "reference" or elements(cat) >= LARGE) else []


def _is_read_by_several(cat: fx.Node) -> bool:
    """Do loops read it that cannot be one kernel, so that each would turn the pairs anew? That is where one goes over
    all rows before another has what it needs. (A key's gradient in FP8, rows and columns with scales, [16384, 512]:
    120 us, stored 41, H200.)"""
    along = g.reached([cat], lambda n: [u for u in n.users if g.is_view(u) or (is_loop(u) and u is not cat)])
    along = {n for n in along if elements(n) == elements(cat)}
    reduced = {u for n in along for u in n.users if u.op == "call_function" and kind_of(u) == "reduction"}
    ends = [n for n in along if n is not cat and is_loop(n) and not {*readers(n)} <= along | reduced]
    return any(map(_across, reduced)) and len(reduced) + len(ends) > 1


def _across(node: fx.Node) -> bool:
    """Does a reduction not go along rows as they lie, but over columns, or over all?"""
    value: torch.Tensor = node.all_input_nodes[0].meta["val"]
    told: Any = node.args[1] if len(node.args) > 1 else ()
    dims = {d % value.dim() for d in ([told] if isinstance(told, int) else told or ())}
    return dims != {*major_to_minor(value)[-len(dims) :]}


def _halves(parts: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What the loop of two parts reads every second number of, where both are read, with the nodes that do."""
    read = dict[fx.Node, dict[int, list[fx.Node]]]()
    for node in sorted(g.reached(parts, lambda n: n.all_input_nodes if is_loop(n) or g.is_view(n) else ())):
        if (part := lane(node)) is not None and _is_packed(node, *part):
            read.setdefault(part[0], {}).setdefault(part[3], []).append(node)
    return {base: [n for nodes in by.values() for n in nodes] for base, by in read.items() if len(by) == 2}


def _is_packed(node: fx.Node, base: fx.Node, dim: int, lanes: int, index: int) -> bool:
    """Is the node the first or the second of each pair of 16-bit neighbours in memory, at even places, as they are or
    widened? Of a graph's inputs that is not known, and what is put beside something else may be written there."""
    value = base.meta["val"]
    if (dim, lanes) != (value.dim() - 1, 2) or 2 not in (value.shape[-1], step(node)):
        return False
    root, order = g.root(base, _only_widens), major_to_minor(value)
    last = [dim, dim - 1] if value.shape[-1] == 2 else [dim]
    lies = (
        order[::-1][: len(last)] == last and dense(base, order) and Writing(base.graph, base).can_reshape(_flat(base))
    )
    if not lies or root.op != "call_function" or kind_of(root) not in ("extern", "output"):
        return False
    return root.meta["val"].dtype in NARROW and not any(user.target is aten.cat.default for user in readers(root))


def _only_widens(node: fx.Node) -> bool:
    """Is it a view, or a cast to float32 that lies as what it is of?"""
    if g.is_view(node):
        return node.target not in g.COPIES
    return node.op == "call_function" and g.widens(node) and alike(node, node.all_input_nodes[0])


def _flat(node: fx.Node) -> list[int | torch.SymInt]:
    """The sizes of a tensor of pairs, with one for both numbers of all pairs of a row."""
    shape = list(node.meta["val"].shape)
    return [*shape[:-2], shape[-2] * 2] if shape[-1] == 2 else shape


def _unpack(graph: fx.Graph, base: fx.Node, nodes: list[fx.Node]) -> None:
    """Reads the numbers of pairs out of integers."""
    order, wide = major_to_minor(base.meta["val"]), base.meta["val"].dtype
    writing = Writing(graph, min(nodes))
    base = _narrow(writing, base)
    lying = base if order == sorted(order) else writing.call(base, aten.permute.default, base, order)
    if base.meta["val"].shape[-1] == 2:
        order = order[:-1]
    whole = writing.call(base, aten.view.dtype, writing.reshape(lying, _flat(lying)), torch.int32)
    if order != sorted(order):
        whole = writing.call(base, aten.permute.default, whole, [order.index(d) for d in range(len(order))])
    for node in nodes:
        index = lane(node)[3]  # type: ignore[index]
        half = writing.call(node, aten.bitwise_right_shift.Tensor_Scalar, whole, 16) if index else whole
        half = writing.call(node, prims.convert_element_type.default, half, torch.int16)
        half = writing.call(node, aten.view.dtype, half, base.meta["val"].dtype)
        half = writing.reshape(half, [*node.meta["val"].shape])  # a chunk has one dimension more
        node.replace_all_uses_with(writing.instead(node, prims.convert_element_type.default, half, wide))


def _narrow(writing: Writing, node: fx.Node) -> fx.Node:
    """The node's numbers in 16 bits, viewed as it is."""
    if node.meta["val"].dtype in NARROW:
        return node
    source, *rest = node.args
    assert isinstance(source, fx.Node)
    if not g.is_view(node):
        return source
    return writing.call(node, node.target, _narrow(writing, source), *rest, **node.kwargs)


def _bits(writing: Writing, part: fx.Node) -> fx.Node:
    """The bits of a part of 16-bit numbers [.., 1], as 32-bit integers without that dimension."""
    flat = writing.reshape(part, list(part.meta["val"].shape[:-1]))
    bits = writing.call(part, aten.view.dtype, flat, torch.int16)
    return writing.call(part, prims.convert_element_type.default, bits, torch.int32)
