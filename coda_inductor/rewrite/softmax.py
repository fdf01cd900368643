"""Log-softmax written shorter: the scores less one number for each row, which an epilogue can take beside the scores.

    m = amax(x);  s = x - m;  y = s - log(sum(exp(s)))        as ATen is decomposed
    l = logsumexp(x);  y = x - l                               as the derivation reads it

A pair of the maximum and a sum relative to it is kept up while a row's scores pass by (arXiv:1805.02867), so l is as
safe as the maximum makes it. (Of an infinite score y is NaN as before; of the others of its row it is -inf, not NaN.)
Only where the scores are a product's as it is stored, or computed of that alone, as capped ones are: the epilogue
rounds the product as it is stored, and computes with that, or y would be of rounded scores and l of unrounded ones.
What no Region takes is written as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import chain
from coda_inductor.rewrite.derive import Firing
from coda_inductor.rewrite.laws import SOFTMAX
from coda_inductor.rewrite.program import Program


@dataclass(frozen=True, slots=True)
class Normaliser:
    """One logsumexp in the graph, and the nodes in whose place it stands: nobody reads them while it does."""

    node: fx.Node
    maximum: fx.Node
    shifted: fx.Node
    log: fx.Node

    def firing(self, program: Program) -> Firing:
        """What the law did."""
        term, terms = program.lifted.term, program.lifted.terms
        maximum, log, whole = (program.new[term[n]] for n in (self.maximum, self.log, self.node))
        return Firing(SOFTMAX.name, terms.add(maximum, log), whole, -1)

    def restore(self) -> None:
        """Writes the graph as it was."""
        for reader in list(self.node.users):
            reader.args = (self.shifted, self.log)
        self.node.graph.erase_node(self.node)


def shorten(graph: fx.Graph) -> list[Normaliser]:
    """Rewrites every log-softmax of the graph in place, and leaves the nodes that are read no more."""
    return [found for log in list(graph.nodes) if (found := _shorten(log)) is not None]


def _shorten(log: fx.Node) -> Normaliser | None:
    steps = _chain(log, aten.log.default, aten.sum.dim_IntList, aten.exp.default, aten.sub.Tensor)
    if steps is None:
        return None
    total, exp, shifted = steps
    scores, maximum = shifted.args
    if not isinstance(maximum, fx.Node) or maximum.target is not aten.amax.default or shifted.kwargs:
        return None
    if not isinstance(scores, fx.Node) or chain(scores)[0].target not in g.MATRIX_PRODUCTS:
        return None
    of, over = g.reduction(maximum), g.reduction(total)
    if of is None or over is None or of.source is not scores or not of.keepdim or of.dims != over.dims:
        return None
    readers = [user for user in log.users if user.target is aten.sub.Tensor and user.args == (shifted, log)]
    alone = len(readers) == len(log.users) and not any(user.kwargs for user in readers)
    if not alone or not over.keepdim or set(shifted.users) != {exp, *readers} or set(maximum.users) != {shifted}:
        return None
    with log.graph.inserting_after(log):
        node = log.graph.call_function(aten.logsumexp.default, (scores, list(of.dims), True))
    node.meta = dict(log.meta)
    for reader in readers:
        reader.args = (scores, node)
    return Normaliser(node, maximum, shifted, log)


def _chain(node: fx.Node, *targets: object) -> list[fx.Node] | None:
    """The first arguments of `node`, of that, and so on, if their operations are these and each has one reader but the
    last."""
    if node.target is not targets[0]:
        return None
    found = list[fx.Node]()
    for target in targets[1:]:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.target is not target:
            return None
        if target is not targets[-1] and len(source.users) != 1:
            return None
        found.append(node := source)
    return found


def written_out(graph: fx.Graph) -> fx.Graph:
    """The graph with every logsumexp as ATen is decomposed, in place."""
    for node in list(graph.nodes):
        if node.target is not aten.logsumexp.default:
            continue
        scores, *over = node.args

        def call(target: Any, *args: Any) -> fx.Node:
            made = graph.call_function(target, args)
            made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
            return made

        with graph.inserting_before(node):
            maximum = call(aten.amax.default, scores, *over)
            shifted = call(aten.sub.Tensor, scores, maximum)
            total = call(aten.sum.dim_IntList, call(aten.exp.default, shifted), *over)
            whole = call(aten.add.Tensor, maximum, call(aten.log.default, total))
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
    return graph
