"""What stands beside attention, as Sweeps: found in the graph when all Regions are in it, and written in its place.

Together go the sums and gradients that read what one operation of the backward left, attention's, if nothing else
reads that as loops: then a Sweep reads what Inductor's kernels would read between them, and once. Where it loses its
tuning (tuning/sweeps.py) the graph stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from torch import fx

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import parse
from coda_inductor.core.sweep import Sweep
from coda_inductor.ops.custom import REGION, STORED, SWEEP
from coda_inductor.passes.tables import REPEATED
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import behind_tangents
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.lift import Lifted
from coda_inductor.plan.layout import in_order, long_axes
from coda_inductor.plan.sweeps import Swept, Wanted, read_through, swept
from coda_inductor.rewrite.sources import leaves
from coda_inductor.schedule.hints import name_of
from coda_inductor.schedule.kinds import base_of, elements, kind_of, owner
from coda_inductor.schedule.memory import taken_whole
from coda_inductor.write.aliases import part
from coda_inductor.write.order import sort
from coda_inductor.write.strides import Strides
from coda_inductor.write.verifying import Before
from coda_inductor.write.writing import Writing

Slower = Callable[[list[Swept]], dict[int, str]]
"""Which of these Sweeps, by index, lose against Inductor's kernels, and why."""
NONE_SLOWER: Slower = lambda found: {}  # noqa: E731
IN_MEMORY = ("extern", "output", "reduction", "scan", "scatter")


@dataclass(frozen=True, slots=True)
class Kept:
    """One Sweep in the graph: the nodes whose work it does, what they were, the rows, and the user's line."""

    sweep: Sweep
    nodes: tuple[str, ...]
    what: str
    m: str
    source: str


