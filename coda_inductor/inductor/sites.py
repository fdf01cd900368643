"""What a plan leaves for the report: each Region's place in the user's program, its laws, and what went into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from coda_inductor.inductor.records import Site
from coda_inductor.patterns import graph as g
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Refusal
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.laws import ROOT
from coda_inductor.rewrite.rotate_half import OF_HEADS
from coda_inductor.rewrite.sources import statistics
from coda_inductor.rewrite.space import Computed


def reason(made: Plan, refused: Refusal) -> str:
    """Why a node is refused: of heads that are not divided into halves, why they are not, where a limit says it."""
    if refused.reason not in OF_HEADS:
        return refused.reason
    hosts = made.program.new[made.program.lifted.term[refused.node]].hosts
    return made.program.limits.whole_heads.get(hosts.bit_length() - 1) or refused.reason


def fired(made: Plan) -> dict[object, set[str]]:
    """The laws that made each product (by bit) and each sum what it is. What a law only reads was there."""
    found: dict[object, set[str]] = {}
    lifted = max((t.id for t in made.program.lifted.term.values()), default=0)
    for f in made.firings:
        if f.product >= 0:
            found.setdefault(f.product, set()).add(f.law)
            continue
        if f.law == ROOT.name:
            continue  # which the Region that reads the square says itself
        sums = statistics(f.after)
        for s in [s for s in sums if s.id > lifted] or sums:  # the softmax law's one sum is lifted
            found.setdefault(s, set()).add(f.law)
    return found


def site(i: int, built: Built, nodes: dict[int, fx.Node], laws: dict[object, set[str]], lines: dict[str, str]) -> Site:
    """The place of the Region `r<i>`: `nodes` are products by bit, `laws` those of `fired`, `lines` the user's."""
    bits = [acc.bit for acc in built.draft.space.accs]
    value = g.tensor(nodes[bits[-1]])
    assert value is not None
    beside = [s for x in built.inputs if isinstance(x, Computed) for s in statistics(x.term)]
    products = (con.bit for con in built.products)
    mine = {law for what in (*products, *built.draft.sums, *beside) for law in laws.get(what, ())} | built.laws
    outputs = tuple(n.name for n in built.draft.supplies)
    return Site(
        f"r{i}", built.region, str(value.shape[0]), tuple(sorted(mine)), (), outputs, lines[nodes[bits[-1]].name]
    )


def absorbed(
    sites: list[Site], builts: list[Built], gone: Mapping[str, Sequence[str]], deps: Mapping[str, int]
) -> list[Site]:
    """Shares the vanished nodes out, by name: each went into the last Region on which it depends, and so did those in
    whose place it stood."""
    masks = [built.mask for built in builts]
    mine: list[list[str]] = [[] for _ in sites]
    for name, replaced in gone.items():
        owners = [i for i, mask in enumerate(masks) if deps[name] & mask]
        if owners:
            mine[max(owners, key=lambda i: masks[i])] += [name, *replaced]
    return [
        Site(s.name, s.region, s.m, s.laws, tuple(m), s.outputs, s.source) for s, m in zip(sites, mine, strict=True)
    ]
