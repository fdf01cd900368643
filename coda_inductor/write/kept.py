"""What the backward reads of memory that the forward overwrites, or whoever called it, is a copy, made before.

A running mean may be subtracted in the forward and updated there. The derivation may let the backward make such a
difference again, and so may Inductor's partitioner: then both would read the new mean. The backward reads a copy that
the forward keeps, and operations of the forward that read such memory are not computed again.

A copy that the user made is one that Inductor may drop (torch 2.13: `m.clone()` is m, whatever overwrites m before the
clone is read). Where it is read behind the write it becomes one of ours.

Whoever called the forward may overwrite a result before the backward runs: `logits = model(x); logits.div_(0.7)`.
Eager does not mind if its backward does not read the logits. The derivation may have ours read them, for a statistic.

Inductor computes a pointwise operation where its result is read. `y = gelu(m); scale_(m); sigmoid(y)` in training reads
the scaled m if `scale_` is an operation of the user's (torch 2.13): it runs before what was read of m is computed. Such
values are computed and stored before.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.ops.custom import KEPT, REGION, STORED
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.patterns.effects import (
    Memory,
    base,
    behind_tangents,
    mutating,
    overwritten_after,
    reinplaced,
    viewed,
    written,
)
from coda_inductor.patterns.graph import (
    MATRIX_PRODUCTS,
    aten,
    is_backward,
    is_cast,
    is_pointwise,
    is_view,
    reached,
    sizes,
    tensor,
)
from coda_inductor.patterns.layout import dense
from coda_inductor.write.aliases import returned
from coda_inductor.write.writing import Writing, stored

RECOMPUTE = "recompute"
"""The key of a node's meta under which partitioners look for a CheckpointPolicy."""
OURS = (ELEMENTWISE, KEPT, REGION)
"""Operations that no partitioner computes again."""
COPIES = (aten.clone.default, aten.copy.default)
"""Operations that Inductor drops where their result lies as what they copy."""
AT_ONCE = frozenset({*OURS, STORED, *MATRIX_PRODUCTS})
"""Operations whose result Inductor computes where they stand."""


def expiring(graph: fx.Graph) -> frozenset[str]:
    """The memory that a graph overwrites; of a joint graph, that is overwritten before its backward."""
    writers, inputs = [n for n in graph.nodes if written(n)], overwritten_after(graph)
    if not writers and not inputs:
        return frozenset()
    backward, memory = behind_tangents(graph), Memory(graph)
    early = [n for n in writers if n not in backward and (not backward or in_forward(n))]
    return frozenset(map(memory.of, inputs)).union(*map(memory.overwritten, early))


def in_forward(writer: fx.Node) -> bool:
    """May the partitioner put the writer into the forward?"""
    return "backward" not in str(writer.meta.get("partitioner_tag"))


def lent(graph: fx.Graph) -> frozenset[int]:
    """The results of a joint graph's forward that its backward may not read once they are returned, by their places:
    those that it does not read as it stands, nor what has more bytes and is made of them number by number, as logits in
    float32: in its place Inductor keeps the result."""
    memory, backward = Memory(graph), {n for n in graph.nodes if is_backward(n)} | behind_tangents(graph)
    read = {base(a) for n in backward if memory.read(n) for a in n.all_input_nodes} - backward
    names, found = set(map(memory.of, read)), set[int]()
    for i, node in enumerate(returned(graph) if backward else ()):
        mine = isinstance(node, fx.Node) and node not in backward and made_here(node)
        if mine and memory.of(node) not in names:
            widened = any(wider(a, node) for a in read & number_by_number(node))
            found |= set() if widened else {i}
    return frozenset(found)


def made_here(node: fx.Node) -> bool:
    """Is it a tensor that the graph makes, and no view of an input?"""
    return tensor(node) is not None and original(node).op == "call_function"


def number_by_number(node: fx.Node) -> set[fx.Node]:
    """What is made of each number of a value, or of what it is a view of, through nothing as narrow, which Inductor
    could keep as well."""

    def onward(n: fx.Node) -> Iterable[fx.Node]:
        return (u for u in n.users if is_view(u) or ((is_pointwise(u) or is_cast(u)) and wider(u, node)))

    return reached([base(node)], onward)


def wider(a: fx.Node, b: fx.Node) -> bool:
    """Has a's value more bytes for each number?"""
    mine, other = tensor(a), tensor(b)
    return mine is not None and other is not None and mine.element_size() > other.element_size()


def memory_of(graph: fx.Graph, results: frozenset[int]) -> frozenset[str]:
    """Where the results at these places lie."""
    memory, values = Memory(graph), returned(graph)
    return frozenset(memory.of(values[i]) for i in results)


def lying_in(graph: fx.Graph, names: frozenset[str]) -> frozenset[str]:
    """The names of the nodes that lie in this memory."""
    memory = Memory(graph)
    return frozenset(n.name for n in graph.nodes if memory.of(n) in names)


def keep(graph: fx.Graph, results: frozenset[int] = frozenset()) -> None:
    """Adds the copies to a graph, in place. `results`: those that are lent. One that is a copy itself stays one, or the
    backward might read what it copies where the caller writes."""
    for copy in [base(returned(graph)[i]) for i in sorted(results)]:
        if is_plain_copy(copy):
            make_kept(copy)
    names = expiring(graph) | memory_of(graph, results)
    copies = dict[fx.Node, fx.Node]()
    early, readers = sides(graph, names)
    for node in early:
        if node.target not in OURS:
            node.meta.setdefault(RECOMPUTE, CheckpointPolicy.MUST_SAVE)
    memory = Memory(graph)
    for node in readers:
        for source in [a for a in node.all_input_nodes if places(memory, a) & names]:
            if source not in copies:
                copies[source] = copy_of(graph, source)
            node.replace_input_with(source, copies[source])
    part_copies(graph)


