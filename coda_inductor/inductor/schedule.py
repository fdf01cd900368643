"""A model of Inductor's schedule: the memory-bound kernels that stock Inductor would launch, and the bytes they move.

Loops (lowering.py) are fused greedily, the pair that shares most bytes first, under Inductor's rules: equal iteration
spaces, or a reduction with pointwise work over its rows; no cycle; not too far apart. Every tensor counts once per
kernel that touches it, what a broadcast repeats counts once, a gather counts what it uses, views are free. Products,
attention and other extern operations are not memory-bound kernels. bench/inductor_bytes.py asks Inductor itself.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition

from coda_inductor.core.errors import forget_frames
from coda_inductor.inductor.lowering import HEAVY, Extern, Loop, Lowered, elements, is_tensor, lower, owner
from coda_inductor.inductor.paths import Path, name_of
from coda_inductor.patterns.graph import copied, is_tangent

log = logging.getLogger("coda_inductor.contest")

PARTS = descriptors.SubclassGetAttrAOTOutput, descriptors.SubclassSizeAOTOutput, descriptors.SubclassStrideAOTOutput
LATE = (
    descriptors.GradAOTOutput,
    descriptors.BackwardTokenAOTOutput,
    descriptors.PhiloxUpdatedBackwardOffsetAOTOutput,
)
FAR = 64
"""Inductor does not fuse kernels that are further apart than this."""


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


def partition(graph: fx.Graph) -> Halves | None:
    """Forward and backward of a joint graph, by Inductor's own min-cut; None if the graph is not joint."""
    if not any(map(is_tangent, graph.nodes)):
        return None
    described = graph.output_node().meta.get("desc")  # of every output; None for an input that gets no gradient
    if described is None:
        return None  # of a graph in a graph
    forward = 1 + max(i for i, d in enumerate(described) if d is not None and not of_backward(d))
    owner_module = graph.owning_module or torch.nn.Module()
    twin = fx.GraphModule(owner_module, copied(graph))
    with functorch_config.patch(_sync_decision_cross_ranks=False):  # other ranks may not ask
        first, second = min_cut_rematerialization_partition(twin, [], compiler="inductor", num_fwd_outputs=forward)
    return first.graph, second.graph


def of_backward(described: Any) -> bool:
    """Is the output one of the backward's? A tensor subclass's are described by what it is taken from."""
    while isinstance(described, PARTS):
        described = described.base
    return isinstance(described, LATE)


def saved_names(graph: fx.Graph) -> frozenset[str]:
    """The nodes of a joint graph that the forward keeps for the backward; none if it is not joint. Contests take it as
    a hint: where torch's own partitioner fails on the graph as it is by now, they do without."""
    try:
        halves = partition(graph)
    except Exception as error:
        log.info("what the forward saves is not known: %s: %s", type(error).__name__, error)
        forget_frames(error)
        return frozenset()
    return frozenset(saved(halves)) if halves else frozenset()


def saved(halves: Halves) -> dict[str, int]:
    """What the forward keeps for the backward, inputs and parameters apart: bytes by name."""
    forward, backward = halves
    inputs = {n.name for n in forward.nodes if n.op == "placeholder"}
    kept = [n for n in backward.nodes if n.op == "placeholder" and not is_tangent(n) and is_tensor(n)]
    return {n.name: elements(n) * itemsize(n) for n in kept if n.name not in inputs}


def _kernels(graph: fx.Graph) -> list[Kernel]:
    lowered = lower(graph)
    groups = _Fusion(lowered).run()
    readers: dict[fx.Node, set[_Group]] = defaultdict(set)
    for group in groups:
        for buffer in group.reads():
            readers[buffer].add(group)
    return [k for g in groups if (k := _kernel(g, lowered.needed, readers)).bytes]


