"""Derives, asks the judges, and derives again without what they found, until they let all of it pass."""

from __future__ import annotations

from torch import fx

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.passes.switches import REGION_KINDS, allowed, kind, laws_of
from coda_inductor.patterns.lift import lift
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.plan.search import plan
from coda_inductor.rewrite import softmax
from coda_inductor.rewrite.laws import SOFTMAX
from coda_inductor.rewrite.softmax import Normaliser
from coda_inductor.tuning.verdicts import Judges, Legal, Verdict


def settled(
    graph: fx.Graph, settings: Settings, judges: Judges
) -> tuple[Plan, list[Built], list[Normaliser], dict[int, str]]:
    """The plan of which nothing is illegal or loses, its Regions, the normalisers that they take, and why products (by
    bit) do without the halves of their heads. A normaliser that none takes, or whose Region is not kept, is first
    written as it was."""
    laws = laws_of(settings)
    normalisers = softmax.shorten(graph) if SOFTMAX.name in laws else []
    banned, undeferred, unhalved, why_unhalved = dict[int, str](), 0, frozenset[int](), dict[int, str]()
    unsummed, only_summed = frozenset[int](), dict[int, str]()
    lifted = lift(graph, rounding=settings.numerics == "strict")
    while True:
        made = plan(lifted, laws, banned, undeferred, unhalved, unsummed, only_summed)
        unhalved |= made.program.unhalved
        builts = made.builts
        illegal = _illegal(builts, judges.legal, settings)
        verdict = Verdict(illegal) if illegal else judges.decide(made, builts)
        halved = _lost(verdict.banned, [b for b in builts if b.region.half])
        apart = _lost(illegal, [b for b in builts if b.added is not None])
        wide = [b for b in builts if b.added is not None and not b.only_sums]
        bare = {bit: why for bit, why in _lost(verdict.banned, wide).items() if not illegal and bit not in only_summed}
        if halved or apart or bare:
            # It may win without the halves of its heads, with no other product in its sum, or with nothing beside the
            # sum. (As two products, with the rest, it lost where it did as one: Llama 1B and width 8192, at 43c6b12.)
            unhalved, unsummed = unhalved | halved.keys(), unsummed | apart.keys()
            only_summed |= bare
            why_unhalved |= halved
            banned |= {bit: why for bit, why in verdict.banned.items() if bit not in halved | apart | bare}
            undeferred |= verdict.undeferred
            continue
        if (verdict.settled or verdict.banned) and (untaken := _untaken(normalisers, builts, verdict.banned)):
            for normaliser in untaken:
                normaliser.restore()
            normalisers = [n for n in normalisers if n not in untaken]
            lifted = lift(graph, rounding=settings.numerics == "strict")
            continue  # without it a Region may be legal, or win
        if verdict.settled:
            return made, builts, normalisers, why_unhalved
        if not (verdict.banned.keys() - banned.keys() or verdict.undeferred & ~undeferred):
            raise BrokenInvariant("the verdicts do not settle")
        banned |= verdict.banned
        undeferred |= verdict.undeferred


def _lost(banned: dict[int, str], builts: list[Built]) -> dict[int, str]:
    """The products, by bit, of those of these Regions that lost, with the reason."""
    bits = {acc.bit for b in builts for acc in b.products}
    return {bit: why for bit, why in banned.items() if bit in bits}


def _untaken(normalisers: list[Normaliser], builts: list[Built], banned: dict[int, str]) -> list[Normaliser]:
    """The normalisers that no Region takes, or only one that is to go."""
    kept = [b.draft for b in builts if not any(acc.bit in banned for acc in b.draft.space.accs)]
    taken = {node for draft in kept for node in draft.totals}
    return [n for n in normalisers if n.node not in taken]


def _illegal(builts: list[Built], legal: Legal, settings: Settings) -> dict[int, str]:
    losers: dict[int, str] = {}
    for built in builts:
        try:
            if not allowed(kind(built.region), REGION_KINDS, settings):
                raise Unsupported(f"regions of the kind {kind(built.region)!r} are switched off")
            legal(built.region)
        except Unsupported as why:
            losers |= {acc.bit: why.said for acc in built.draft.space.accs}
    return losers
