"""What Inductor's own patterns let share memory has memory of its own again.

`n + 0 * x` is a tensor of its own in eager. Inductor folds the zeros and returns n itself (torch 2.11 to 2.15): who
then writes to the result writes to n. So results are looked at before these patterns and behind them.

Behind them kernels also get names by which Inductor's cache finds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from coda_inductor.inductor import notes
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.inductor.tracing import passes, uuids
from coda_inductor.write.aliases import part, sharing
from coda_inductor.write.kept import part_copies
from coda_inductor.write.writing import Writing


class PostPass(CustomGraphPass):
    """Runs behind Inductor's patterns on the graph that `first` left them. `chained`: passes that the user put there,
    run last."""

    def __init__(self, first: JointPass, chained: Any = None) -> None:
        self.first = first
        self.chained = passes(chained)

    def __call__(self, graph: fx.Graph) -> None:
        module, left = notes.owner(graph), self.first.left
        if left is not None and left[0] is module and sharing(graph) != left[1]:
            self.first.rewrote = True
            try:
                part(graph, left[1], Writing(graph, graph.output_node()).call)
                part_copies(graph)
            except Exception as error:
                self.first.failed(error, graph, "a graph")
        shorten_names(graph)
        for theirs in self.chained:
            theirs(graph)

    def uuid(self) -> Any:
        """As of the pass before: its sources are ours too. None: not to be cached."""
        first, theirs = self.first.uuid(), uuids(self.chained)
        return None if first is None or theirs is None else (first, theirs)


def shorten_names(graph: fx.Graph) -> None:
    """Takes views and constants out of the names that Inductor gives its kernels.

    A name lists the operators that a kernel fuses, as `triton_red_fused_add_expand_full_mean_mul_view`. Triton keeps
    150 characters of it as the file's name. Torch (2.11 to 2.15) looks for the whole name, finds nothing, and leaves
    such a kernel out of its cache: it is compiled again in the next process.
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and computes_nothing(node.target):
            node.meta.pop("original_aten", None)


def computes_nothing(operator: torch._ops.OpOverload) -> bool:
    """Whether it returns its argument's memory, or reads no tensor."""
    views = any(value.alias_info and not value.alias_info.is_write for value in operator._schema.returns)
    return views or not any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
