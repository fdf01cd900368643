"""Derives, has it decided, and derives again within more limits, until all of it is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from coda_inductor.core.blocks import pitch
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.heads import over_heads
from coda_inductor.core.settings import Settings
from coda_inductor.passes.switches import REGION_KINDS, allowed, kind, laws_of
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.lift import lift
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.plan.search import plan
from coda_inductor.rewrite import softmax
from coda_inductor.rewrite.laws import SOFTMAX
from coda_inductor.rewrite.limits import NONE, Limits
from coda_inductor.rewrite.softmax import Normaliser
from coda_inductor.schedule.kinds import seen
from coda_inductor.tuning.verdicts import Decisions, Legal

aten = g.aten


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan of which nothing is illegal or loses, and the normalisers that its Regions take."""

    plan: Plan
    normalisers: list[Normaliser]


def settled(graph: fx.Graph, settings: Settings, decisions: Decisions, limits: Limits = NONE) -> Settled:
    """What is derived from the graph within the limits, and accepted. A normaliser that no Region takes, or whose
    Region is not kept, is first written as it was."""
    laws = laws_of(settings)
    normalisers = softmax.shorten(graph) if SOFTMAX.name in laws else []
    lifted = lift(graph, rounding=settings.numerics == "strict")
    while True:
        made = plan(lifted, laws, limits)
        limits |= Limits(whole_heads=made.program.limits.whole_heads, unsummed_heads=made.program.limits.unsummed_heads)
        illegal = _illegal(made.builts, decisions.legal, settings)
        verdict = Limits(illegal) if illegal else decisions.decide(made, made.builts)
        if other := _otherwise(made, illegal, verdict, limits):
            limits |= other
            continue
        if untaken := _untaken(normalisers, made.builts, verdict):
            for normaliser in untaken:
                normaliser.restore()
            normalisers = [n for n in normalisers if n not in untaken]
            lifted = lift(graph, rounding=settings.numerics == "strict")
            continue  # without it a Region may be legal, or win
        if not verdict:
            return Settled(made, normalisers)
        if limits.holds(verdict):
            raise BrokenInvariant("the verdicts do not settle")
        limits |= verdict


def _otherwise(made: Plan, illegal: dict[int, str], verdict: Limits, limits: Limits) -> Limits:
    """What of the verdict may win in another form: without what it makes again of the forward, which then keeps it;
    without sums over heads; without the halves of its heads, with no other product in its sum, or with nothing beside
    the sum. (As two products, with the rest, it lost where it did as one: Llama 1B and width 8192, H200.) Nothing if
    there is no such form."""
    builts = made.builts
    laden = [b for b in builts if made.spared(b.draft)]
    if lighter := _lost(verdict.banned, laden):
        never = frozenset(n for b in laden if any(a.bit in lighter for a in b.products) for n in made.spared(b.draft))
        banned = {bit: why for bit, why in verdict.banned.items() if bit not in lighter}
        return Limits(banned, verdict.undeferred, never=never)
    if summed := _lost(verdict.banned, [b for b in builts if over_heads(b.region)]):
        banned = {bit: why for bit, why in verdict.banned.items() if bit not in summed}
        return Limits(banned, verdict.undeferred, unsummed_heads=summed)
    halved = _lost(verdict.banned, [b for b in builts if b.region.half])
    apart = _lost(illegal, [b for b in builts if b.added is not None])
    wide = _lost(verdict.banned, [b for b in builts if b.added is not None and not b.only_sums])
    alone = {bit: why for bit, why in wide.items() if not illegal and bit not in limits.only_accumulated}
    if not (halved or apart or alone):
        return NONE
    banned = {bit: why for bit, why in verdict.banned.items() if bit not in halved | apart | alone}
    return Limits(banned, verdict.undeferred, halved, frozenset(apart), alone)


def _lost(banned: Mapping[int, str], builts: list[Built]) -> dict[int, str]:
    """The products, by bit, of those of these Regions that lost, with the reason."""
    bits = {acc.bit for b in builts for acc in b.products}
    return {bit: why for bit, why in banned.items() if bit in bits}


def _untaken(normalisers: list[Normaliser], builts: list[Built], verdict: Limits) -> list[Normaliser]:
    """The normalisers that no Region takes, or only one that is to go; none while operands are put back."""
    if verdict and not verdict.banned:
        return []
    kept = [b.draft for b in builts if not any(acc.bit in verdict.banned for acc in b.draft.space.accs)]
    taken = {node for draft in kept for node in draft.totals}
    return [n for n in normalisers if n.node not in taken]


def _illegal(builts: list[Built], legal: Legal, settings: Settings) -> dict[int, str]:
    losers: dict[int, str] = {}
    for built in builts:
        try:
            if not allowed(kind(built.region), REGION_KINDS, settings):
                raise Unsupported(f"regions of the kind {kind(built.region)!r} are switched off")
            legal(built.region)
            if settings.target != "reference":  # whose rows are dense
                _require_free_layout(built)
        except Unsupported as why:
            losers |= {acc.bit: why.said for acc in built.draft.space.accs}
    return losers


def _require_free_layout(built: Built) -> None:
    """Raises Unsupported if a kernel would write rows farther apart than they are long, and somebody sees it."""
    width = built.region.width
    if pitch(width) != width and any(map(seen, built.draft.supplies)):
        what = f"n = {width} is not a multiple of 8, and the graph returns what is made, or asks where it lies"
        raise Unsupported(what, hint="pad the weight, or return less")
