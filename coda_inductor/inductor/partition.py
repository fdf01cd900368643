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
from coda_inductor.patterns.effects import base
from coda_inductor.patterns.graph import tensor

Halves = tuple[fx.GraphModule, fx.GraphModule]


class Partition(CustomPartitionerFn):
    """Runs the partitioner that the user put there, or Inductor's, and has inputs kept in the place of their views."""

    def __init__(self, first: JointPass, chained: CustomPartitionerFn | None = None) -> None:
        self.first = first
        self.chained = chained

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        partition: Callable[..., Halves] = self.chained or inductor.min_cut_rematerialization_partition  # type: ignore[attr-defined]
        forward, backward = partition(gm, joint_inputs, **kwargs)
        self.first.rewrote = True  # what fails from here on is ours
        if keep_inputs(forward.graph, backward.graph, kwargs["num_fwd_outputs"]):
            forward.recompile()
            backward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        """As of the first pass: its sources are ours too. None: not to be cached."""
        uuids = [self.first.uuid(), *([self.chained.uuid()] if self.chained else [])]
        return None if None in uuids else tuple(uuids)


def keep_inputs(forward: fx.Graph, backward: fx.Graph, results: int) -> int:
    """Puts inputs in the place of views of them that the forward keeps, in place; returns how many. `results`: how many
    outputs of the forward are not kept for the backward."""
    output, count = forward.output_node(), 0
    kept = list(output.args[0])  # type: ignore[arg-type]
    named = {n.name: n for n in backward.find_nodes(op="placeholder")}
    for i, view in enumerate(kept[results:], results):
        source = base(view) if isinstance(view, fx.Node) else None
        if source is None or source is view or source.op != "placeholder":
            continue
        if made_again(backward, named, view, source):
            kept[i], count = source, count + 1
    if count:
        output.args = (tuple(kept), *output.args[1:])
        forward.eliminate_dead_code()
    return count


def made_again(backward: fx.Graph, named: dict[str, fx.Node], view: fx.Node, source: fx.Node) -> bool:
    """Has the backward make a view of an input where it would read one. False if it lacks a size."""
    chain, todo = dict[fx.Node, None](), [view]
    while todo:
        node = todo.pop()
        if node is source or (tensor(node) is None and node.name in named):
            continue
        if node.op != "call_function":
            return False
        chain[node] = None
        todo += node.all_input_nodes
    place = named[view.name]
    read = list(place.users)
    made = {source: place}
    with backward.inserting_before(next(n for n in backward.nodes if n.op != "placeholder")):
        for node in sorted(chain):
            made[node] = backward.node_copy(node, lambda n: made.get(n) or named[n.name])
    for user in read:
        user.replace_input_with(place, made[view])
    place.meta["val"] = source.meta["val"]
    return True
