"""Regions that tuning times together, and the real tensors on which it does."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from coda_inductor.codegen import legality
from coda_inductor.codegen.target import Target
from coda_inductor.core.blocks import copied_in_rows, empty_rows
from coda_inductor.core.dtypes import DTYPES, EIGHT_BITS
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.passes import joined
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.sizes import hint
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Built, Source, Table, Weight
from coda_inductor.plan.draft import Stored
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.sources import statistics
from coda_inductor.rewrite.space import Computed
from coda_inductor.schedule.memory import Memory


@dataclass(frozen=True, slots=True)
class Rest:
    """Of a graph into which a plan's Regions are written: the nodes that they make, those that Regions of the forward
    read, what Inductor computes, and what of that the forward itself reads. (What only the backward reads may be made
    again there.)"""

    made: frozenset[fx.Node]
    early: frozenset[fx.Node]
    left: frozenset[fx.Node]
    forward: frozenset[fx.Node]


NOTHING = Rest(frozenset(), frozenset(), frozenset(), frozenset())


@dataclass(slots=True)
class Group:
    """Regions tied by laws, in running order, and the tensors of one measurement (by node, store or sum)."""

    builts: list[Built]
    device: torch.device
    tokens: int
    memory: Memory
    before: frozenset[Term] = frozenset()
    """Vectors of parameters that are there: a group of the backward finds those that the forward's epilogues read."""
    taken: Sequence[fx.Node] = ()
    """Tensors whose loops take the sums that the group needs, and that both sides make therefore (loops.py); of a
    single Region without a law."""
    loops: AbstractSet[fx.Node] = frozenset()
    """All that these loops compute."""
    rest: Rest = NOTHING
    """What else there is in the graph when all Regions of the plan are written into it."""
    after: AbstractSet[fx.Node] = frozenset()
    """The loops that read what the group makes, which both sides run (around.py)."""
    values: dict[object, Any] = field(default_factory=dict)
    mask: int = field(init=False)
    """The products of the group, as a bit set."""

    def __post_init__(self) -> None:
        self.mask = mask(self.builts)

    @property
    def digests(self) -> list[str]:
        """Of its Regions."""
        return [b.region.digest for b in self.builts]

    def computed(self, built: Built) -> list[Computed]:
        """What is computed for a Region beside it."""
        return [c for c in computed(built) if c.extent == "token" or c.term not in self.before]

    def value(self, node: fx.Node) -> Any:
        """A tensor for a node that the group reads: random at the root of its views. Sizes are the hints."""
        if node not in self.values:
            if g.is_view(node):
                args = fx.map_arg(node.args, self.value)
                self.values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
            else:
                self.values[node] = sample(node, self.device)
        return self.values[node]

    def like(self, node: fx.Node) -> Tensor:
        """An empty tensor of the node's sizes."""
        value = node.meta["val"]
        return torch.empty([hint(s) for s in value.shape], dtype=value.dtype, device=self.device)

    def inputs(self, built: Built) -> list[Tensor]:
        """The real tensors of a Region. Two weights that are drawn for it lie in the order of their products, as the
        kernels that are compiled ahead read them: another order takes other kernels."""
        sources = [built.inputs[p.b] for p in built.region.products]
        roots = [g.root(s.node, g.is_view) for s in sources if isinstance(s, Weight)]
        if len({*roots}) == 2 and not self.values.keys() & {*roots}:
            drawn = [sample(n, self.device) for n in roots]
            self.values |= zip(roots, sorted(drawn, key=Tensor.data_ptr) if same(drawn) else drawn, strict=True)
        return [self.input(built, i, s) for i, s in enumerate(built.inputs)]

    def draw(self, built: Built) -> None:
        """Draws what is computed for a Region beside it, where nothing computed it."""
        for c in self.computed(built):
            if c.extent == "token":
                self.values.setdefault(c, self.made(c))

    def input(self, built: Built, i: int, source: Source) -> Tensor:
        """The real tensor of one input of a Region."""
        r = built.region
        if isinstance(source, Weight):
            weight = self.weight(built, source)
            return copied_in_rows(weight) if source.ragged else weight
        if isinstance(source, Computed):
            if source not in self.values:
                self.values[source] = torch.randn(r.width, dtype=r.compute, device=self.device)
            return self.values[source]  # type: ignore[no-any-return]
        if isinstance(source, Table):
            if source not in self.values:
                sizes = self.tokens, 2 * source.half
                self.values[source] = torch.randn(sizes, dtype=source.dtype, device=self.device)
            return self.values[source]  # type: ignore[no-any-return]
        if isinstance(source, Stored) and source not in self.values:  # of a Region outside the group
            width = r.ks.get(i, r.n)
            like = torch.empty(0, device=self.device)
            self.values[source] = empty_rows(like, self.tokens, width, DTYPES[source.dtype]).normal_()
        t = self.value(source) if isinstance(source, fx.Node) else self.made(source)
        if i < r.matrices:
            return t.reshape(-1, r.ks[i])
        rows = r.operands[i - r.matrices].extent in ("tile", "sample")
        return t.reshape(-1, r.n) if rows else t.reshape(-1)

    def weight(self, built: Built, source: Weight) -> Tensor:
        """The real tensor of a weight, as the user's graph has it."""
        whole = self.value(source.node)
        dim = 0 if built.region.products[0].b_layout == "nk" else 1
        return whole if source.stop is None else whole.narrow(dim, source.start, source.stop - source.start)  # type: ignore[no-any-return]

    def made(self, source: object) -> Tensor:
        """A store or sum of the group; the sum of a Region outside it is sampled."""
        if source not in self.values:
            self.values[source] = torch.empty(self.tokens, dtype=torch.float32, device=self.device).uniform_(0.5, 1.5)
        return self.values[source]  # type: ignore[no-any-return]


