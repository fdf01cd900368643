"""Products of complex numbers as products of their two parts.

Rotary embeddings are often written as complex products: view_as_complex(q) * table, view_as_real. Inductor leaves
complex operations to eager kernels, each a pass over memory of its own, with a cast before and after. As real numbers
[.., 2] all of it stands in the epilogue of the product, or is one loop of Inductor's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.writing import Writing

Pair = tuple[fx.Node, fx.Node]
COMPUTED = frozenset({aten.mul.Tensor, aten._conj.default})


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