@dataclass(eq=False, slots=True)
class _Group:
    """Loops that share a kernel. `first`, `last`: positions in the graph; the space is the reduction's, if any."""

    loops: list[Loop]
    first: int
    last: int
    numel: int
    rnumel: int
    inner: bool

    def reads(self) -> set[fx.Node]:
        return {buffer for loop in self.loops for buffer in loop.reads}

    def sums(self, inner: bool) -> list[Loop]:
        """Its reductions over what lies together in memory, or over the rest."""
        return [loop for loop in self.loops if loop.rnumel > 1 and loop.inner == inner]

    @property
    def mixed(self) -> bool:
        """Does it reduce over rows and over columns?"""
        return all(map(self.sums, (True, False)))


class _Fusion:
    """Greedy fusion in rounds, as Inductor's Scheduler.fuse_nodes: best scored pairs first, until nothing changes."""

    def __init__(self, lowered: Lowered) -> None:
        self.unit: dict[fx.Node, _Group | Extern] = {}
        self.position: dict[Extern, int] = {}
        self.groups: list[_Group] = []
        for i, op in enumerate(lowered.order):
            if isinstance(op, Extern):
                self.unit[op.out], self.position[op] = op, i
            else:
                group = _Group([op], i, i, op.numel, op.rnumel, op.inner)
                self.unit[op.out] = group
                self.groups.append(group)

    def run(self) -> list[_Group]:
        for _ in range(10):
            fused = 0
            for _, a, b in sorted(self.candidates(), key=_rank):
                a, b = self.current(a), self.current(b)
                if a is not b and self.score(a, b) > 0 and not self.cycle(a, b):
                    self.fuse(a, b)
                    fused += 1
            if not fused:
                break
        return self.groups

    def current(self, group: _Group) -> _Group:
        """The group that the first loop of `group` belongs to by now."""
        found = self.unit[group.loops[0].out]
        assert isinstance(found, _Group)
        return found

    def candidates(self) -> list[tuple[int, _Group, _Group]]:
        """Pairs that touch a common buffer and are near each other."""
        touching: dict[fx.Node, list[_Group]] = defaultdict(list)
        for group in self.groups:
            for buffer in group.reads() | {loop.out for loop in group.loops}:
                touching[owner(buffer)].append(group)
        pairs = {
            (a, b)
            for groups in touching.values()
            for i, a in enumerate(groups)
            for b in groups[i + 1 : i + 1 + FAR]
            if a is not b and b.first - a.last <= FAR
        }
        return [(score, a, b) for a, b in pairs if (score := self.score(a, b)) > 0]

    def score(self, a: _Group, b: _Group) -> int:
        """Bytes that one kernel instead of two would not move again; 0 if the two cannot be one kernel."""
        if not _same_space(a, b) or not _joins(a, b):
            return 0
        made = {loop.out: group for group in (a, b) for loop in group.loops}
        of_a, of_b = _parts(a.loops), _parts(b.loops)
        for parts, group in ((of_a, a), (of_b, b)):
            if any(path and made.get(owner(buffer), group) is not group for buffer, path in parts):
                return 0
        shared = of_a.keys() & of_b.keys()
        shared |= {key for key in of_a.keys() | of_b.keys() if key not in shared and owner(key[0]) in made}
        return sum({**of_a, **of_b}[key] * itemsize(key[0]) for key in shared)

    def cycle(self, a: _Group, b: _Group) -> bool:
        """Would something outside have to run both after and before the fused kernel?"""
        return self.leads(a, b) or self.leads(b, a)

    def leads(self, source: _Group, target: _Group) -> bool:
        """Is there a way from `source` to `target` through something else?"""
        stack = [u for u in self.before(target) if u is not source]
        seen = set(stack)
        while stack:
            for unit in self.before(stack.pop()):
                if unit is source:
                    return True
                last = unit.last if isinstance(unit, _Group) else self.position[unit]
                if unit not in seen and last >= source.first:
                    seen.add(unit)
                    stack.append(unit)
        return False

    def before(self, unit: _Group | Extern) -> set[_Group | Extern]:
        """The units whose buffers `unit` reads."""
        reads = unit.reads() if isinstance(unit, _Group) else unit.reads
        return {u for buffer in reads if (u := self.unit.get(owner(buffer))) is not None and u is not unit}

    def fuse(self, a: _Group, b: _Group) -> None:
        space = max((a, b), key=lambda group: (group.rnumel > 1, group.inner, group.rnumel))  # of both orders the rows'
        fused = _Group(
            a.loops + b.loops, min(a.first, b.first), max(a.last, b.last), space.numel, space.rnumel, space.inner
        )
        for loop in fused.loops:
            self.unit[loop.out] = fused
        self.groups = [g for g in self.groups if g is not b]
        self.groups[self.groups.index(a)] = fused