def found(graph: fx.Graph, rounding: bool, legal: Callable[[Sweep], None]) -> tuple[list[Swept], dict[fx.Node, str]]:
    """Those of a joint graph's backward, and what is none, with the reason. `legal` raises Unsupported for a Sweep that
    the target cannot run."""
    backward = behind_tangents(graph)
    if not backward:
        return [], {}
    lifted = read_through(graph, matrices(graph), rounding=rounding)
    good, refused = list[Swept](), dict[fx.Node, str]()
    for group in groups(lifted, candidates(lifted, backward), backward):
        try:
            require_alone(lifted, group, backward)
            largest = max(elements(n) for w in group for n in late_tiles(lifted, w, backward))
            made = swept(lifted, group, in_memory(largest // REPEATED))
            require_one_time(made)
            legal(made.sweep)
            good.append(made)
        except Unsupported as why:
            refused |= {w.node: why.said for w in group}
    ready = in_turn(good)
    refused |= {n: "two sweeps would wait for each other" for made in good if made not in ready for n in made.outputs}
    return ready, refused


def in_turn(found: list[Swept]) -> list[Swept]:
    """The Sweeps in an order that runs, without those that wait for each other."""
    waits = [[j for j, other in enumerate(found) if j != i and waits_for(made, other)] for i, made in enumerate(found)]
    done = list[int]()
    while some := [i for i in range(len(found)) if i not in done and {*waits[i]} <= {*done}]:
        done += some
    return [found[i] for i in done]


def matrices(graph: fx.Graph) -> list[fx.Node]:
    """The tensors [tokens, features] that Regions take and give."""
    found = dict[fx.Node, None]()
    for node in graph.nodes:
        if node.target is REGION:
            region = parse(str(node.args[1]))
            inputs = node.args[0]
            found |= {inputs[p.a]: None for p in region.products if p.a_layout == "mk"}
            found |= {out: None for out in node.users if out.args[1] < len(region.stores)}
    return [*found]


def in_memory(small: int) -> Callable[[fx.Node], bool]:
    """Does a tensor lie in memory whatever Inductor does? One of no more elements is put there for the Sweep."""

    def lies_there(node: fx.Node) -> bool:
        made_there = node.op != "call_function" or node.target is STORED or kind_of(node) in IN_MEMORY
        return made_there or elements(node) <= small

    return lies_there


def candidates(lifted: Lifted, backward: Collection[fx.Node]) -> Iterator[Wanted]:
    """The backward's sums over features or tokens, and what its loops make for others that are none."""
    tokens = {frozenset(long_axes(lifted, p.rows)) for p in lifted.products.values()}
    tokens |= {
        frozenset(long_axes(lifted, lifted.reading.roots(n)[0])) for n in matrices(lifted.graph) if n in lifted.term
    }
    for node in lifted.graph.nodes:
        if node not in backward or node.op != "call_function":
            continue
        reduction = g.reduction(node)
        if reduction is not None and reduction.name == "sum" and reduction.source in lifted.term:
            dims = [frozenset(long_axes(lifted, d)) for d in lifted.reading.roots(reduction.source)]
            over = frozenset[int]().union(*(dims[d] for d in reduction.dims))
            rows = over if over in tokens else frozenset[int]().union(*dims) - over
            if rows in tokens and over:
                yield Wanted(node, lifted.term[reduction.source], rows, over)
        elif kind_of(node) == "loop" and node in lifted.term and not opaque(lifted, node) and taken_whole(node):
            axes = frozenset(i for d in lifted.reading.roots(node) for i in long_axes(lifted, d))
            if some := [rows for rows in tokens if rows < axes]:
                yield Wanted(node, lifted.term[node], max(some, key=len))


def opaque(lifted: Lifted, node: fx.Node) -> bool:
    """Is the node a tensor of which nothing is known? (A copy in another order is made of one.)"""
    term = lifted.term[node]
    return term.kind == "leaf" and lifted.node(term) is node


def late_tiles(lifted: Lifted, w: Wanted, backward: Collection[fx.Node]) -> list[fx.Node]:
    """The backward's tensors over all rows and columns that are read."""
    nodes = dict.fromkeys(lifted.node(leaf) for leaf in leaves(w.term))
    axes = {n: {i for d in lifted.reading.roots(n) for i in long_axes(lifted, d)} for n in nodes if n in backward}
    return [n for n, found in axes.items() if found > w.rows]


def groups(lifted: Lifted, found: Iterator[Wanted], backward: Collection[fx.Node]) -> list[list[Wanted]]:
    """What reads results of one operation, in the order of the graph; where there is a sum, and not alone."""
    together = list[tuple[set[fx.Node], list[Wanted]]]()
    for w in found:
        tiles = late_tiles(lifted, w, backward)
        if not tiles:
            continue
        ends = all(n.op == "placeholder" for n in tiles)  # gradients of outputs, which are all there at once
        owners, mine = {owner(n) for n in tiles} | ({lifted.graph.output_node()} if ends else set()), [w]
        apart = []
        for others, members in together:
            if owners & others:
                owners, mine = owners | others, [*members, *mine]
            else:
                apart.append((others, members))
        together = [*apart, (owners, mine)]
    made = [sorted(members, key=lambda w: lifted.place[w.node]) for _, members in together]
    return [m for m in made if len(m) > 1 and any(w.over is not None for w in m)]


def require_alone(lifted: Lifted, group: list[Wanted], backward: Collection[fx.Node]) -> None:
    """Raises Unsupported if other loops read the backward's tensors, too: Inductor might make one kernel of all."""
    wanted = {w.node for w in group}

    def strangers(node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if user in wanted or user.op != "call_function":
                continue
            kind = kind_of(user)
            if kind in ("reduction", "scan", "scatter", "gather") or (kind == "loop" and taken_whole(user)):
                yield user
            elif kind == "loop" or base_of(user) is not user:
                yield from strangers(user)

    for node in dict.fromkeys(n for w in group for n in late_tiles(lifted, w, backward)):
        if (other := next(strangers(node), None)) is not None:
            raise Unsupported(f"{other} reads {node}, too")


def require_one_time(made: Swept) -> None:
    """Raises Unsupported if an input waits for an output."""
    if (node := waits_for(made, made)) is not None:
        raise Unsupported(f"it would wait for its own {node}")


def waits_for(made: Swept, other: Swept) -> fx.Node | None:
    """An output of the other that an input of a Sweep is made of."""
    outputs, seen, todo = set(other.outputs), set[fx.Node](), list(made.inputs)
    while todo:
        node = todo.pop()
        if node in outputs:
            return node
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return None


def work(made: Swept) -> set[fx.Node]:
    """What runs in the graph between its inputs and its outputs, both apart."""

    def inner(node: fx.Node) -> list[fx.Node]:
        return [a for a in node.all_input_nodes if a not in made.inputs]

    return g.reached((a for node in made.outputs for a in inner(node)), inner)


def write(graph: fx.Graph, target: str, made: list[Swept], before: Before) -> tuple[Kept, ...]:
    """Puts the Sweeps in the place of the nodes that they supply. Raises Unsupported as `sort` does."""
    if not made:
        return ()
    writing, strides = Writing(graph, graph.output_node()), Strides(graph)
    lines = [g.source_line(each.outputs[0]) for each in made]
    place = {node: i for i, node in enumerate(graph.nodes)}
    works = [sorted({*work(each), *each.outputs}, key=place.__getitem__) for each in made]
    names = [{n.name: name_of(n) for n in nodes if not g.is_view(n)} for nodes in works]
    replaced = dict[fx.Node, fx.Node]()
    rows = [_write(writing, target, each, replaced) for each in made]
    part(graph, before.sharing, writing.call)
    sort(graph, before.effects)
    strides.restore(writing.call)
    sort(graph, before.effects)
    graph.lint()
    left = {n.name for n in graph.nodes}
    gone = [{name: what for name, what in each.items() if name not in left} for each in names]
    return tuple(
        Kept(each.sweep, tuple(mine), " ".join(dict.fromkeys(filter(None, mine.values()))), m, line)
        for each, mine, m, line in zip(made, gone, rows, lines, strict=True)
    )


def _write(writing: Writing, target: str, made: Swept, replaced: dict[fx.Node, fx.Node]) -> str:
    """One Sweep; its rows. What earlier ones supply is `replaced`."""
    like = made.outputs[0]
    read = enumerate(zip(made.inputs, made.sweep.inputs, strict=True))
    inputs = [as_read(writing, replaced.get(n, n), width, made.inner(i)) for i, (n, (_, width)) in read]
    node = writing.call(like, SWEEP, inputs, made.sweep.text, target)
    for i, (old, output) in enumerate(zip(made.outputs, made.sweep.outputs, strict=True)):
        value = g.tensor(old)
        assert value is not None
        new = writing.call(old, operator.getitem, node, i)
        if g.tensor(new).dtype != value.dtype:  # type: ignore[union-attr]
            new = writing.call(old, prims.convert_element_type.default, new, value.dtype)
        order = in_order(old) if output.extent == "tile" else [*range(value.dim())]
        new = writing.reshape(new, [value.shape[d] for d in order])
        if order != sorted(order):
            new = writing.call(old, aten.permute.default, new, [order.index(d) for d in range(len(order))])
        if g.sizes(new) != g.sizes(old):
            raise BrokenInvariant(f"{old} is {g.sizes(old)}, what a sweep supplies {g.sizes(new)}")
        replaced[old] = new
        old.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))
    return str(made.sweep.tokens(inputs[0].meta["val"].shape))


def as_read(writing: Writing, node: fx.Node, width: int, inner: int) -> fx.Node:
    """The node as the matrix, the heads or the vector over the rows that lie in memory."""
    order = in_order(node)
    if order != sorted(order):
        node = writing.call(node, aten.permute.default, node, order)
    if inner:
        return writing.view(node, [-1, g.tensor(node).shape[-2], inner])  # type: ignore[union-attr]
    sizes = [-1, width] if width else [-1]
    fits = len(g.sizes(node)) == len(sizes) and (not width or g.sizes(node)[1].static == width)
    return node if fits else writing.view(node, sizes)
