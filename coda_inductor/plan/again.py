"""What the backward needs of the forward's tiles is made again, where an epilogue reads all that it is made of.

A normalised tensor that no product of the forward reads any more is still read by weight gradients. The epilogue of
the product that carries the gradient past the norm reads the same stream anyway, so that one more store there takes
the place of a tensor kept from the forward. Where there is no such epilogue, Inductor's own pass of the norm's
backward makes it beside what it makes anyway: its nodes stay as the user wrote them, and since nothing that the forward
returns needs them, the partitioner has them computed from the stream.
What products of the forward alone read, as silu(gate) * up, the forward stores, and does not keep: the epilogue that
makes gradients of gate and up reads both, and stores the product of them once more. Where there is no such epilogue, it
is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES, DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.draft import MAX_READ, SPARED, Conflict, Draft, Loaded, Stored
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.program import Program


class Demands(Protocol):
    """The part of a plan that is looked at, and asked, here: see plan.Plan."""

    program: Program
    drafts: dict[Term, Draft]
    kept: set[fx.Node]

    def unique(self) -> list[Draft]: ...

    def need(self, node: fx.Node, by: fx.Node | None = None) -> None: ...

    def leave(self, node: fx.Node, by: fx.Node) -> None: ...

    def put_off(self) -> set[fx.Node]: ...

    def fusible(self, node: fx.Node) -> bool: ...

    def order(self, node: fx.Node) -> tuple[int, ...]: ...

    def store(self, draft: Draft, stored: Stored) -> None: ...

    def loads(self, draft: Draft, *values: Term) -> dict[Term, Loaded]: ...


@dataclass(slots=True)
class Again:
    """The tiles of the forward that operations of the backward ask for, until an epilogue makes them or none can.
    `later` are those that Inductor recomputes in the backward."""

    waiting: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    made: dict[fx.Node, Draft] = field(default_factory=dict)
    later: set[fx.Node] = field(default_factory=set)
    in_memory: set[fx.Node] = field(default_factory=set)
    """What may be in memory while the backward runs: something else than products of the forward reads it."""
    _given_up: set[fx.Node] = field(default_factory=set)

    def asked(self, plan: Demands, node: fx.Node, by: fx.Node | None) -> bool:
        """Is the node put off until all epilogues are known, because only `by` of the backward asks for it so far?"""
        if by is None or not g.is_backward(by):
            self.later.discard(node)
            if by is None or by.target not in g.PRODUCTS:
                self.in_memory.add(node)
            return False
        if node in plan.program.limits.never or node in self._given_up:
            return False
        if not _of_the_forward(plan, node):
            return False
        self.waiting.setdefault(node, []).append(by)
        return True

    @property
    def unsettled(self) -> bool:
        """Does a node wait that is neither made nor given up?"""
        return bool(self.waiting.keys() - self.made.keys())

    def settle(self, plan: Demands) -> None:
        """Finds an epilogue for each waiting node. If none is found for any, what loops read is left to them, and the
        rest is asked for after all, some of it of the backward."""
        for node in self.waiting.keys() & plan.kept - self.made.keys():
            if node in self.in_memory:
                self._give_up(node)
        left = [node for node in self.waiting if node not in self.made]
        hosts = _hosts(plan) if left else []
        for node in left:
            if (host := self._host(plan, node, hosts)) is not None:
                self.made[node] = host.draft
                t, dtype = plan.program.new[plan.program.lifted.term[node]], node.meta["val"].dtype
                host.draft.supplies[node] = Stored(t, DTYPE_NAMES[dtype], again=True)
                plan.store(host.draft, host.draft.supplies[node])
                host.known.update(plan.loads(host.draft, t))
        if self.made.keys() & set(left):
            return  # what their epilogues read now may be enough for others
        put_off = plan.put_off() if left else set()
        for node in left:
            readers = self._give_up(node)
            if node in plan.kept:
                continue  # the forward has it
            if all(map(plan.fusible, readers)):
                plan.leave(node, readers[0])
                continue
            plan.need(node)
            if node in put_off:
                self.later.add(node)

    def _give_up(self, node: fx.Node) -> list[fx.Node]:
        """Returns what had asked for it."""
        self._given_up.add(node)
        return self.waiting.pop(node)

    def _host(self, plan: Demands, node: fx.Node, hosts: list[Host]) -> Host | None:
        t, beyond = plan.program.new[plan.program.lifted.term[node]], _downstream(self.waiting[node])
        if beyond & _products(plan):
            return None
        fits = list[tuple[int, Host]]()
        for host in hosts:
            space = host.draft.space
            if t.deps & space.mask or plan.order(node) != space.order:
                continue
            try:
                plan.program.check(t, space)
            except Unsupported:
                continue
            if plan.program.bases(t, space) <= host.known and not beyond & host.draft.supplies.keys():
                loads = plan.loads(host.draft, t).keys()
                if node not in plan.kept or loads <= host.known:  # another vector would be another kernel
                    fits.append((len(host.known | loads), host))
        size, best = min(fits, key=lambda f: f[0], default=(0, None))
        if best is None:
            return None
        combined = bool(plan.program.limits.crowded & best.draft.space.mask)
        return best if size <= MAX_READ + (0 if combined else SPARED) else None

    def read(self, reader: fx.Node, node: fx.Node) -> fx.Node | Stored:
        """What an operation that stays reads as `node`."""
        under = g.root(node, g.is_view)
        again = under in self.made and reader in self.waiting[under]
        return self.made[under].supplies[under] if again else node

    def check(self, plan: Demands) -> None:
        """Raises Conflict if a node that is made again would feed the epilogue that makes it."""
        products = _products(plan) if self.made else set()
        for node, draft in self.made.items():
            if _downstream(self.waiting[node]) & (products | draft.supplies.keys()):
                raise Conflict(Limits(never=frozenset({node})))


@dataclass(frozen=True, slots=True)
class Host:
    """An epilogue of the backward, and the tiles and vectors that it reads."""

    draft: Draft
    known: set[Term]


def _hosts(plan: Demands) -> list[Host]:
    drafts = [d for d in plan.unique() if plan.program.in_backward(d.space)]
    return [Host(d, set(plan.loads(d, *d.values))) for d in drafts]


def _of_the_forward(plan: Demands, node: fx.Node) -> bool:
    """Is the node a tile that the forward makes of products and streams by pointwise operations?"""
    term = plan.program.lifted.term.get(node)
    if term is None or g.is_view(node) or slices.lane(node) is not None or g.tensor(node).dtype not in DTYPES.values():  # type: ignore[union-attr]
        return False
    t = plan.program.new[term]
    try:
        space = plan.program.space(t)
    except Unsupported:
        return False
    if plan.program.in_backward(space) or space.extent(t) != "tile":
        return False
    return t not in plan.program.bases(t, space)


def _products(plan: Demands) -> set[fx.Node]:
    return {plan.program.product(acc).node for d in plan.unique() for acc in d.space.accs}


def _downstream(readers: list[fx.Node]) -> set[fx.Node]:
    """What is computed from what the readers compute."""
    return g.reached((user for node in readers for user in node.users), lambda node: node.users)
