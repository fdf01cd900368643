"""Where the backward reads a view of an input, the forward keeps the input itself, and the backward makes the view.

Between forward and backward the user may write to an input: `y = linear(rms_norm(z)); z.mul_(2); y.backward()`. Eager
raises then, because autograd counts the writes to each tensor that it saves. AOTAutograd saves an input by the same
count. A view that a compiled forward returns has a count of its own (torch 2.11 to 2.15): the backward would read what
was written, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.patterns.effects import base, written
from coda_inductor.patterns.graph import tensor

Halves = tuple[fx.GraphModule, fx.GraphModule]
UNSEEN = "saved_tensor_with_no_vc_check"
"""The key of a node's meta by which AOTAutograd keeps it without looking who writes to it."""


class Partition(CustomPartitionerFn):
    """Runs the partitioner that the user put there, or Inductor's, and has inputs kept in the place of their views."""

    def __init__(self, first: JointPass, chained: CustomPartitionerFn | None = None) -> None:
        self.first = first
        self.chained = chained

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        partition: Callable[..., Halves] = self.chained or inductor.min_cut_rematerialization_partition  # type: ignore[attr-defined]
        forward, backward = partition(gm, joint_inputs, **kwargs)
        before, self.first.rewrote = self.first.rewrote, True  # if it fails here, that is ours
        count = keep_inputs(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
        if count:
            forward.recompile()
            backward.recompile()
        self.first.rewrote = before or count > 0
        return forward, backward

    def uuid(self) -> Any:
        """As of the first pass: its sources are ours too. None: not to be cached."""
        uuids = [self.first.uuid(), *([self.chained.uuid()] if self.chained else [])]
        return None if None in uuids else tuple(uuids)


def keep_inputs(forward: fx.Graph, backward: fx.Graph, results: int) -> int:
    """Puts inputs in the place of views of them that the forward keeps, in place; returns of how many views. `results`:
    how many outputs of the forward are not kept for the backward. An input is kept once."""
    output, done = forward.output_node(), 0
    outputs, read = list(output.args[0]), {n.name: n for n in backward.find_nodes(op="placeholder")}  # type: ignore[arg-type]
    told = output.meta.get("desc")
    views = [x for x in outputs[results:] if isinstance(x, fx.Node) and x.name in read]
    for view in views:
        source = base(view)
        nodes = made_of(view, source, read)
        if source.op != "placeholder" or not nodes:
            continue
        place, at = read.pop(view.name), outputs.index(view, results)
        if source.name in read:
            del outputs[at]
            told = told and [*told[:at], *told[at + 1 :]]
        else:
            outputs[at] = source
            with backward.inserting_before(place):
                read[source.name] = backward.placeholder(source.name)
            read[source.name].meta |= source.meta
        place.replace_all_uses_with(written_again(backward, nodes, read))
        backward.erase_node(place)
        done += 1
    output.args = (tuple(outputs), *output.args[1:])
    if told:
        output.meta["desc"] = told
    forward.eliminate_dead_code()
    return done


def made_of(view: fx.Node, source: fx.Node, read: dict[str, fx.Node]) -> list[fx.Node]:
    """The nodes, in order, that make a view of its source, and of sizes that the backward reads. [] if it lacks a
    size, if one of the nodes writes, or if an autograd.Function keeps one without asking autograd to look."""
    found, todo = set[fx.Node](), [view]
    while todo:
        node = todo.pop()
        if node.meta.get(UNSEEN):
            return []
        if node is source or (tensor(node) is None and node.name in read):
            continue
        if node.op != "call_function" or written(node):
            return []
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found)


def written_again(backward: fx.Graph, nodes: list[fx.Node], read: dict[str, fx.Node]) -> fx.Node:
    """Writes the nodes, of what the backward reads; returns the last."""
    made = dict[fx.Node, fx.Node]()
    with backward.inserting_before(next(n for n in backward.nodes if n.op != "placeholder")):
        for node in nodes:
            made[node] = backward.node_copy(node, lambda n: made.get(n) or read[n.name])
    return made[nodes[-1]]