def computed(built: Built) -> list[Computed]:
    """The inputs of a Region that are computed, each once."""
    return [s for s in dict.fromkeys(built.inputs) if isinstance(s, Computed)]


def same(values: Sequence[Tensor]) -> bool:
    """Are the tensors alike but for what is in them?"""
    return len({(t.shape, t.stride(), t.dtype) for t in values}) == 1


LONG = 1024  # columns: longer rows of what it computes Inductor pads to multiples of 128 bytes (torch 2.11 to 2.15)


def sample(node: fx.Node, device: torch.device) -> Any:
    """Random values for a node's tensor, its hint for a symbolic size. Vectors over tokens are positive, as sums of
    squares are."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return hint(value)
    shape, stride = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    out = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
    if node.op != "placeholder" and out.dim() > 1 and shape[-1] > LONG and out.is_contiguous():
        out = empty_rows(out, math.prod(shape[:-1]), shape[-1], value.dtype).unflatten(0, shape[:-1])
    if not value.dtype.is_floating_point:
        return out.zero_()
    if value.dtype in EIGHT_BITS:
        return out.copy_(torch.randn(shape, dtype=torch.bfloat16, device=device))
    if out.dim() > 1 and shape[-1] > 1:
        return out.normal_(std=shape[-1] ** -0.5 if g.is_weight(node) else 1.0)
    return out.uniform_(0.5, 1.5)


def groups(plan: Plan, builts: list[Built]) -> list[list[Built]]:
    """Regions that one cannot keep without the other, in running order: a store that no node equals ties its reader
    to its maker, and so does a sum to the product that was deferred for it. (A mean that only shifts what a later
    stream stores does not: without it there is another.) So does a piece of a joined
    operand to the Region that makes it: in the user's graph the loop of the copy made it."""
    makers = {key: i for i, b in enumerate(builts) for key in outputs(b)}
    deferred = {f.product for f in plan.firings}
    leader = list(range(len(builts)))

    def tie(i: int, j: int) -> None:
        first, second = sorted((leader[i], leader[j]))
        leader[:] = [first if x == second else x for x in leader]

    for i, b in enumerate(builts):
        waits = any(acc.bit in deferred for acc in b.draft.space.accs)
        for source in b.inputs:
            # A sum that is only read in another order of the rows ties as the sum does.
            key = source.term if isinstance(source, Computed) and source.term in makers else source
            if isinstance(key, Stored) or (waits and isinstance(key, Term)):
                maker = makers[key]
                late, early = (plan.program.in_backward(x.draft.space) for x in (b, builts[maker]))
                if late and not early:
                    continue  # without the one the other keeps, or reads, what the user's graph has
                tie(i, maker)
        for maker_of_a_part in joined.makers(plan, b, builts):
            tie(i, builts.index(maker_of_a_part))
    return [[b for b, x in zip(builts, leader, strict=True) if x == i] for i in dict.fromkeys(leader)]


def readers(every: Sequence[list[Built]]) -> list[set[int]]:
    """For each group, which of the others read sums of its epilogues."""
    makers = {s: i for i, members in enumerate(every) for b in members for s in b.draft.sums}
    found: list[set[int]] = [set() for _ in every]
    for i, members in enumerate(every):
        sources = (s for b in members for s in b.inputs)
        terms = {s if isinstance(s, Term) else s.term for s in sources if isinstance(s, Term | Computed)}
        for maker in {makers[s] for t in terms for s in statistics(t) if s in makers} - {i}:
            found[maker].add(i)
    return found


def tied(readers: Sequence[AbstractSet[int]], some: AbstractSet[int]) -> AbstractSet[int]:
    """Some groups, and all that read sums of one of them, or make sums for one: they are decided together."""
    found, before = some, None
    while found != before:
        before = found
        found = {i for i, others in enumerate(readers) if i in before or others & before}
        found |= {j for i in before for j in readers[i]}
    return found


def mask(builts: list[Built]) -> int:
    """Their products, as a bit set."""
    return functools.reduce(int.__or__, (b.mask for b in builts), 0)


def outputs(built: Built) -> list[object]:
    """The keys of a Region's outputs, in order."""
    return [*built.draft.stores, *built.draft.sums]


def sizes(plan: Plan, builts: Iterable[Built], target: Target) -> list[tuple[Region, int]]:
    """The Regions, each once, with the size class to measure in, if it is known."""
    found = dict[tuple[Region, int], None]()
    for b in builts:
        with contextlib.suppress(Unsupported):
            found[b.region, legality.size_class(b.region, tokens(plan, b), target)] = None
    return [*found]


def without_sizes(plan: Plan, builts: list[Built]) -> dict[int, str]:
    """The products, by bit, of groups that cannot be measured: how many rows they have is known only when the model
    runs."""
    lost = dict[int, str]()
    for members in groups(plan, builts):
        try:
            tokens(plan, members[0])
        except Unsupported as why:
            lost |= {acc.bit: why.said for b in members for acc in b.products}
    return lost


def tokens(plan: Plan, built: Built) -> int:
    """The rows of a Region, at the size to measure at. Raises Unsupported if that is not known."""
    product = plan.program.product(built.draft.space.accs[0]).node
    return hint(product.meta["val"].shape[0])
