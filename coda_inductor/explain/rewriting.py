"""A rewriting that is watched: what was derived, as it stood before it was written into the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.records import Report
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Loaded
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits


@dataclass(slots=True)
class Derived:
    """A plan as it stood before it was written into the graph. `loads[i]`: what epilogue i reads, and from where."""

    plan: Plan
    builts: list[Built]
    loads: list[dict[Term, Loaded]]

    @classmethod
    def of(cls, plan: Plan, builts: list[Built]) -> Derived:
        loads = []
        for b in builts:
            read = plan.loads(b.draft, *b.draft.values).items()
            loads.append({x: source for x, source in read if x is not b.added})
        return cls(plan, builts, loads)

    def products(self) -> list[list[fx.Node]]:
        """The nodes of each Region's products, as they were in the graph."""
        return [[self.plan.program.product(acc).node for acc in b.products] for b in self.builts]


@dataclass(slots=True)
class Rewriting:
    """`rewrite_for` of one graph, and what is left of it: the last plan, the report, or why there is none."""

    derived: Derived | None = None
    report: Report | None = None
    refused: str = ""

    def __call__(self, graph: fx.Graph, settings: Any) -> Report:
        """Rewrites the graph. Raises Unsupported as `rewrite_for` does."""

        def decide(plan: Plan, builts: list[Built]) -> Limits:
            self.derived = Derived.of(plan, builts)
            return Limits()

        try:
            self.report = rewrite_for(graph, settings, decide)
        except Unsupported as why:
            self.refused = str(why)
            raise
        return self.report
