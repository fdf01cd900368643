"""A model of Inductor's schedule: the memory-bound kernels that stock Inductor would launch, and the bytes they move.

Loops (lowering.py) are fused (fusion.py). Every tensor counts once per kernel that touches it, what a broadcast repeats
counts once, a gather counts what it uses, views are free. Products, attention and other extern operations are not
memory-bound kernels; elementwise passes of ours are. bench/inductor_bytes.py asks Inductor itself.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from coda_inductor.core.errors import forget_frames
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.patterns.effects import base
from coda_inductor.patterns.graph import copied, is_joint, is_tangent
from coda_inductor.schedule.fusion import Fusion, Group, parts_read
from coda_inductor.schedule.kinds import Extern, elements, is_tensor, itemsize, lower, owner
from coda_inductor.schedule.paths import Path

log = logging.getLogger("coda_inductor.tuning")

PARTS = descriptors.SubclassGetAttrAOTOutput, descriptors.SubclassSizeAOTOutput, descriptors.SubclassStrideAOTOutput
LATE = (
    descriptors.GradAOTOutput,
    descriptors.BackwardTokenAOTOutput,
    descriptors.PhiloxUpdatedBackwardOffsetAOTOutput,
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A memory-bound kernel: the operations it performs, the bytes it reads and writes of each tensor."""

    nodes: tuple[fx.Node, ...]
    reads: dict[fx.Node, int]
    writes: dict[fx.Node, int]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


Halves = tuple[fx.Graph, fx.Graph]


def kernels(graph: fx.Graph, halves: Halves | None = None) -> list[Kernel]:
    """The kernels of a functional, decomposed ATen graph, forward then backward.

    A joint graph is partitioned as Inductor would; `halves` may hold what `partition` returned for it.
    """
    halves = halves or partition(graph)
    if halves is None:
        return _kernels(graph)
    names = {n.name: n for n in graph.nodes}

    def original(half: fx.Graph, kernel: Kernel) -> Kernel:
        nodes = tuple(names[n.name] for n in kernel.nodes if n.name in names)
        reads, writes = ({names.get(n.name, n): b for n, b in d.items()} for d in (kernel.reads, kernel.writes))
        return Kernel(nodes, reads, writes)

    return [original(half, k) for half in halves for k in _kernels(half)]


def partition(graph: fx.Graph, owner: torch.nn.Module | None = None) -> Halves | None:
    """Forward and backward of a joint graph, by Inductor's own min-cut; None if the graph is not joint. `owner`: whose
    attributes it reads, if it has no module of its own."""
    if not is_joint(graph):
        return None
    described = graph.output_node().meta.get("desc")  # of every output; None for an input that gets no gradient
    if described is None:
        return None  # of a graph in a graph
    forward = 1 + max(i for i, d in enumerate(described) if d is not None and not of_backward(d))
    owner_module = graph.owning_module or owner or torch.nn.Module()
    # Other ranks may not ask. Nothing runs what is made here: its code, a quarter of the time, is not written.
    with _use_lazy_graph_module(True), functorch_config.patch(_sync_decision_cross_ranks=False):
        twin = _make_graph_module(owner_module, copied(graph))
        first, second = min_cut_rematerialization_partition(twin, [], compiler="inductor", num_fwd_outputs=forward)
    return first.graph, second.graph


def of_backward(described: Any) -> bool:
    """Is the output one of the backward's? A tensor subclass's are described by what it is taken from."""
    while isinstance(described, PARTS):
        described = described.base
    return isinstance(described, LATE)


def partitioned(graph: fx.Graph, owner: torch.nn.Module | None = None) -> Halves | None:
    """What `partition` returns, as a hint: None also where torch's own partitioner fails on the graph as it is by
    now."""
    try:
        return partition(graph, owner)
    except Exception as error:
        log.info("what the forward saves is not known: %s: %s", type(error).__name__, error)
        forget_frames(error)
        return None


def saved_names(graph: fx.Graph) -> frozenset[str]:
    """The nodes of a joint graph that the forward keeps for the backward; none if it is not joint, or not known."""
    halves = partitioned(graph)
    return frozenset(saved(halves)) if halves else frozenset()


def saved(halves: Halves) -> dict[str, int]:
    """What the forward keeps for the backward, inputs and parameters apart: bytes by name."""
    forward, backward = halves
    inputs = {n.name for n in forward.nodes if n.op == "placeholder"}
    kept = [n for n in backward.nodes if n.op == "placeholder" and not is_tangent(n) and is_tensor(n)]
    return {n.name: elements(n) * itemsize(n) for n in kept if n.name not in inputs}


def kept_bytes(halves: Halves | None) -> int:
    """The memory that the forward leaves allocated for the backward: each tensor once, whatever views of it are kept;
    none of it inputs' and parameters'."""
    if halves is None:
        return 0
    nodes, kept = {n.name: n for n in halves[0].nodes}, saved(halves)
    bases = {base(nodes[name]) for name in kept if name in nodes}  # a random state, which is a few bytes, is no node
    return sum(elements(n) * itemsize(n) for n in bases if n.op != "placeholder")


def _kernels(graph: fx.Graph) -> list[Kernel]:
    lowered = lower(graph)
    groups = Fusion(lowered).run()
    readers: dict[fx.Node, set[Group]] = defaultdict(set)
    for group in groups:
        for buffer in group.reads():
            readers[buffer].add(group)
    made = [k for g in groups if (k := _kernel(g, lowered.needed, readers)).bytes]
    return made + [_pass(op) for op in lowered.order if isinstance(op, Extern) and op.out.target is ELEMENTWISE]


def _pass(op: Extern) -> Kernel:
    """An elementwise pass of ours, which reads and writes all that it is given."""
    reads = {n: elements(n) * itemsize(n) for n in op.reads}
    return Kernel((op.out,), reads, {n: elements(n) * itemsize(n) for n in op.out.users})


def _kernel(group: Group, needed: set[fx.Node], readers: dict[fx.Node, set[Group]]) -> Kernel:
    """Adds up what the loops of one group touch."""
    made = {loop.out: loop for loop in group.loops}
    parts: dict[fx.Node, dict[Path, int]] = defaultdict(dict)
    for (buffer, path), n in parts_read(group.loops).items():
        if owner(buffer) not in made:
            parts[buffer][path] = n
    reads = {buffer: _touched(paths, elements(buffer)) * itemsize(buffer) for buffer, paths in parts.items()}
    outputs = [n for loop in group.loops for n in (loop.out, *loop.out.users) if owner(n) is loop.out]
    writes = {
        n: (made[n].written if n in made else elements(n)) * itemsize(n)
        for n in dict.fromkeys(outputs)
        if n in needed or readers.get(n, set()) - {group}
    }
    return Kernel(tuple(dict.fromkeys(n for loop in group.loops for n in loop.nodes)), reads, writes)


def _touched(paths: dict[Path, int], size: int) -> int:
    """Elements read of one buffer: a slice of a slice that is read anyway adds nothing."""
    outer = [n for p, n in paths.items() if not any(p[:i] in paths for i in range(len(p)))]
    return min(sum(outer), size)
