"""What tuning has found out about a plan: all that its groups are made of but the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.tuning import around
from coda_inductor.tuning.group import Group, Rest, computed
from coda_inductor.tuning.loops import loops_of


@dataclass(slots=True)
class Known:
    """Of a plan's groups, by mask: their keys, the loops that take their sums, those that follow; and of the plan,
    the vectors of parameters that the forward's epilogues read, and the rest of its graph."""

    plan: Plan
    keys: dict[int, str] = field(default_factory=dict)
    loops: dict[int, tuple[list[fx.Node], set[fx.Node]]] = field(default_factory=dict)
    after: dict[int, frozenset[fx.Node]] = field(default_factory=dict)
    vectors: frozenset[Term] | None = None
    rest: Rest | None = None

    def before(self, members: list[Built]) -> frozenset[Term]:
        """The vectors of parameters that epilogues of the forward read, for a group of the backward."""
        late = self.plan.program.in_backward
        if not all(late(b.draft.space) for b in members):
            return frozenset()
        if self.vectors is None:
            self.vectors = frozenset(c.term for b in self.plan.builts if not late(b.draft.space) for c in computed(b))
        return self.vectors

    def surround(self, group: Group, *, lawless: bool) -> None:
        """Gives a group its loops. (A law is also compared with a program of none that takes its sums; and what follows
        it reads products, with which Inductor fuses nothing: the norm is part of the group.)"""
        if len(group.builts) == 1 and lawless:
            if group.mask not in self.loops:
                self.loops[group.mask] = loops_of(self.plan, group)
            group.taken, group.loops = self.loops[group.mask]
        if self.rest is None:
            self.rest = around.rest(self.plan, self.plan.builts)
        group.rest = self.rest
        if lawless:
            if group.mask not in self.after:
                self.after[group.mask] = around.following(self.plan, group)
            group.after = self.after[group.mask]