def _rank(candidate: tuple[int, _Group, _Group]) -> tuple[int, ...]:
    """Reductions with each other and pointwise work with its like, most bytes first, then the nearest, as Inductor's
    score_fusion; then the order of the graph."""
    score, a, b = candidate
    return (a.rnumel > 1) != (b.rnumel > 1), -score, max(abs(a.first - b.last), abs(b.first - a.last)), a.first, b.first


def _parts(loops: list[Loop]) -> dict[tuple[fx.Node, Path], int]:
    """Every part of a buffer that loops read, with its number of elements."""
    return {(buffer, path): n for loop in loops for buffer, paths in loop.reads.items() for path, n in paths.items()}


def _joins(a: _Group, b: _Group) -> bool:
    """May the two be one, if that reduces over rows and over columns? Its sums over columns read nothing that it makes,
    nothing there reads them, and rows are read as they lie, not put together of parts. What joins such a kernel comes
    after it, and a sum that does reads a whole tensor that a sum of the same order there reads."""
    columns = a.sums(inner=False) + b.sums(inner=False)
    if not columns or not (a.sums(inner=True) or b.sums(inner=True)):
        return True
    others = [loop for loop in a.loops + b.loops if loop not in columns]
    for made, read in ((others, columns), (columns, others)):
        if {loop.out for loop in made} & {owner(buffer) for loop in read for buffer in loop.reads}:
            return False
    if any(name_of(node) in HEAVY for loop in others for node in loop.nodes):
        return False
    if not (a.mixed or b.mixed):
        return True
    first, second = sorted((a, b), key=lambda group: group.first)
    if not first.mixed:
        return False
    for inner in (True, False):
        there, more = _parts(first.sums(inner)), _parts(second.sums(inner))
        shared = sum(n for part, n in more.items() if part in there)
        if more and shared < first.numel * first.rnumel:
            return False
    return True


def _same_space(a: _Group, b: _Group) -> bool:
    """Can the two share loops? Two reductions, a reduction and pointwise work, or pointwise work of one size."""
    if a.rnumel == 1 and b.rnumel == 1:
        return a.numel == b.numel
    if a.rnumel > 1 and b.rnumel > 1:
        return (a.numel, a.rnumel, a.inner) == (b.numel, b.rnumel, b.inner) or _mixed_order(a, b)
    pointwise, reduction = (a, b) if a.rnumel == 1 else (b, a)
    return pointwise.numel == reduction.numel or (
        pointwise.numel == reduction.numel * reduction.rnumel and reduction.inner
    )


def _mixed_order(a: _Group, b: _Group) -> bool:
    """Sums over the rows beside a reduction along them, as triton.mix_order_reduction allows."""
    rows, columns = (a, b) if a.inner else (b, a)
    return (
        getattr(inductor_config.triton, "mix_order_reduction", False)
        and rows.inner
        and not columns.inner
        and (rows.numel, rows.rnumel) == (columns.rnumel, columns.numel)
        and rows.numel >= max(4096, 2 * rows.rnumel)
        and rows.numel * rows.rnumel >= 5 << 20
        and rows.rnumel <= 16384
        and all(loop.additive for loop in columns.loops if loop.rnumel > 1)
    )


def _kernel(group: _Group, needed: set[fx.Node], readers: dict[fx.Node, set[_Group]]) -> Kernel:
    """Adds up what the loops of one group touch."""
    made = {loop.out: loop for loop in group.loops}
    parts: dict[fx.Node, dict[Path, int]] = defaultdict(dict)
    for (buffer, path), n in _parts(group.loops).items():
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


def itemsize(node: fx.Node) -> int:
    """Bytes of one element of the tensor (of the first tensor) that `node` computes."""
    val = node.meta["val"]
    first = next(v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor))
    return first.dtype.itemsize