def part_copies(graph: fx.Graph) -> None:
    """Gives copies of one value that are returned memory of their own, in place: Inductor takes each for the value. So
    it does with a copy of what an operation of a user's has overwritten, which then is the input itself."""
    first = dict[fx.Node, fx.Node]()
    for result in returned(graph):
        copy = base(result) if isinstance(result, fx.Node) else None
        if copy is None or not is_plain_copy(copy):
            continue
        if first.setdefault(original(copy), copy) is not copy or reinplaced(original(copy)):
            make_kept(copy)


def make_kept(copy: fx.Node) -> None:
    """Has a plain copy memory of its own whatever Inductor drops, unless it lays out anew what it copies."""
    source = copied(copy)
    if not copy.kwargs or dense(source):
        copy.target, copy.args, copy.kwargs = KEPT, (source,), {}


def sides(graph: fx.Graph, names: frozenset[str]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Who reads this memory: what the forward of a joint graph runs, which may not run again; and what would read it
    too late."""
    if not names:
        return [], []
    memory, backward = Memory(graph), behind_tangents(graph)

    def reads(node: fx.Node) -> bool:
        if not memory.read(node) or written(node) or node.target is KEPT:
            return False
        if not node.users and not node.is_impure():
            return False  # nobody runs it
        return any(places(memory, a) & names for a in node.all_input_nodes)

    readers = [n for n in graph.nodes if reads(n)]
    forward = needed(graph, backward) if backward else {*graph.nodes}
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = min((place[n] for n in graph.nodes if memory.overwritten(n) & names), default=len(place))

    def drops(node: fx.Node) -> bool:
        return is_plain_copy(node) and any(
            u.op != "output" and (u not in forward or place[u] > first) for u in users(node)
        )

    too_late = [n for n in readers if n not in forward or drops(n)]
    return [n for n in readers if n not in too_late] if backward else [], too_late


def users(node: fx.Node) -> list[fx.Node]:
    """Who reads or returns the node, as it is or viewed."""
    found = list[fx.Node]()
    for user in node.users:
        found += users(user) if viewed(user) is node and not written(user) else [user]
    return found


def original(node: fx.Node) -> fx.Node:
    """What is read in place of the node once Inductor has dropped copies."""
    while is_plain_copy(source := base(node)):
        node = copied(source)
    return source


def is_plain_copy(node: fx.Node) -> bool:
    """Is it a copy of one dtype, shape and device? Inductor drops no other."""
    if node.target not in COPIES:
        return False
    mine, theirs = node.meta["val"], copied(node).meta["val"]
    return bool(mine.dtype == theirs.dtype and mine.device == theirs.device) and sizes(copied(node)) == sizes(node)


def copied(copy: fx.Node) -> fx.Node:
    """What a copy copies: of `copy(to, source)` the second."""
    source = copy.args[1 if copy.target is aten.copy.default else 0]
    assert isinstance(source, fx.Node)
    return source


def places(memory: Memory, node: fx.Node) -> set[str]:
    """The memory in which a value may lie once Inductor has dropped copies and let operations of users overwrite."""
    return set(map(memory.of, reached([original(node)], lambda n: map(original, reinplaced(n)))))


def needed(graph: fx.Graph, backward: set[fx.Node]) -> set[fx.Node]:
    """What the forward's results, writes and asserts are made of. What only the backward reads may run there."""
    todo: list[fx.Node] = [n for n in graph.output_node().all_input_nodes if n not in backward]
    calls = (n for n in graph.nodes if n.op == "call_function" and n not in backward)
    todo += [n for n in calls if n.is_impure() and in_forward(n)]
    return reached(todo, lambda node: node.all_input_nodes)


def copy_of(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """A copy that the forward makes and keeps, where the source stands."""
    inputs = graph.find_nodes(op="placeholder")
    anchor = (inputs[-1] if source in inputs else source).next
    new = Writing(graph, anchor).call(source, KEPT, source)
    new.meta |= {"partitioner_tag": "is_forward", RECOMPUTE: CheckpointPolicy.MUST_SAVE}
    return new


def store(graph: fx.Graph) -> None:
    """Stores what was read of memory that an operation of the user's overwrites before the value is used. In place."""
    for node in unstored(graph):
        stored(graph, node)


def unstored(graph: fx.Graph) -> list[fx.Node]:
    """The values that Inductor might compute too late."""
    if not any(map(mutating, graph.nodes)):
        return []
    memory, backward = Memory(graph), behind_tangents(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    waiting, found = dict[fx.Node, frozenset[str]](), dict[fx.Node, None]()
    for node in graph.nodes:
        names = frozenset(memory.of(n) for n in mutating(node))
        for value in [v for v, read in waiting.items() if read & names] if names else ():
            late = any(u.op == "output" or place[u] > place[node] for u in users(value))
            if late and tensor(value) is not None and (value in backward) == (node in backward):
                found[value] = None
        if viewed(node) is None and node.op == "call_function" and node.target not in AT_ONCE:
            behind = (waiting.get(base(n), frozenset[str]()) for n in node.all_input_nodes)
            waiting[node] = memory.read(node).union(*behind)
    return [*found]


def stale(graph: fx.Graph) -> list[fx.Node]:
    """The operations that might read memory after it is overwritten: behind the forward, or because they wait."""
    early, readers = sides(graph, expiring(graph))
    return readers + [n for n in early if n.target not in OURS and RECOMPUTE not in n.meta] + unstored(graph)
