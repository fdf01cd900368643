"""The joint pass: read, derive, write. All of it or nothing: an error leaves the graph as it was.

Dynamo's graph arrives here after AOTAutograd and Inductor's decompositions, before partitioning and before Inductor's
own patterns; the no_grad graph passes the same place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.core.sweep import Sweep
from coda_inductor.inductor import sweeps
from coda_inductor.inductor.bare import BARE, NONE_SLOWER, Slower, bare_products, write_bare
from coda_inductor.inductor.casts import Cast, round_first, write_wide
from coda_inductor.inductor.emit import emit
from coda_inductor.inductor.tables import Table, store_tables
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.lift import lift
from coda_inductor.rewrite import softmax
from coda_inductor.rewrite.build import Built, build
from coda_inductor.rewrite.draft import Computed
from coda_inductor.rewrite.draft import Refusal as Refused
from coda_inductor.rewrite.halves import OF_HEADS
from coda_inductor.rewrite.laws import LAWS, SOFTMAX
from coda_inductor.rewrite.plan import Plan
from coda_inductor.rewrite.search import plan
from coda_inductor.rewrite.softmax import Normaliser
from coda_inductor.rewrite.sources import statistics


@dataclass(frozen=True, slots=True)
class Site:
    """One Region in the graph. `absorbed` are the original nodes whose work now happens in it, `outputs` what it
    supplies."""

    name: str
    region: Region
    m: str
    laws: tuple[str, ...]
    absorbed: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that follows a product but stays with Inductor: the first condition that failed, and the user's line."""

    node: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rewrite did."""

    sites: tuple[Site, ...] = ()
    refused: tuple[Refusal, ...] = ()
    opaque: tuple[Refusal, ...] = ()
    """Operations that were not understood at all."""
    tables: tuple[Table, ...] = ()
    """What is computed once for many elements."""
    casts: tuple[Cast, ...] = ()
    """What was cast elsewhere than it is now."""
    swept: tuple[sweeps.Kept, ...] = ()
    """What stands beside attention in one kernel of ours."""
    seconds: float = 0.0
    backward: tuple[int, int] = (0, 0)
    """Of a contest: how many of the backward's Regions, as they were first derived, are kept, and how many there were.
    (One counts as kept if all its products are in Regions, whichever.)"""
    timings: tuple[dict[str, Any], ...] = ()
    """What the contest measured, in its order: the digests of a group's Regions, "ms" and Inductor's "baseline_ms",
    and, unless these decided, the same two with "busy_" before them: what they add to a busy GPU, or, of long calls,
    the same again (timing.Times). Where it says "against", the other side is not Inductor but the program without a
    law, with these Regions."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Products (by bit) to leave to Inductor, with the reason, and those (a bit set) whose operands stay as written."""

    banned: dict[int, str] = field(default_factory=dict)
    undeferred: int = 0

    @property
    def settled(self) -> bool:
        """Does everything stay as it is?"""
        return not self.banned and not self.undeferred


Legal = Callable[[Region | Sweep], None]
Decide = Callable[[Plan, list[Built]], Verdict]
NO_CONTEST: Decide = lambda plan, builts: Verdict()  # noqa: E731


def is_joint(graph: fx.Graph) -> bool:
    """Does the graph hold a forward and its backward?"""
    return any(map(g.is_tangent, graph.nodes))


def rewrite(
    graph: fx.Graph,
    settings: Settings,
    target: str = "reference",
    legal: Legal = lambda record: None,
    decide: Decide = NO_CONTEST,
    slower: Slower = NONE_SLOWER,
    slower_sweeps: sweeps.Slower = sweeps.NONE_SLOWER,
) -> Report:
    """Rewrites the graph in place. `legal` raises Unsupported for what the target cannot run; `decide` says what a
    measurement found slower, `slower` of which products that do nothing else, `slower_sweeps` of which Sweeps.
    Raises BrokenInvariant for a bug; the owning module then has its graph back as it was."""
    start = time.perf_counter()
    backup = g.copied(graph)
    guards = _guards(graph)
    try:
        report = _rewrite(graph, settings, target, legal, decide, slower, slower_sweeps)
        if _guards(graph) != guards:
            raise BrokenInvariant("the rewrite added a guard")
    except BaseException:
        assert graph.owning_module is not None
        graph.owning_module.graph = backup
        raise
    return dataclasses.replace(report, seconds=time.perf_counter() - start)


