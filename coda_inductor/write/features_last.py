"""What a patch embedding hands on lies by token, as all layers behind it read it.

    x = convolution(images).flatten(2).transpose(1, 2) + positions

A convolution writes [samples, features, places]: the places of a feature side by side. A sum lies as what it reads
does. So would x, and every sum of the residual stream behind it; each norm would read across memory, and each product
a copy. Here the first sum reads a copy that has the features last. Inductor makes it within the sum. Where cuDNN
writes the features last, it is no copy at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import strides
from coda_inductor.patterns.sizes import ONE
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.writing import Writing

CONVOLUTION = aten.convolution.default


def put_features_last(graph: fx.Graph) -> None:
    """Has what is made of convolutions, and normalised over its features, read them from a copy that lies so."""
    found = [(view, readers) for view in turned(graph) if (readers := [*normalised(view)])]
    if not found:
        return
    layouts = OutputStrides(graph)
    fixed = layouts.fixed()
    for view, readers in found:
        if not fixed.isdisjoint(readers):
            continue
        copy = Writing(graph, view.next).call(view, aten.clone.default, view, memory_format=torch.contiguous_format)
        for reader in readers:
            reader.replace_input_with(view, copy)
    layouts.restore(Writing(graph, graph.output_node()).call)


def turned(graph: fx.Graph) -> Iterable[fx.Node]:
    """Views of what convolutions make, whose last dimension are the features, which lie apart; in the graph's order."""
    convolutions = graph.find_nodes(op="call_function", target=CONVOLUTION)
    features = {g.sizes(n)[1] for n in convolutions}
    made = g.reached(convolutions, lambda n: (u for u in n.users if g.is_view(u) or g.is_pointwise(u)))
    views = (n for n in graph.nodes if n in made and g.is_view(n) and not features.isdisjoint(g.sizes(n)[-1:]))
    return (n for n in views if strides(n.meta["val"])[-1] not in (None, ONE))


def normalised(view: fx.Node) -> Iterable[fx.Node]:
    """Its readers that compute element by element, or over the features, and are normalised: behind them these are
    summed, or they read what is made of such a sum."""
    readers = [n for n in view.users if g.is_pointwise(n) or sums_features(n)]
    summed = g.reached((n for n in readers if any(map(sums_features, g.reached([n], elementwise)))), elementwise)
    return (n for n in readers if n in summed)


def elementwise(node: fx.Node) -> Iterable[fx.Node]:
    """What is made of each element of a node, or of the sum over its features."""
    return (u for u in node.users if g.is_pointwise(u) or sums_features(u))


def sums_features(node: fx.Node) -> bool:
    """Is it a sum or a mean over the last dimension, of a tensor, or several of them?"""
    items = node.users if node.target is aten.var_mean.correction else (node,)
    found = [g.reduction(n) for n in items]
    return any(r is not None and r.dims == (len(g.sizes(r.source)) - 1,) for r in found)
