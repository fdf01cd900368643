"""What is put into memory behind the Regions, which Inductor would compute again for each of its readers.

The user's graph and the programs that tuning measures get the same.
"""

from __future__ import annotations

from torch import fx

from coda_inductor.core.dtypes import EIGHT_BITS, NARROW
from coda_inductor.core.settings import Settings
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes.switches import NAMES, TABLES, allowed
from coda_inductor.passes.tables import Table, is_loop, readers, store_tables
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import prims
from coda_inductor.schedule.kinds import elements
from coda_inductor.write.writing import stored

READERS = g.PRODUCTS | {ELEMENTWISE}


def put_into_memory(graph: fx.Graph, settings: Settings) -> tuple[Table, ...]:
    """8-bit tensors that several products read, what passes and products read beside others, and tables, in place; the
    tables, for a report."""
    store_shared(graph)
    store_sources(graph)
    return store_tables(graph) if allowed(TABLES, NAMES, settings) else ()


def store_shared(graph: fx.Graph) -> None:
    """Puts 8-bit tensors into memory that several products read, in place: Inductor would compute a view of a value
    again for each of them."""
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        if cast.args[1] in EIGHT_BITS and len(set(readers(cast))) > 1:
            stored(graph, cast)


def store_sources(graph: fx.Graph) -> None:
    """Puts into memory what passes and products read and Inductor computes, in place, where more reads it: it would
    compute that again for each reduction that stands before. (H100, a rotated gradient of 16384 x 2048, its amax and
    cast: one kernel of 112 us for two of 165 and 88.) And what is made of several tensors in 16 bits and widened for
    several loops: Inductor would store it in 32."""
    if not any((value := g.tensor(n)) is not None and value.dtype in EIGHT_BITS for n in graph.nodes):
        return
    found = {g.root(x, g.is_view) for n in graph.nodes if n.target in READERS for x in n.all_input_nodes}
    for node in list(graph.nodes):
        if not is_loop(node) or node.meta["val"].dtype not in NARROW:
            continue
        read = {n for n in readers(node) if n.op != "output"}
        apart = any(g.is_backward(n) != g.is_backward(node) for n in read)
        if not apart and (is_widened(node, read) or (node in found and len(read) > 1)):
            stored(graph, node)


def is_widened(node: fx.Node, read: set[fx.Node]) -> bool:
    """Is it made of several tensors of its size, and widened for several loops?"""
    several = sum(elements(a) >= elements(node) for a in node.all_input_nodes) > 1
    return several and len({r for n in read if g.widens(n) for r in readers(n)}) > 1