def _rewrite(
    graph: fx.Graph,
    settings: Settings,
    target: str,
    legal: Legal,
    decide: Decide,
    slower: Slower,
    slower_sweeps: sweeps.Slower,
) -> Report:
    device = next((n.meta["val"].device for n in graph.nodes if n.target in g.MATRIX_PRODUCTS), None)
    casts = round_first(graph) if allowed(CASTS, NAMES, settings) else ()
    made, builts, normalisers, unhalved = _settled(graph, settings, legal, decide)
    lifted = made.program.lifted
    names = {n.name: n for n in graph.nodes}
    lines = {n.name: g.source_line(n) for n in graph.nodes}
    terms = {n.name: lifted.deps[n] for n in graph.nodes if n.op == "call_function" and not g.is_view(n)}
    nodes = {bit: product.node for bit, product in lifted.products.items()}
    made.firings += [normaliser.firing(made.program) for normaliser in normalisers]
    fired = _fired(made)
    refused = tuple(Refusal(r.node.name, _reason(made, r, unhalved), lines[r.node.name]) for r in made.refused)
    reasons = {n.name: why for n, why in lifted.reading.opaque.items() if n.op == "call_function"}
    opaque = tuple(Refusal(name, why, lines[name]) for name, why in reasons.items())
    sites = [_site(i, b, nodes, fired, lines) for i, b in enumerate(builts)]
    emit(made, builts, target)
    left = {n.name for n in graph.nodes}
    gone = [n for n in names if n in terms and n not in left]
    tables = store_tables(graph) if allowed(TABLES, NAMES, settings) else ()
    sites, slow = _absorb(sites, builts, gone, terms), tuple[Refusal, ...]()
    if device is not None:
        casts += write_wide(graph, device) if may_widen(settings, target) else ()
        bare, slow = _bare(graph, settings, target, legal, slower, device, len(sites))
        sites += bare
    swept = tuple[sweeps.Kept, ...]()
    if allowed(SWEEPS, NAMES, settings):
        swept, apart = _sweeps(graph, settings, target, legal, slower_sweeps)
        slow += apart
    return Report(tuple(sites), refused + slow, opaque, tables, casts, swept)


def may_widen(settings: Settings, target: str) -> bool:
    """May products leave in float32? None does on the CPU, and of cuBLAS's rivals under max_autotune none can."""
    tuned = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    return target != "reference" and settings.numerics != "strict" and allowed(CASTS, NAMES, settings) and not tuned


def _bare(
    graph: fx.Graph,
    settings: Settings,
    target: str,
    legal: Legal,
    slower: Slower,
    device: torch.device,
    count: int,
) -> tuple[list[Site], tuple[Refusal, ...]]:
    """What is left of the products as bare Regions, where none is slower: their sites, after `count` others, and the
    rest."""
    found, losers = bare_products(graph, legal, device) if allowed(BARE, REGION_KINDS, settings) else ({}, {})
    losers |= slower(found)
    refused = tuple(Refusal(n.name, why, g.source_line(n)) for n, why in losers.items())
    kept = {n: made for n, made in found.items() if n not in losers}
    places = [(str(n.meta["val"].shape[0]), n.name, g.source_line(n)) for n in kept]
    outputs = write_bare(graph, target, kept)
    sites = [
        Site(f"r{i}", region, m, (), (name,), (out.name,), line)
        for i, ((region, _), (m, name, line), out) in enumerate(zip(kept.values(), places, outputs, strict=True), count)
    ]
    return sites, refused


def _sweeps(
    graph: fx.Graph, settings: Settings, target: str, legal: Legal, slower: sweeps.Slower
) -> tuple[tuple[sweeps.Kept, ...], tuple[Refusal, ...]]:
    """What stands beside attention as Sweeps, where none is slower, and the rest."""
    found, refused = sweeps.found(graph, settings.numerics == "strict", legal)
    losers = slower(found)
    for i, why in losers.items():
        refused |= dict.fromkeys(found[i].outputs, why)
    apart = tuple(Refusal(n.name, why, g.source_line(n)) for n, why in refused.items())
    kept, backup = [made for i, made in enumerate(found) if i not in losers], g.copied(graph) if found else graph
    try:
        return sweeps.write(graph, target, kept), apart
    except Unsupported as why:  # collectives in another order, a size that no node holds: the Regions stay
        assert graph.owning_module is not None
        graph.owning_module.graph = backup
        lost = ((n.name, g.source_line(n)) for made in kept for n in made.outputs)
        return (), apart + tuple(Refusal(name, why.what, line) for name, line in lost)


def _settled(
    graph: fx.Graph, settings: Settings, legal: Legal, decide: Decide
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
        builts = [build(made, draft) for draft in made.unique()]
        illegal = _illegal(builts, legal, settings)
        verdict = Verdict(illegal) if illegal else decide(made, builts)
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


def _reason(made: Plan, refused: Refused, unhalved: dict[int, str]) -> str:
    """Why a node is refused. What heads are refused for whose product (by bit) is `unhalved` follows from why it is."""
    if refused.reason not in OF_HEADS:
        return refused.reason
    hosts = made.program.new[made.program.lifted.term[refused.node]].hosts
    return unhalved.get(hosts.bit_length() - 1, refused.reason)


def _untaken(normalisers: list[Normaliser], builts: list[Built], banned: dict[int, str]) -> list[Normaliser]:
    """The normalisers that no Region takes, or only one that is to go."""
    kept = [b.draft for b in builts if not any(acc.bit in banned for acc in b.draft.space.accs)]
    taken = {node for draft in kept for node in draft.totals}
    return [n for n in normalisers if n.node not in taken]


LAW_NAMES = frozenset(law.name for law in LAWS)
KINDS = {
    "pair": "two products in one tile, as gate and up",
    "summed": "two products in one sum, as the gradients of what gate and up read",
    "halves": "the halves of each head side by side, as for rotary embeddings",
    "statistic": "an epilogue that also sums, over its rows as for a norm or over the tokens",
    "pointwise": "any other epilogue",
    BARE: "a large product with nothing beside it, where cuBLAS is slower",
}
REGION_KINDS = frozenset(KINDS)
CASTS, TABLES, SWEEPS = "casts", "tables", "sweeps"
PASSES = {
    SWEEPS: "no Region: what reads what attention's backward left is one kernel of ours",
    TABLES: "no Region: sines and cosines that many elements read are computed once",
    CASTS: "no Region: what a product returns in float32 leaves it so; what is copied and rounded is rounded first",
}
NAMES = LAW_NAMES | REGION_KINDS | PASSES.keys()
"""What _DISABLE and _ONLY may name."""


def laws_of(settings: Settings) -> frozenset[str]:
    """The laws that the derivation may use."""
    return frozenset(name for name in LAW_NAMES if allowed(name, LAW_NAMES, settings) and settings.numerics != "strict")


def kind(region: Region) -> str:
    """The region's kind, as _DISABLE and _ONLY name it."""
    if region.half:
        return "halves"
    if region.summed:
        return "summed"
    return "pair" if len(region.products) > 1 else "statistic" if region.reductions else "pointwise"


def allowed(name: str, among: frozenset[str], settings: Settings) -> bool:
    """May a law or a kind of Region be used, or one of PASSES? _ONLY restricts the laws if it names one, and the kinds
    if it names one; if it names anything, a pass must be named, and if it names passes alone, nothing else is used."""
    only = settings.only & among
    if name in PASSES or settings.only <= PASSES.keys():
        only = settings.only
    return name not in settings.disable and (not only or name in only)


def _illegal(builts: list[Built], legal: Legal, settings: Settings) -> dict[int, str]:
    losers: dict[int, str] = {}
    for built in builts:
        try:
            if not allowed(kind(built.region), REGION_KINDS, settings):
                raise Unsupported(f"regions of the kind {kind(built.region)!r} are switched off")
            legal(built.region)
        except Unsupported as why:
            losers |= {acc.bit: why.what for acc in built.draft.space.accs}
    return losers


def _fired(made: Plan) -> dict[object, set[str]]:
    """The laws that made each product (by bit) and each sum what it is."""
    fired: dict[object, set[str]] = {}
    for f in made.firings:
        for what in [f.product] if f.product >= 0 else statistics(f.after):
            fired.setdefault(what, set()).add(f.law)
    return fired


def _site(
    i: int, built: Built, nodes: dict[int, fx.Node], fired: dict[object, set[str]], lines: dict[str, str]
) -> Site:
    bits = [acc.bit for acc in built.draft.space.accs]
    value = g.tensor(nodes[bits[-1]])
    assert value is not None
    beside = [s for x in built.inputs if isinstance(x, Computed) for s in statistics(x.term)]
    laws = tuple(sorted({law for what in (*bits, *built.draft.sums, *beside) for law in fired.get(what, ())}))
    outputs = tuple(n.name for n in built.draft.supplies)
    return Site(f"r{i}", built.region, str(value.shape[0]), laws, (), outputs, lines[nodes[bits[-1]].name])


def _absorb(sites: list[Site], builts: list[Built], gone: list[str], deps: dict[str, int]) -> list[Site]:
    """Shares the vanished nodes out: each went into the last Region on which it depends."""
    masks = [built.mask for built in builts]
    mine: list[list[str]] = [[] for _ in sites]
    for name in gone:
        owners = [i for i, mask in enumerate(masks) if deps[name] & mask]
        if owners:
            mine[max(owners, key=lambda i: masks[i])].append(name)
    return [
        Site(s.name, s.region, s.m, s.laws, tuple(m), s.outputs, s.source) for s, m in zip(sites, mine, strict=True)
    ]


def _guards(graph: fx.Graph) -> int:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return len(value.node.shape_env.guards)
    return 0
